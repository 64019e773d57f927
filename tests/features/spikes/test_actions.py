"""What a run does about spikes: skipped updates, rollback, giving up.
The detector alone is in test_detector, the policy in test_policy."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint import reading, store
from megatron.config.plan.tables import memory_lines
from megatron.features.spikes.actions import BUDGET, EXIT_CODE, SpikeActions
from megatron.features.spikes.detector import LEVEL_SHIFT
from megatron.features.spikes.policy import Rollback
from megatron.features.spikes.rollback import RollbackBuffer
from megatron.training.launch.process import Refusal
from megatron.training.step import train_step
from tests.campaigns.e2e.programs import fork_program
from tests.core.training.tiny_run import make_run, micro_batches, samples
from tests.features.spikes.injected import inject, noisy
from tests.forkrun import run_ranks
from tests.problems import numbers
from tests.runs import SMALL, Finished, plot, same_tensors, train, with_flags, write_text

BASE = [*SMALL, "--split", "100,0,0", "--eval-iters", "0", "--save-interval", "15"]
EXACT = (
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "consumed_samples",
    "loss_scale",
    "spike",
    "spike_sigma",
)
SPIKES = {31: 2.0, 32: 1.7}  # so 33 is the first to be back, and 30 to 33 are skipped


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 800)


def argv(folder: Path, data: str, *extra: str, iterations: int = 40) -> list[str]:
    return with_flags(
        BASE,
        "--data-path",
        data,
        "--train-iters",
        str(iterations),
        "--save",
        str(folder / "save"),
        *extra,
    )


def run(
    folder: Path,
    data: str,
    *extra: str,
    bad: Mapping[int, float] | None = None,
    world: int = 1,
    iterations: int = 40,
    **more,
) -> Finished:
    return train(
        folder,
        argv(folder, data, *extra, iterations=iterations),
        world,
        hook=functools.partial(inject, bad or {}),
        **more,
    )


def ended(
    rank: int, world: int, words: list[str], folder: str, bad: Mapping[int, float]
) -> tuple[int, str, str]:
    """A whole program to its end: exit code, stdout, stderr."""
    program = fork_program(words, Path(folder), before=functools.partial(inject, bad))
    return program.end(120.0), program.out, program.err


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


# --- rewind


def states_agree(one: Path, other: Path, iteration: int) -> None:
    """All that two checkpoints have beside tensors, but who asked for the skips and what they went
    back for."""
    mine, its = (
        json.loads((store.iteration_directory(root, iteration) / "state.json").read_text())
        for root in (one, other)
    )
    for state in (mine, its):
        del state["skips"], state["features"]["spikes"]["rewinds"], state["history"]
    assert mine == its


def validations(done: Finished) -> dict[int, float]:
    """The losses of evaluations by iteration, of repeated ones the last."""
    return {iteration: loss for _, iteration, loss in done.evaluations}


def rewound_is_restarted(
    tmp_path: Path, data: str, back: int, *extra: str, source: str, world: int = 1
) -> Finished:
    """A run that goes back by itself, against one that is started again from a checkpoint of
    iteration `back`."""
    extra += "--eval-iters", "1", "--eval-interval", "7", "--split", "90,10,0"
    mine = run(
        tmp_path / "mine",
        data,
        "--spike-action",
        "rewind",
        *extra,
        bad=SPIKES,
        world=world,
    )
    [told] = lines_of(mine.first_rank_log, "rewind ")
    assert numbers(told)[:4] == [33, back, 1, 31] and f"({source})" in told, mine.log
    assert [
        json.loads(line)["ranges"] for line in (mine.save / "skips.jsonl").read_text().splitlines()
    ] == ["30-33"]
    its = tmp_path / "its"
    run(its, data, "--exit-interval", str(back), *extra, "--spike-action", "log", world=world)
    other = run(
        its,
        data,
        "--load",
        str(its / "save"),
        "--train-range-to-skip",
        "30",
        "33",
        *extra,
        "--spike-action",
        "log",
        bad=SPIKES,
        world=world,
    )
    assert mine.series(*EXACT) == other.series(*EXACT)
    assert validations(mine) == validations(other) and validations(mine).keys() == {
        7,
        14,
        21,
        28,
        35,
        40,
    }
    assert [row["iteration"] for row in mine.rows if row["skipped"]] == [30, 31, 32, 33]
    for iteration in (30, 40):
        same_tensors(mine.tensors(iteration), other.tensors(iteration))
        states_agree(mine.save, other.save, iteration)
    return mine


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param((), id="plain", marks=pytest.mark.sweep),
        pytest.param(
            ("--async-save", "--num-workers", "1"),
            id="async save, a worker",
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_rewind_from_memory_is_the_run_started_again(tmp_path, data, extra):
    rewound_is_restarted(
        tmp_path, data, 20, "--spike-snapshot-interval", "10", *extra, source="a snapshot in memory"
    )


@pytest.mark.campaign
def test_rewind_to_a_checkpoint_is_the_run_started_again(tmp_path, data):
    """Also of fp16 with its scale."""
    extra = (
        "--spike-snapshot-interval",
        "0",
        "--fp16",
        "--initial-loss-scale",
        "65536",
        "--loss-scale-window",
        "12",
    )
    mine = rewound_is_restarted(tmp_path, data, 15, *extra, source="a checkpoint")
    assert {row["loss_scale"] for row in mine.rows} > {65536.0}


@pytest.mark.campaign
def test_rewind_with_delayed_fp8_scales(tmp_path, data):
    """They go back too, and so does what the abandoned steps have seen."""
    extra = (
        "--spike-snapshot-interval",
        "10",
        "--bf16",
        "--fp8-format",
        "hybrid",
        "--fp8-amax-history-len",
        "4",
    )
    rewound_is_restarted(tmp_path, data, 20, *extra, source="a snapshot in memory")


LAYOUTS = {
    "dp2, distributed optimizer, both overlaps, bf16": (
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--bf16",
    ),
    "tp2, sequence parallel": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
}
MEMORY = ("10", 20, "a snapshot in memory")
DISK = ("0", 15, "a checkpoint")
PLACES = [
    pytest.param(
        layout,
        place,
        id=f"{layout}, from {place[2][2:]}",
        marks=[pytest.mark.sweep]
        if (place == MEMORY) == (layout == "pp2") or layout.startswith("tp2")
        else [pytest.mark.campaign],
    )
    for layout, place in itertools.product(LAYOUTS, (MEMORY, DISK))
]


@pytest.mark.parametrize(("layout", "place"), PLACES)
def test_rewind_in_parallel_layouts(tmp_path, data, layout, place):
    every, back, source = place
    rewound_is_restarted(
        tmp_path,
        data,
        back,
        "--spike-snapshot-interval",
        every,
        *LAYOUTS[layout],
        source=source,
        world=2,
    )


@pytest.mark.campaign
def test_the_same_command_goes_on_after_a_rewind_and_a_kill(tmp_path, data):
    """Killed between rewind and the next save it resumes where it went back to; nothing is trained
    or skipped twice."""
    straight = run(
        tmp_path / "straight",
        data,
        "--spike-action",
        "rewind",
        "--spike-snapshot-interval",
        "10",
        bad=SPIKES,
    )
    killed = tmp_path / "killed"
    words = (
        "--spike-action",
        "rewind",
        "--spike-snapshot-interval",
        "10",
        "--load",
        str(killed / "save"),
    )
    run(killed, data, *words, bad=SPIKES, kill_at=33 + 5)
    done = run(killed, data, *words, bad=SPIKES)
    assert done.resumes
    assert len(lines_of(done.log, "rewind ")) == 1, done.log
    same_tensors(done.tensors(40), straight.tensors(40))
    assert done.series(*EXACT) == straight.series(*EXACT)
    assert len((done.save / "skips.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "kind", [{}, {"bf16": True, "fp64": False}, {"optimizer": "sgd"}], ids=["fp64", "bf16", "sgd"]
)
def test_two_copies_are_kept_of_the_size_that_a_dry_run_tells(kind):
    made = make_run(spike_action="rewind", spike_snapshot_interval=4, **kind)
    policy = SpikeActions("rewind")
    buffer = RollbackBuffer(made, None, policy, 2, 4)
    begun = made.model[0].decoder.final_layernorm.weight.clone()
    for n in range(11):
        made.progress.iteration = n
        buffer.maybe_snapshot()
        torch.nn.init.constant_(made.model[0].decoder.final_layernorm.weight, n)
    copies = buffer.snapshots
    assert [one.iteration for one in copies] == [4, 8]
    (told,) = (line for line in memory_lines(made.config, made.plan) if "host memory" in line)
    for changes in ({"spike_action": "skip-update"}, {"spike_snapshot_interval": 0}):
        other = make_run(**{"spike_action": "rewind", **changes})
        assert not any("host memory" in line for line in memory_lines(other.config, other.plan))
    nbytes = sum(tensor.nbytes for one in copies for tensor in one.tensors)
    assert f" {nbytes:,} bytes " in told
    buffer.roll_back(Rollback(1, 6, 10, 7))
    assert made.progress.iteration == 4 and not torch.equal(
        begun, made.model[0].decoder.final_layernorm.weight
    )
    assert set(made.model[0].decoder.final_layernorm.weight.tolist()) == {3.0}
    assert made.plan.skips.ranges == ((6, 10),) and [one.iteration for one in copies] == [4, 8]
    assert [one.iteration for one in buffer.snapshots] == [4]
    buffer.roll_back(Rollback(2, 2, 30, 7))  # from the oldest there is on
    assert made.plan.skips.ranges == ((5, 30),) and policy.rewinds[-1] == Rollback(2, 5, 30, 7)
    with pytest.raises(Refusal, match=r"\[rewind-without-snapshot\]$") as caught:
        buffer.roll_back(Rollback(1, 1, 3, 2))
    assert caught.value.code == EXIT_CODE


def test_no_copy_is_made_while_a_spike_may_grow():
    made = make_run(spike_action="rewind", spike_snapshot_interval=1)
    policy = SpikeActions("rewind")
    buffer = RollbackBuffer(made, None, policy, 2, 1)
    buffer.maybe_snapshot()
    for n, (loss, norm) in enumerate([*noisy(100), (9.0, 1.0), (9.0, 1.0), (3.0, 1.0)], 1):
        made.progress.iteration = n
        policy.check(n, loss, norm)
        buffer.maybe_snapshot()
        assert buffer.snapshots[-1].iteration == (100 if n in (101, 102) else n)


# --- skip-update


def contents(one) -> dict[str, bytes]:
    """All that an update may change: weights, optimizer, counters, scales of fp8."""
    tensors = {p.sharding.name: p.data for p in one.model.parameters()} | one.optimizer.tensors()
    tensors |= {name: tensor for name, (_, tensor) in one.fp8.tensors().items()} if one.fp8 else {}
    found = {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }
    steps = [
        state["step"].item() for state in one.optimizer.inner.state.values() if "step" in state
    ]
    return found | {"counters": json.dumps([one.optimizer.counters(), steps]).encode()}


def nan_gradient(batch, model):
    """A forward step whose loss is finite and its gradient is not."""
    loss, tokens, _ = plot().forward_step(batch, model)
    loss = loss * 1.0
    loss.register_hook(lambda gradient: gradient * math.nan)
    return loss, tokens


KINDS = {
    "adam": {},
    "sgd": {"optimizer": "sgd"},
    "no clipping": {"clip_grad": 0.0},
    "bf16": {"bf16": True, "fp64": False},
    "fp8 with delayed scales": {
        "bf16": True,
        "fp64": False,
        "fp8": "hybrid",
        "fp8_amax_history_len": 4,
    },
    "fp16 with its scale": {"fp16": True, "fp64": False, "initial_loss_scale": 1024.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_gradient_or_a_spike_changes_nothing(kind):
    """Weights, moments, step count and scale stay, bit for bit; the next step is as if nothing had
    been."""
    one, other = (make_run(**KINDS[kind]) for _ in range(2))
    for made in (one, other):
        policy = SpikeActions("skip-update")
        made.before_update.append(policy.before_update)
        for group in made.optimizer.param_groups:
            group["lr"] = 0.01
        outcome = train_step(made, plot().forward_step, micro_batches(samples(), 2), 1)
        assert outcome.skipped is None
        noise = np.random.default_rng(0).normal(0, 0.01, (100, 2))
        for n in range(100):
            policy.check(
                2 + n, outcome.loss + noise[n, 0], outcome.grad_norm * math.exp(noise[n, 1])
            )
    before = contents(one)
    if "fp16" not in kind:  # where that is an overflow, and the scale's affair
        outcome = train_step(one, nan_gradient, micro_batches(samples(seed=1), 2), 200)
        assert (
            (outcome.skipped, outcome.reason) == ("spike", "nonfinite")
            and math.isfinite(outcome.loss)
            and math.isnan(outcome.grad_norm)
        )
        assert contents(one) == before
    for times in (3.0, math.nan) if "fp16" not in kind else (3.0,):

        def worse(batch, model, times=times):
            loss, tokens, _ = plot().forward_step(batch, model)
            return loss * times, tokens

        outcome = train_step(one, worse, micro_batches(samples(seed=2), 2), 201)
        assert outcome.reason == ("spike" if times == 3.0 else "nonfinite"), outcome
        assert contents(one) == before
    for made in (one, other):
        assert (
            train_step(made, plot().forward_step, micro_batches(samples(seed=3), 2), 202).skipped
            is None
        )
    assert contents(one) == contents(other) != before


@pytest.mark.campaign
def test_a_lasting_shift_of_the_loss_ends_no_run(tmp_path, data):
    """Of a model that hardly learns, so that 20 % are out of line so early."""
    done = run(
        tmp_path,
        data,
        "--spike-action",
        "skip-update",
        "--lr",
        "1e-6",
        bad=dict.fromkeys(range(31, 201), 1.2),
        iterations=110,
    )
    skipped = [row["iteration"] for row in done.rows if row["skip_reason"] == "spike"]
    assert skipped == list(range(31, 31 + LEVEL_SHIFT)), skipped
    [told] = lines_of(done.log, "level shift ")
    assert numbers(told)[0] == 95
    assert [row["skipped"] for row in done.rows[94:]] == [0] * 16
    assert reading.load(done.save, 110).state.optimizer["step"] == 110 - LEVEL_SHIFT


@pytest.mark.campaign
def test_more_than_ten_in_a_thousand_are_too_many(tmp_path, data):
    bad = dict.fromkeys(range(2, 2 + 2 * (BUDGET + 1), 2), math.nan)
    words = argv(tmp_path, data, "--spike-action", "skip-update")
    code, out, err = run_ranks(1, ended, words, str(tmp_path), bad)[0]
    assert code == EXIT_CODE, (code, out, err)
    assert "(at 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22)" in err and err.count("\n") == 1, err
    assert reading.latest(tmp_path / "save") == 22  # nothing that was trained is lost
    words += ["--load", str(tmp_path / "save")]
    code, out, err = run_ranks(1, ended, words, str(tmp_path), {24: math.nan})[0]
    assert code == EXIT_CODE and "24)" in err and reading.latest(tmp_path / "save") == 24, (
        code,
        out,
        err,
    )
    code, out, err = run_ranks(1, ended, [*words, "--spike-action", "log"], str(tmp_path), {})[0]
    assert code == 0 and reading.latest(tmp_path / "save") == 40, (code, out, err)


# --- log, off, state


@pytest.mark.campaign
def test_log_says_it_and_changes_no_byte_and_a_resumed_run_judges_alike(tmp_path, data):
    off = run(tmp_path / "off", data, "--spike-action", "off", bad=SPIKES)
    says = run(tmp_path / "log", data, bad=SPIKES)
    same_tensors(off.tensors(40), says.tensors(40))
    assert "spike at" not in off.log and {row["spike"] for row in off.rows} == {None}
    assert [numbers(line)[0] for line in lines_of(says.log, "spike at ")] == [31, 32]
    assert [row["iteration"] for row in says.rows if row["spike"] == "loss"] == [31, 32]
    folder = tmp_path / "killed"
    words = "--load", str(folder / "save")
    run(folder, data, *words, bad=SPIKES, kill_at=32)
    again = run(folder, data, *words, bad=SPIKES)
    assert again.series(*EXACT) == says.series(*EXACT)
    states = [reading.load(run.save, 40).state for run in (again, says)]
    resumed, straight = (dataclasses.replace(state, history={}) for state in states)
    assert resumed == straight
