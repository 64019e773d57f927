"""Train one small model with experts in one process and in eight parallel layouts, and print how
far each is from the one process. It takes a minute on two cores.

Losses and gradient norms of all steps are compared, and every tensor of the last checkpoint, with
the optimizer's. In float64 a layout that computes the same model differs by rounding alone.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron import console
from megatron.arguments import arg
from tools.shared.program import run_program

if TYPE_CHECKING:
    import torch

PRETRAIN = console.ROOT / "pretrain_gpt.py"
STEPS = 5
TOLERANCE = 1e-10
# Gradients are clipped in every step, so that a wrong norm changes the weights. The vocabulary
# needs no padding in any layout: all tensors have one shape.
MODEL = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 8 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 0.003 --clip-grad 0.25 "
    f"--train-iters {STEPS} --eval-iters 0 --log-interval 1 --num-workers 0 --device cpu --fp64"
)


class Layout(NamedTuple):
    """Flags of pretrain_gpt.py for `ranks` processes, under a name of at most 42 characters."""

    name: str
    ranks: int
    flags: str


TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"
CONTEXT = "--context-parallel-size 2"
EXPERT = "--expert-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = (
    Layout("tensor 2, sequence", 2, TENSOR),
    Layout("context 2", 2, CONTEXT),
    Layout(
        "pipeline 2, 2 virtual stages", 2, f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2"
    ),
    Layout("expert 2, data 2", 2, EXPERT),
    Layout("data 2, sharded optimizer, overlap", 2, SHARDED),
    Layout(
        "data 4, sharded optimizer in 2 instances",
        4,
        f"{SHARDED} --num-distributed-optimizer-instances 2",
    ),
    Layout(
        "tensor 2, expert 2, pipeline 2",
        4,
        f"{TENSOR} {EXPERT} --expert-tensor-parallel-size 1 {PIPELINE}",
    ),
    Layout(
        "all at once: tensor, context, pipeline 2",
        8,
        f"{TENSOR} {CONTEXT} {PIPELINE} {EXPERT} {SHARDED}",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    nproc_per_node: int = arg(2, minimum=1)
    """number of processes of the layout in FLAGS"""

    flags: tuple[str, ...] = arg((), position="after --", metavar="-- FLAGS")
    """flags of pretrain_gpt.py: compare this layout in place of the eight"""


class Trained(NamedTuple):
    """What a run left: (loss, gradient norm) of each step, and the tensors of its checkpoint."""

    steps: list[tuple[float, float]]
    tensors: dict[str, torch.Tensor]


def train(layout: Layout, folder: Path) -> Trained:
    """Run pretrain_gpt.py in `folder`. Raises ValueError with the end of its log if it fails."""
    folder.mkdir()
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(layout.ranks),
    ]
    flags = [*MODEL.split(), *shlex.split(layout.flags)]
    flags += ["--metrics-file", "metrics.jsonl", "--save", "save", "--save-interval", str(STEPS)]
    words = [sys.executable, *launcher * (layout.ranks > 1), str(PRETRAIN), *flags]
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"{layout.name}: did not train\n{done.stdout[-2000:]}")
    with (folder / "metrics.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    from megatron.checkpoint import reading

    checkpoint = reading.load(folder / "save")
    assert checkpoint is not None
    with checkpoint.reader() as reader:
        tensors = {name: reader.read(name) for name in reader.names()}
    return Trained([(row["lm_loss"], row["grad_norm"]) for row in rows], tensors)


def differences(run: Trained, reference: Trained) -> tuple[float, float, float]:
    """The largest relative differences of losses, gradient norms and tensors; those of a tensor are
    relative to its largest value."""
    loss, norm = (
        max(
            abs(step[column] - expected[column]) / abs(expected[column])
            for step, expected in zip(run.steps, reference.steps, strict=True)
        )
        for column in (0, 1)
    )
    if run.tensors.keys() != reference.tensors.keys():
        raise ValueError("the checkpoints hold tensors of different names [layouts-differ]")
    weights = max(
        float((run.tensors[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30))
        for name, tensor in reference.tensors.items()
    )
    return loss, norm, weights


def compare(options: Options) -> None:
    """Train and print the table. Raises ValueError if a layout does not train the same model."""
    layouts: Sequence[Layout] = LAYOUTS
    if options.flags:
        layouts = (Layout("FLAGS", options.nproc_per_node, shlex.join(options.flags)),)
    print(
        "A GPT with 4 experts in each layer, float64, "
        f"{STEPS} steps. Largest relative difference from one process:\n\n"
        f"{'layout':<42} ranks     loss  grad norm  weights  seconds",
        flush=True,
    )
    different = []
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="compare_layouts_") as folder:
        reference = None
        for number, layout in enumerate((Layout("one process", 1, ""), *layouts)):
            start = time.monotonic()
            print(f"{layout.name:<42} {layout.ranks:>5}", end=" ", flush=True)
            run = train(layout, Path(folder) / str(number))
            seconds = time.monotonic() - start
            if reference is None:
                reference = run
                print(f"{'-':>8}  {'-':>9}  {'-':>7}  {seconds:>7.1f}", flush=True)
                continue
            loss, norm, weights = differences(run, reference)
            # "not <=": NaN differs, too
            apart = not max(loss, norm, weights) <= TOLERANCE
            worst = max(worst, loss, norm, weights)
            end = "  DIFFERENT" if apart else ""
            print(f"{loss:>8.0e}  {norm:>9.0e}  {weights:>7.0e}  {seconds:>7.1f}{end}", flush=True)
            different += [layout.name] * apart
    if different:
        raise ValueError(
            f"{len(different)} of {len(layouts)} layouts train another model than one process "
            f"does: {', '.join(different)} [layouts-differ]"
        )
    print(
        f"\nThe same model in every layout: {worst:.0e} at most, the rounding of float64 "
        f"(allowed: {TOLERANCE:.0e})."
    )


def problems(options: Options) -> list[str]:
    """What is wrong with the options together, one line each."""
    if not options.flags and options.nproc_per_node != 2:
        return [
            f"--nproc-per-node {options.nproc_per_node}: needs the flags of a layout after -- "
            "[flag-needs-other-flag]"
        ]
    return []


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 the same model, 1 a layout differs or does not train, 2 wrong flags."""
    return run_program(
        Options,
        compare,
        argv,
        prog="compare_layouts.py",
        description=__doc__ or "",
        check=problems,
    )
