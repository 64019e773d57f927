"""Single-bit errors in a run with --verify-step-interval 1: which are found, is the right rank
named, and is there a false alarm.

Three data-parallel replicas (with --layout each of two ranks) train with --verify-step-action
majority. --flips times one bit of one number changes on one rank: in a weight (it is set back after
the computation), a gradient, a layer's output, the sum of gradients that arrives, or a message
within a replica. Wrong is a flip of a gradient or a sum that is not found, a rank of another
replica that is named (for gradients and sums any other rank), a final checkpoint that differs from
that of a run without errors, and an alarm in the --clean iterations of CLEAN_LAYOUTS. Rounding may
remove a bit of a weight, an output or a message: it changes no gradient and does no harm.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.benchmarks.faults import inject, ranks
from tools.benchmarks.faults.inject import Fault

REPLICAS = 3
LAYOUTS = {
    "dp 3": (),
    "pp 2 dp 3": ("--pipeline-model-parallel-size", "2"),
    "tp 2 dp 3": ("--tensor-model-parallel-size", "2"),
}
# of two ranks
CLEAN_LAYOUTS = (
    "",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "--bf16 --use-distributed-optimizer",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
)
FLAGS = (
    "--lr 0.0003 --eval-iters 0 --log-format megatron --save saved --save-interval 1000000 "
    "--verify-step-action majority --verify-step-interval 1"
).split()


class Flips:
    """The flips of a rank: where its verified iterations compute, one bit is changed."""

    def __init__(self, injector: inject.Injector):
        from megatron.features.step_verification.hook import StepVerification
        from megatron.model import layer
        from megatron.parallel import collectives, ddp, pipeline

        self._injector = injector
        self._fault: Fault | None = None
        self._hashes = 0  # of this iteration: one after each computation
        self._sums = 0
        self._is_done = False
        inject.change(StepVerification, "__call__", self._call)
        inject.change(StepVerification, "_hash", self._hash)
        inject.change(layer.TransformerLayer, "forward", self._output)
        inject.change(ddp, "start_reduce_scatter_", self._arriving)
        inject.change(pipeline, "start_receive", self._arriving)
        inject.change(collectives, "start_all_reduce", self._arriving)

    def _flip(self, tensor: Any) -> Any:
        import torch

        assert self._fault is not None
        bits = tensor.detach().view(-1).view(torch.int32)
        bit = torch.tensor(1 << self._fault.bit).to(torch.int32)
        bits[self._fault.element % bits.numel()] ^= bit
        return tensor

    def _is_due(self, place: str) -> bool:
        """Is this the first call of its computation, and the fault one of this place?"""
        fault = self._fault
        computation = self._sums if place == "sum" else self._hashes + 1
        due = fault is not None and (fault.place, fault.computation) == (place, computation)
        due = due and not self._is_done
        self._is_done |= due
        return due

    def _call(self, right: Callable) -> Callable:
        def call(verify: Any, run: Any, step: Any, samples: Any, iteration: int, *more: Any) -> Any:
            dues = (self._injector.due(place, iteration) for place in inject.FLIPS)
            self._fault = next(filter(None, dues), None)
            self._hashes = self._sums = 0
            self._is_done = False
            if self._is_due("weight"):
                self._flip(run.buffers.weights)
            return right(verify, run, step, samples, iteration, *more)

        return call

    def _hash(self, right: Callable) -> Callable:
        def hashed(verify: Any) -> Any:
            buffers = verify._run.buffers
            if self._is_due("gradient"):
                self._flip(buffers.flat)
            result = right(verify)
            self._hashes += 1
            fault = self._fault
            if fault is None or fault.place != "weight":
                return result
            if self._is_due("weight") or self._hashes == fault.computation:
                self._flip(buffers.weights)  # before the second computation; back after its own
            return result

        return hashed

    def _output(self, right: Callable) -> Callable:
        def output(*args: Any, **kwargs: Any) -> Any:
            result = right(*args, **kwargs)
            if self._is_due("output"):
                self._flip(result[0] if isinstance(result, tuple) else result)
            return result

        return output

    def _arriving(self, right: Callable) -> Callable:
        def start(x: Any, axis: Any, *more: Any) -> Any:
            pending = right(x, axis, *more)
            is_sum = right.__name__ == "start_reduce_scatter_"
            self._sums += is_sum
            within_replica = not is_sum and axis.name in ("tp", "pp", "pp_gradients")
            if is_sum and self._is_due("sum") or within_replica and self._is_due("message"):
                result = pending._result
                pending._result = lambda: self._flip(result())
            return pending

        return start


def drawn(seed: int, count: int, layout: str = "dp 3") -> list[Fault]:
    """So many flips; between two of them is an iteration without."""
    generator = random.Random(seed)
    places = inject.FLIPS if layout != "dp 3" else inject.FLIPS[:-1]
    return [
        Fault(
            "bit flip",
            generator.choice(places),
            generator.randrange(world_of(layout)),
            2,
            generator.randrange(1 << 30),
            generator.randrange(32),
            generator.randint(1, 2),
        )
        for _ in range(count)
    ]


def world_of(layout: str) -> int:
    """The number of ranks."""
    return REPLICAS * (1 if layout == "dp 3" else 2)


def named(text: str) -> dict[int, set[int]]:
    """{iteration: ranks that were named}."""
    reports = re.findall(r"iteration (\d+): two (?:computations|sums) (.*)", text)
    return {
        int(number): {int(rank) for rank in re.findall(r"rank (\d+) \(", rest)}
        for number, rest in reports
    }


def outcome(fault: Fault, suspects: set[int] | None, layout: str) -> str:
    """What became of a flip, of which these ranks were named."""
    if suspects is None:
        return "no effect"
    # what a rank computes wrongly is sent to the others of its replica
    alone = fault.place in ("gradient", "sum")
    allowed = {fault.rank} if alone else replica(fault.rank, layout)
    return "found" if suspects <= allowed else "wrong rank"


def replica(rank: int, layout: str) -> set[int]:
    """The ranks that compute the same gradients together with `rank`."""
    if layout == "pp 2 dp 3":
        return {rank % REPLICAS, rank % REPLICAS + REPLICAS}
    return {rank} if layout == "dp 3" else {rank // 2 * 2, rank // 2 * 2 + 1}


def train(
    folder: Path, iterations: int, world: int, faults: Sequence[Fault], flags: Sequence[str]
) -> str:
    """What a run printed. Raises RuntimeError."""
    folder.mkdir()
    inject.write(folder, faults)
    words = [*ranks.tiny_model(), *FLAGS, *flags, "--train-iters", str(iterations)]
    codes, _ = ranks.attempt(ranks.Launch("env", world, words), folder)
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {(folder / 'err').read_text()[-2000:]}")
    return (folder / "log").read_text(errors="replace")


def flipped(args: argparse.Namespace, home: Path) -> bool:
    """Print what became of the flips; True if all is as it must be."""
    world = world_of(args.layout)
    flags = [*LAYOUTS[args.layout], "--use-distributed-optimizer"]
    flags += ["--global-batch-size", str(REPLICAS)]
    faults = drawn(args.seed, args.flips, args.layout)
    iterations = 3 * args.flips + 3
    text = train(home / "flips", iterations, world, faults, flags)
    train(home / "right", iterations, world, [], flags)
    weights, right = (ranks.checkpoint(home / one, iterations) for one in ("flips", "right"))
    suspects = named(text)
    marks = inject.injected(home / "flips")
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for fault, mark in zip(faults, marks, strict=True):
        counts[fault.place, outcome(fault, suspects.get(mark["iteration"]), args.layout)] += 1
    print(f"{args.flips} single-bit errors (seed {args.seed}), {args.layout}:")
    for place in inject.FLIPS:
        parts = [f"{counts[place, one]} {one}" for one in ("found", "no effect", "wrong rank")]
        print(f"  {place:9s}{', '.join(parts)}")
    is_same = weights == right != {}
    print(f"final checkpoint equal to that of a run without errors: {'yes' if is_same else 'NO'}")
    return is_same and not wrong(counts)


def wrong(counts: Mapping[tuple[str, str], int]) -> int:
    """How many flips must not have ended so."""
    return sum(
        number
        for (place, end), number in counts.items()
        if end == "wrong rank" or place in ("gradient", "sum") and end != "found"
    )


def alarms(args: argparse.Namespace, home: Path) -> int:
    """The number of false alarms; printed for each layout."""
    share = -(-args.clean // len(CLEAN_LAYOUTS))
    total = 0
    for number, flags in enumerate(CLEAN_LAYOUTS):
        more = f"{flags} --global-batch-size 4 --log-interval {share}".split()
        count = len(named(train(home / f"clean {number}", share, 2, [], more)))
        print(f"{share} verified iterations, {count} false alarms: {flags or 'no flags'}")
        total += count
    print(f"false alarms in {share * len(CLEAN_LAYOUTS)} verified iterations: {total}", flush=True)
    return total


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--flips", type=int, default=200, help="0: none (default: 200)")
    parser.add_argument("--layout", choices=LAYOUTS, default="dp 3")
    parser.add_argument("--clean", type=int, default=1000, help="0: none (default: 1000)")
    parser.add_argument("--seed", type=int, default=1)


def check(args: argparse.Namespace, home: Path) -> bool:
    """Print the counts; True if all is as it must be."""
    is_right = not args.flips or flipped(args, home)
    return not (args.clean and alarms(args, home)) and is_right
