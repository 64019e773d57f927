#!/usr/bin/env python
"""Single-bit errors in a run with --verify-step-interval 1: which are found, and is the right rank
named.

Three data-parallel ranks (on CPUs) train a tiny model with --verify-step-action majority. In each
of --flips iterations one bit of one number changes on one rank, drawn from --seed: in a weight (it
is set back after the iteration), in a gradient, or in a layer's output in the forward pass. Then
the same run without errors: the final checkpoints must be equal byte for byte. Then --clean
iterations without errors must not be reported. Exit code 1 where a change of a gradient is not
found, a wrong rank is named, the weights differ, or there is a false alarm.

A bit of a weight or of an output that rounding removes changes no gradient: it is not found and
does no harm ("no effect" if the hash of all gradients is that of a run without errors).
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

PLACES = ("weight", "gradient", "output")
RANKS = 3
FLAGS = (
    "--lr 0.0003 --global-batch-size 3 --eval-iters 0 --log-format megatron "
    "--use-distributed-optimizer --save saved --save-interval 1000000"
).split()
# A rank changes what errors.json says.
CHANGES = """
import json
errors = {one["iteration"]: one for one in json.load(open("errors.json")) if one["rank"] == rank}

import torch
from megatron.model import layer
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
    state.update(error=error, passes=0, flipped=False)
    if error["place"] == "weight" and error["pass"] == 1:
        flip(run.buffers._weights, error)
    return right_call(self, run, forward_step, samples, iteration, requests)

def hashed(self):
    error = state["error"]
    state["passes"] += 1
    number = state["passes"]
    if error["place"] == "gradient" and number == error["pass"]:
        flip(self._run.buffers.flat, error)
    found = right_hash(self)
    if error["place"] == "weight" and number in (error["pass"] - 1, error["pass"]):
        flip(self._run.buffers._weights, error)
    return found

def output(self, *args, **kwargs):
    found = right_forward(self, *args, **kwargs)
    error = state["error"]
    if error["place"] == "output" and state["passes"] + 1 == error["pass"]:
        if not state["flipped"]:
            flip(found[0] if isinstance(found, tuple) else found, error)
        state["flipped"] = True
    return found

Verified.__call__ = call
Verified._hash = hashed
layer.TransformerLayer.forward = output
"""


def drawn(seed: int, count: int) -> list[dict[str, int | str]]:
    """An error in each iteration."""
    generator = random.Random(seed)
    return [
        {
            "iteration": iteration,
            "place": generator.choice(PLACES),
            "rank": generator.randrange(RANKS),
            "element": generator.randrange(1 << 30),
            "bit": generator.randrange(32),
            "pass": generator.randint(1, 2),
        }
        for iteration in range(1, count + 1)
    ]


def train(folder: Path, iterations: int, errors: Sequence, *flags: str) -> tuple[str, float]:
    """What a run printed, and its seconds. Raises RuntimeError."""
    folder.mkdir()
    ranks.write_rank(folder, CHANGES)
    (folder / "errors.json").write_text(json.dumps(errors))
    words = [*ranks.tiny_model(), *FLAGS, *flags, "--train-iters", str(iterations)]
    started = time.monotonic()
    codes = [one.wait() for one in ranks.start(ranks.Launch("env", RANKS, words), folder)]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {(folder / 'err').read_text()[-2000:]}")
    return (folder / "log").read_text(errors="replace"), time.monotonic() - started


def reported(text: str) -> dict[int, list[int]]:
    """{iteration: ranks that were named}."""
    found = re.findall(r"WARNING: iteration (\d+): two computations (.*)", text)
    return {
        int(number): [int(r) for r in re.findall(r"rank (\d+) \(", rest)] for number, rest in found
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts; 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=200, help="default: 200")
    parser.add_argument("--clean", type=int, default=1000, help="default: 1000")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    verify = ("--verify-step-interval", "1", "--verify-step-action", "majority")
    with tempfile.TemporaryDirectory(prefix="corruption-") as name:
        home = Path(name)
        errors = drawn(args.seed, args.flips)
        text, _ = train(home / "flips", args.flips, errors, *verify)
        train(home / "right", args.flips, [])
        flipped, right = (ranks.checkpoint(home / one, args.flips) for one in ("flips", "right"))
        same = flipped == right != {}
        clean, verified = train(home / "clean", args.clean, [], *verify)
        alarms = len(reported(clean))
    named = reported(text)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    bad = 0
    for error in errors:
        found = named.get(error["iteration"])
        outcome = "no effect" if found is None else "found"
        if found is not None and found != [error["rank"]]:
            outcome = "wrong rank"
        bad += outcome == "wrong rank" or error["place"] == "gradient" and outcome != "found"
        counts[error["place"], outcome] += 1
    print(f"{args.flips} single-bit errors (seed {args.seed}), {RANKS} data-parallel ranks:")
    for place in PLACES:
        parts = [f"{counts[place, one]} {one}" for one in ("found", "no effect", "wrong rank")]
        print(f"  {place:9s}{', '.join(parts)}")
    print(f"final checkpoint equal to that of a run without errors: {'yes' if same else 'NO'}")
    print(f"false alarms in {args.clean} verified iterations: {alarms} ({verified:.0f} s)")
    return int(bool(bad or alarms or not same))


if __name__ == "__main__":
    sys.exit(main())
