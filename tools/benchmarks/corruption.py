#!/usr/bin/env python
"""Single-bit errors in a run with --verify-step-interval 1: which are found, and is the right rank
named.

Three data-parallel replicas (on CPUs; with --layout each of two ranks) train a tiny model with
--verify-step-action majority. In each of --flips iterations one bit of one number changes on one
rank, drawn from --seed: in a weight (it is set back after the iteration), in a gradient, in a
layer's output in the forward pass, in the sum of gradients that arrives, or in a message of the
replica (a pipeline transfer, a tensor-parallel sum). Then the same run without errors: the final
checkpoints must be equal byte for byte. Then --clean iterations without errors, shared out over
CLEAN_LAYOUTS, must not be reported. Exit code 1 where a change of a gradient or of a sum is not
found, a wrong rank is named (one of another replica; for gradients and sums any other), the weights
differ, or there is a false alarm.

A bit of a weight, an output or a message that rounding removes changes no gradient: it is not found
and does no harm.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.shared import ranks

PLACES = ("weight", "gradient", "output", "sum", "message")
REPLICAS = 3
# ranks, flags
LAYOUTS = {
    "dp 3": (3, "--use-distributed-optimizer"),
    "pp 2 dp 3": (6, "--use-distributed-optimizer --pipeline-model-parallel-size 2"),
    "tp 2 dp 3": (6, "--use-distributed-optimizer --tensor-model-parallel-size 2"),
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
# A rank changes what errors.json says.
CHANGES = """
import json
errors = {one["iteration"]: one for one in json.load(open("errors.json")) if one["rank"] == rank}

import torch
from megatron.model import layer
from megatron.parallel import collectives, ddp, pipeline
from megatron.training import verify_step

state = {"error": {"place": None, "pass": 0}}

def flip(tensor, error):
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[error["element"] % bits.numel()] ^= torch.tensor(1 << error["bit"]).to(torch.int32)

Verified = verify_step.StepVerification
right_call = Verified.__call__
right_hash = Verified._hash
right_forward = layer.TransformerLayer.forward

def call(self, run, forward_step, samples, iteration, requests):
    error = errors.get(iteration) or {"place": None, "pass": 0}
    state.update(error=error, passes=0, sums=0, flipped=False)
    if error["place"] == "weight" and error["pass"] == 1:
        flip(run.buffers.weights, error)
    return right_call(self, run, forward_step, samples, iteration, requests)

def hashed(self):
    error = state["error"]
    state["passes"] += 1
    number = state["passes"]
    if error["place"] == "gradient" and number == error["pass"]:
        flip(self._run.buffers.flat, error)
    found = right_hash(self)
    if error["place"] == "weight" and number in (error["pass"] - 1, error["pass"]):
        flip(self._run.buffers.weights, error)
    return found

def output(self, *args, **kwargs):
    found = right_forward(self, *args, **kwargs)
    error = state["error"]
    if error["place"] == "output" and state["passes"] + 1 == error["pass"]:
        if not state["flipped"]:
            flip(found[0] if isinstance(found, tuple) else found, error)
        state["flipped"] = True
    return found

def arriving(owner, name, is_due):
    right = getattr(owner, name)

    def start(x, axis, *more):
        pending = right(x, axis, *more)
        if is_due(axis):
            result = pending._result
            pending._result = lambda: flipped(result())
        return pending

    setattr(owner, name, start)

def flipped(x):
    flip(x, state["error"])
    return x

def sum_is_due(axis):
    state["sums"] += 1
    return state["error"]["place"] == "sum" and state["sums"] == state["error"]["pass"]

def message_is_due(axis):
    error = state["error"]
    due = error["place"] == "message" and state["passes"] + 1 == error["pass"]
    due = due and not state["flipped"] and axis.name in ("tp", "pp", "pp_gradients")
    state["flipped"] |= due
    return due

