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
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("weight", "gradient", "output")
RANKS = 3
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 211 --lr 0.0003 "
    "--mock-data --micro-batch-size 1 --global-batch-size 3 --log-interval 1 --eval-iters 0 "
    "--num-workers 0 --device cpu --log-format megatron --use-distributed-optimizer"
).split()
# Runs as a rank: changes what errors.json says, then runs the script.
RANK = """
import json, os, runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
rank = int(os.environ["RANK"])
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
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
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
    """Rank 0's output of a run, and its seconds. Raises RuntimeError."""
    folder.mkdir()
    (folder / "rank.py").write_text(RANK)
    (folder / "errors.json").write_text(json.dumps(errors))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = [sys.executable, "rank.py", str(ROOT / "pretrain_gpt.py"), *MODEL, *flags]
    words += ["--train-iters", str(iterations), "--save", "saved", "--save-interval", "1000000"]
    common = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = time.monotonic()
    outputs = [open(folder / f"log.{rank}", "wb") for rank in range(RANKS)]
    processes = [
        subprocess.Popen(
            words,
            cwd=folder,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    codes = [one.wait() for one in processes]
    for output in outputs:
        output.close()
    text = (folder / "log.0").read_text(errors="replace")
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {text[-2000:]}")
    return text, time.monotonic() - started


def reported(text: str) -> dict[int, list[int]]:
    """{iteration: ranks that were named}."""
    found = re.findall(r"WARNING: iteration (\d+): two computations (.*)", text)
    return {
        int(number): [int(r) for r in re.findall(r"rank (\d+) \(", rest)] for number, rest in found
    }


def weights(folder: Path, iteration: int) -> dict[str, bytes]:
    """The files of a checkpoint that hold weights and optimizer states."""
    last = folder / "saved" / f"iter_{iteration:07d}"
    return {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}


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
        named = reported(text)
        same = weights(home / "flips", args.flips) == weights(home / "right", args.flips) != {}
        clean, verified = train(home / "clean", args.clean, [], *verify)
        alarms = len(reported(clean))
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    bad = 0
    for error in errors:
        ranks = named.get(error["iteration"])
        outcome = "no effect" if ranks is None else "found"
        if ranks is not None and ranks != [error["rank"]]:
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
