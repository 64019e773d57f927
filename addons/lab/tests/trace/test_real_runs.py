"""Of every layout a trace has the messages of the real run on gloo, one by one, and its peak of memory."""

from __future__ import annotations

import pytest

from megatron.addons.lab.tests.trace import memory_census
from megatron.addons.lab.tests.trace.tracing import Traced
from megatron.parallel import collectives
from tests import recorder
from tests.core.parity.layouts import CP, LLAMA, PP, SP, TP, Case, argv
from tests.core.parity.layouts import LAYOUTS as PARITY
from tests.runs import train, with_flags, write_text

QUICK = ("tp2", "dp2, distributed optimizer")
CAMPAIGN = (
    "dp4, distributed optimizer in 2 instances, overlap",
    "cp2, distributed optimizer, untied, masked documents",
    "pp2 vpp2, untied, masked documents",
    "ep2 tp2 sp dp2, all-to-all, experts",
    "cp2, experts, capacity by position",
)
PACKED = {
    "cp2 dp2, packed samples": Case(LLAMA, 4, (CP, "2")),
    "tp2 sp pp2, packed samples": Case(LLAMA, 4, (TP, "2", SP, PP, "2")),
}
LAYOUTS = PARITY | PACKED


class Gloo(str):
    """The name of a simulated backend that takes the paths of gloo: gathers by messages, scattered
    sums by an exchange of parts."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo"

    def __ne__(self, other: object) -> bool:
        return other != "gloo"

    __hash__ = str.__hash__


def cases() -> list:
    """All layouts of the parity table, with their marks."""
    found = []
    for name, case in LAYOUTS.items():
        mark = pytest.mark.campaign if name in CAMPAIGN else pytest.mark.sweep
        found.append(pytest.param(case, id=name, marks=[] if name in QUICK else [mark]))
    return found


def watch() -> None:
    """A hook: messages and memory of each step."""
    memory_census.watch()
    recorder.watch()


def watch_balanced() -> None:
    memory_census.watch()
    recorder.watch_balanced()


@pytest.mark.parametrize("case", cases())
def test_messages_and_memory_are_those_of_the_real_run(tmp_path, monkeypatch, case: Case):
    data = write_text(tmp_path / "text", 300)
    flags = argv(data, case.model, 4, *case.layout, *case.only, *filter(None, [case.precision]))
    if case in PACKED.values():
        flags = packed(flags)
    hook = watch_balanced if "--num-experts" in flags else watch
    train(tmp_path / "run", with_flags(flags, "--eval-iters", "0"), case.world, hook=hook)
    monkeypatch.setattr(collectives.dist, "get_backend", lambda group=None: Gloo("fake"))
    traced = Traced(flags, case.world)
    for rank in range(case.world):
        trace = traced.rank(rank)
        real = recorder.read(tmp_path / "run", rank)[-1]
        found = [
            recorder.Call(
                "reduce-scatter" if one.operation == "all-to-all" else one.operation, *one[1:4]
            )
            for _, one in trace.messages
        ]
        peak = memory_census.read(tmp_path / "run", rank)
        if "--moe-expert-capacity-factor" in flags:
            real, found = without_sizes(real), without_sizes(found)
        assert found == real, f"rank {rank}"
        assert abs(trace.peak / peak - 1) < 0.015, f"rank {rank}: {trace.peak} of {peak} bytes"


def packed(flags: list[str]) -> list[str]:
    """The same text as packed samples."""
    at = flags.index("--data-path")
    rest = with_flags([*flags[:at], *flags[at + 2 :]], "--split")[:-1]
    return [*rest, "--train-data-path", flags[at + 1], "--packed-samples"]


def without_sizes(calls: list[recorder.Call]) -> list[recorder.Call]:
    """Which tokens are dropped, and so not exchanged, depends on values."""
    return [
        call._replace(nbytes=0) if call.operation == "reduce-scatter" else call for call in calls
    ]
