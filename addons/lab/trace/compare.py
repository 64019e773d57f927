"""Compares traces of ranks with each other and with the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megatron.config.plan.costs import activations
from megatron.config.plan.plan import Plan
from megatron.config.plan.state_bytes import bytes_per_rank
from megatron.config.plan.transfers import PARALLELISM, Transfer, sent_by_axis
from megatron.config.tree import Config

from .recorder import TraceError
from .simulated_group import Message
from .traced_rank import RankTrace

PEERS = ("send", "receive")
TOLERANCE = 0.01  # of memory; bytes sent are exact
SENT = "sent "


class Figure(NamedTuple):
    """A number of the trace with the plan's: of all ranks, or of the one that has `most`."""

    name: str
    traced: int
    planned: int
    most: bool = False

    @property
    def differs(self) -> bool:
        """Whether they differ, of memory by more than 1 %."""
        if self.most:
            return self.traced > self.planned
        allowed = 0 if self.name.startswith(SENT) else TOLERANCE * max(self.planned, 1)
        return abs(self.traced - self.planned) > allowed


def check_agreement(traces: Sequence[RankTrace]) -> None:
    """Raise TraceError unless the ranks of each group call the same collectives in the same order,
    and what one sends to another is what that one receives."""
    for number, trace in enumerate(traces):
        for peer in traces[number + 1 :]:
            _check_collectives(trace, peer)
            _check_pair(trace, peer)
            _check_pair(peer, trace)


def _check_collectives(first: RankTrace, second: RankTrace) -> None:
    shared = {
        message.ranks
        for _, message in (*first.messages, *second.messages)
        if message.operation not in PEERS and {first.rank, second.rank} <= set(message.ranks)
    }
    for ranks in sorted(shared):
        _compare(
            _collectives(first, ranks),
            _collectives(second, ranks),
            f"ranks {first.rank} and {second.rank} of one group call",
        )


def _check_pair(sender: RankTrace, receiver: RankTrace) -> None:
    """In each group messages carry no tags: they arrive in the order they are sent."""
    pair = (sender.rank, receiver.rank)
    for axis in sorted({axis for axis, message in sender.messages if message.ranks == pair}):
        _compare(
            _peer_calls(sender, "send", axis, pair),
            _peer_calls(receiver, "receive", axis, pair[::-1]),
            f"rank {sender.rank} sends and rank {receiver.rank} receives",
        )


def _peer_calls(trace: RankTrace, operation: str, axis: str, pair: tuple[int, int]) -> list[str]:
    return [
        f"{message.nbytes:,} bytes of {message.dtype} along {axis}"
        for name, message in trace.messages
        if name == axis and message.ranks == pair and message.operation == operation
    ]


def _collectives(trace: RankTrace, ranks: tuple[int, ...]) -> list[str]:
    return [
        _call(axis, message)
        for axis, message in trace.messages
        if message.ranks == ranks and message.operation not in PEERS
    ]


def _call(axis: str, message: Message) -> str:
    return f"{message.operation} of {message.nbytes:,} bytes of {message.dtype} along {axis}"


def _compare(first_calls: list[str], second_calls: list[str], who: str) -> None:
    if first_calls == second_calls:
        return
    ends = "nothing more"
    number, first, second = next(
        (number, a, b)
        for number, (a, b) in enumerate(
            zip([*first_calls, ends], [*second_calls, ends], strict=False)
        )
        if a != b
    )
    raise TraceError(
        f"{who} different things: call {number + 1} is {first} on one and {second} on the other; "
        "a cluster would wait until its time limit [trace-collectives-differ]"
    )


def sent(trace: RankTrace) -> dict[str, int]:
    """Bytes that the rank sends in the step by kind of parallelism, by the shortest way (a
    ring)."""
    totals: Counter[tuple[str, str, int]] = Counter()
    for axis, message in trace.messages:
        if message.operation != "receive" and axis in PARALLELISM:
            size = 1 if message.operation == "send" else len(message.ranks)
            totals[axis, message.operation, size] += message.nbytes
    axis_bytes = dict.fromkeys(("tp", "ep", "cp", "dp", "pp"), 0)
    for (axis, operation, size), nbytes in totals.items():
        axis_bytes[PARALLELISM[axis]] += Transfer(axis, operation, 1, nbytes).sent(size)
    return axis_bytes


def figures(config: Config, plan: Plan, trace: RankTrace) -> list[Figure]:
    """Memory by kind and bytes sent by kind of parallelism, each with the plan's figure."""
    planned = bytes_per_rank(config, plan, trace.stage)
    for name in config.other_models:  # which are not traced
        del planned[name]
    held = activations(config, plan, trace.stage)
    peaks = trace.kind_peaks
    states = planned["main weights"] + planned["optimizer moments"] + planned["FP8 scales"]
    rows = [
        Figure("weights", peaks.get("weights", 0), planned["weights"]),
        Figure("gradients", peaks.get("gradients", 0), planned["gradients"]),
        Figure("optimizer", peaks.get("optimizer", 0), states),
        Figure("activations", trace.activations, held.after_forward),
        Figure("peak", trace.peak, sum(planned.values()) + held.total),
    ]
    plans = sent_by_axis(config, plan, trace.stage)
    in_windows = config.model.window is not None
    return rows + [
        Figure(f"{SENT}{axis}", nbytes, plans[axis], axis == "cp" and in_windows)
        for axis, nbytes in sent(trace).items()
        if nbytes or plans[axis]
    ]
