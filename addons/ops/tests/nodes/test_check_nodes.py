"""tools/check_nodes.py and --gpu-sniff-test-interval: a slow, a flipping and a missing rank are named,
and no healthy one is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron import launcher
from megatron.addons.ops.nodes import probes, program, verdict
from megatron.addons.ops.nodes.probes import Measured, partner
from megatron.addons.ops.nodes.verdict import Finding, Tolerance, judge, outliers
from tests.problems import code_of, codes_of
from tests.runs import NO_DROPOUT, SMALL, train

NAMED = re.compile(r"(?:error: )?ranks? ([\d and]+?)(?: on|:)[^\n]*\[([a-z-]+)\]$", re.MULTILINE)


def healthy(rank: int, world: int = 8) -> Measured:
    """What a rank of a CPU measures on a ring of eight."""
    peers = {
        peer for color in (0, 1) if (peer := partner(list(range(world)), rank, color)) is not None
    }
    return Measured(
        seconds={"gemm": [1.0, 1.1, 0.9], "copy": [2.0 + 0.01 * rank] * 3},
        bits={"gemm": [7] * 3, "copy": [9] * 3},
        links={"1 MiB in a node": {peer: [0.1 + 0.001 * rank] * 3 for peer in peers}},
    )


def found(*rounds: list[Measured], kind: str = "gpu") -> list[tuple[tuple[int, ...], str]]:
    return [(ranks, code_of(text)) for ranks, text in judge(rounds, [kind] * len(rounds[0]))]


def test_slow_in_both_rounds_is_slow():
    first, second = ([healthy(rank) for rank in range(8)] for _ in range(2))
    assert found(first) == found(first, second) == []
    first[3].seconds["gemm"] = [1.3, 1.4, 0.9]  # of a GPU: above 1.1
    assert found(first) == [((3,), "rank-slow")]
    assert found(first, second) == []
    assert found(first, kind="cpu") == []
    first[3].seconds["gemm"] = [9.0, 0.9, 0.9]  # one repeat was disturbed
    assert found(first) == []


def test_two_ranks_are_compared():
    ranks = [healthy(0, 2), healthy(1, 2)]
    ranks[1].seconds["copy"] = [9.0] * 3
    assert found(ranks) == [((1,), "rank-slow")]


def test_a_wide_spread_names_nobody():
    """One standard deviation and a tenth of the mean, Megatron-LM's rule, would name two of these."""
    values = {(rank,): 1.0 + 0.07 * rank for rank in range(8)}
    assert outliers(values, Tolerance(1.1, 0.0)) == {}


def test_a_slow_link_is_not_a_slow_rank():
    ranks = [healthy(rank) for rank in range(8)]
    for rank, peer in ((3, 4), (4, 3)):
        ranks[rank].links["1 MiB in a node"][peer] = [0.9] * 3
    assert found(ranks) == [((3, 4), "link-slow")]
    for rank, peer in ((4, 5), (5, 4)):
        ranks[rank].links["1 MiB in a node"][peer] = [0.9] * 3
    assert found(ranks) == [((4,), "rank-slow")]


def test_other_bits_than_most():
    ranks = [healthy(rank) for rank in range(8)]
    ranks[5].bits["copy"][1] = 8
    assert found(ranks) == [((5,), "rank-flips")]
    assert found(ranks, [healthy(rank) for rank in range(8)]) == [((5,), "rank-flips")]
    two = [healthy(0, 2), healthy(1, 2)]
    two[1].bits["gemm"] = [8] * 3  # which of both is right?
    assert found(two) == [((0,), "rank-flips"), ((1,), "rank-flips")]
    assert verdict.judge([[*two[:1], *ranks[:2]]], ["a", "b", "b"]) == []  # other devices


def test_changed_messages_are_of_the_rank_that_all_have_in_common():
    ranks = [healthy(rank) for rank in range(8)]
    ranks[1].wrong["send/recv"] = [2]
    assert judge([ranks], ["cpu"] * 8) == [Finding((1, 2), "wrong bits in send/recv [rank-flips]")]
    ranks[3].wrong["all-to-all"] = [2]
    assert found(ranks) == [((2,), "rank-flips")]
    ranks = [healthy(rank) for rank in range(8)]
    ranks[6].sums = ["all-reduce"]
    assert found(ranks) == [((6,), "rank-flips")]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_neighbours_agree(size):
    members = list(range(10, 10 + size))
    links = set()
    for rank in members:
        for color in (0, 1):
            peer = partner(members, rank, color)
            if peer is not None:
                assert partner(members, peer, color) == rank != peer
                links.add(frozenset((rank, peer)))
    assert len(links) == {2: 1, 3: 2, 7: 6}.get(size, size)  # odd rings are open


def test_a_wrong_command_line(capsys):
    with pytest.raises(SystemExit):
        program.main(["--mib", "0", "--timeout-seconds", "-1"])
    assert len(codes_of(capsys.readouterr().err.splitlines())) == 2


def _slow_rank_1() -> None:
    real = probes.gemm

    def gemm(*args):
        call = real(*args)
        times = 8 if launcher.rank() == 1 else 1
        return lambda: [call() for _ in range(times)][-1]

    probes.gemm = gemm


@pytest.mark.campaign
def test_in_training(tmp_path):
    """A slow rank is named before the first iteration and at each interval; nothing else changes."""
    words = [
        *SMALL,
        *NO_DROPOUT,
        "--train-iters",
        "4",
        "--mock-data",
        "--gpu-sniff-test-interval",
        "2",
    ]
    done = train(tmp_path, words, world=2, hook=_slow_rank_1)
    checks = re.findall(r"check of nodes (.*?) \| ranks 2 \| named (\d)", done.log)
    assert checks == [("before training", "1"), ("at iteration 2", "1"), ("at iteration 4", "1")]
    assert NAMED.findall(done.log.replace("WARNING: ", "")) == [("1", "rank-slow")] * 3


@pytest.mark.campaign
@pytest.mark.parametrize(
    "fault",
    ["none", "slowed", *(pytest.param(x, marks=pytest.mark.sweep) for x in ("flipping", "cut"))],
)
def test_one_of_eight_is_named(fault):
    """More runs: python addons/ops/tests/nodes/faulty_ranks.py FAULT RUNS SECONDS."""
    code = {"slowed": "rank-slow", "flipping": "rank-flips", "cut": "rank-cut"}.get(fault)
    script = Path(__file__).with_name("faulty_ranks.py")
    seconds = "15" if fault == "cut" else "60"
    done = subprocess.run(
        [sys.executable, str(script), fault, "1", seconds], capture_output=True, text=True
    )
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == 1, done.stderr
    for run in runs:
        assert NAMED.findall(run["text"]) == ([(str(run["bad"]), code)] if code else []), run
        codes = [
            each for rank, each in enumerate(run["codes"]) if fault != "cut" or rank != run["bad"]
        ]
        assert set(codes) == {1 if code else 0}, run