arriving(ddp, "start_reduce_scatter_", sum_is_due)
arriving(pipeline, "start_receive", message_is_due)
arriving(collectives, "start_all_reduce", message_is_due)
Verified.__call__ = call
Verified._hash = hashed
layer.TransformerLayer.forward = output
"""


def drawn(seed: int, count: int, layout: str = "dp 3") -> list[dict[str, int | str]]:
    """An error in each iteration."""
    generator = random.Random(seed)
    places = PLACES if layout != "dp 3" else PLACES[:-1]
    world, _ = LAYOUTS[layout]
    return [
        {
            "iteration": iteration,
            "place": generator.choice(places),
            "rank": generator.randrange(world),
            "element": generator.randrange(1 << 30),
            "bit": generator.randrange(32),
            "pass": generator.randint(1, 2),
        }
        for iteration in range(1, count + 1)
    ]


def train(
    folder: Path, iterations: int, world: int, errors: Sequence, flags: str
) -> tuple[str, float]:
    """What a run printed, and its seconds. Raises RuntimeError."""
    folder.mkdir()
    ranks.write_rank(folder, CHANGES)
    (folder / "errors.json").write_text(json.dumps(errors))
    words = [*ranks.tiny_model(), *FLAGS, *flags.split(), "--train-iters", str(iterations)]
    started = time.monotonic()
    codes = [one.wait() for one in ranks.start(ranks.Launch("env", world, words), folder)]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {(folder / 'err').read_text()[-2000:]}")
    return (folder / "log").read_text(errors="replace"), time.monotonic() - started


def reported(text: str) -> dict[int, list[int]]:
    """{iteration: ranks that were named}."""
    found = re.findall(r"WARNING: iteration (\d+): two (?:computations|sums) (.*)", text)
    return {
        int(number): [int(r) for r in re.findall(r"rank (\d+) \(", rest)] for number, rest in found
    }


def outcome(error: dict[str, int | str], found: Sequence[int] | None, layout: str) -> str:
    """What became of an error, of which these ranks were named."""
    if found is None:
        return "no effect"
    # what a rank computes wrongly is sent to the others of its replica
    alone = error["place"] in ("gradient", "sum")
    right = {error["rank"]} if alone else replica(error["rank"], layout)
    return "found" if set(found) <= right else "wrong rank"


def replica(rank: int, layout: str) -> set[int]:
    """The ranks that compute the same gradients together with `rank`."""
    if layout == "pp 2 dp 3":
        return {rank % REPLICAS, rank % REPLICAS + REPLICAS}
    return {rank} if layout == "dp 3" else {rank // 2 * 2, rank // 2 * 2 + 1}


def inject(args: argparse.Namespace, home: Path) -> bool:
    """Print what became of the errors; True if all is as it must be."""
    world, flags = LAYOUTS[args.layout]
    flags = f"{flags} --global-batch-size {REPLICAS}"
    errors = drawn(args.seed, args.flips, args.layout)
    text, _ = train(home / "flips", args.flips, world, errors, flags)
    train(home / "right", args.flips, world, [], flags)
    flipped, right = (ranks.checkpoint(home / one, args.flips) for one in ("flips", "right"))
    same = flipped == right != {}
    named = reported(text)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    bad = 0
    for error in errors:
        found = outcome(error, named.get(error["iteration"]), args.layout)
        must = error["place"] in ("gradient", "sum")
        bad += found == "wrong rank" or must and found != "found"
        counts[error["place"], found] += 1
    print(f"{args.flips} single-bit errors (seed {args.seed}), {args.layout}:")
    for place in sorted({place for place, _ in counts}, key=PLACES.index):
        parts = [f"{counts[place, one]} {one}" for one in ("found", "no effect", "wrong rank")]
        print(f"  {place:9s}{', '.join(parts)}")
    print(f"final checkpoint equal to that of a run without errors: {'yes' if same else 'NO'}")
    return same and not bad


def clean(args: argparse.Namespace, home: Path) -> int:
    """The number of false alarms; printed for each layout."""
    alarms = 0
    share = -(-args.clean // len(CLEAN_LAYOUTS))
    for number, flags in enumerate(CLEAN_LAYOUTS):
        more = f"{flags} --global-batch-size 4 --log-interval {share}"
        text, seconds = train(home / f"clean {number}", share, 2, [], more)
        found = len(reported(text))
        alarms += found
        name = flags or "no flags"
        print(f"{share} verified iterations, {found} false alarms, {seconds:4.0f} s: {name}")
    print(f"false alarms in {share * len(CLEAN_LAYOUTS)} verified iterations: {alarms}", flush=True)
    return alarms


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts; 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=200, help="0: none (default: 200)")
    parser.add_argument("--layout", choices=LAYOUTS, default="dp 3")
    parser.add_argument("--clean", type=int, default=1000, help="0: none (default: 1000)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="corruption-") as name:
        right = not args.flips or inject(args, Path(name))
        alarms = clean(args, Path(name)) if args.clean else 0
    return int(not right or alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
