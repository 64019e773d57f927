"""What a run loads: its checkpoints, and the flags in one. Judges nothing."""

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import reading
from megatron.checkpoint.filesystem import CheckpointError
from megatron.config import command_line
from megatron.features.registry import RunConfig
from megatron.training.checkpointing import save, saved_args, start
from megatron.training.run import Run
from tests.campaigns.hostile import forged
from tests.campaigns.hostile.campaign import Kind, Refused
from tests.core.training.built_runs import built
from tests.runs import SMALL

TINY = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --vocab-size 60".split()
NEWEST = "run/iter_0000020"
ERRORS = (CheckpointError, ValueError, OSError, Refused)
_NAMED = re.compile(r"cannot load iteration 20: .*?/iter_0000020(?:/| has no )([a-z_0-9.]*[a-z])")


@functools.cache
def _run(*flags: str) -> Run:
    return built(*TINY, *flags)


class SavedRun:
    """A tiny run saved at iterations 10 and 20. Any damage to the newer checkpoint is named, and
    the run resumes from the older one, bit for bit."""

    def make(self, folder: Path) -> None:
        run = _run("--save", str(folder / "run"), "--save-interval", "10")
        self.states = {}
        for iteration in (10, 20):
            _set_state(run, iteration)
            run.progress.data_order = {}
            self.states[iteration] = _state(run)
            save.save_checkpoint(run)
        self.files = {path.name: path.read_bytes() for path in (folder / NEWEST).iterdir()}

    def read(self, folder: Path) -> Any:
        """(the file that is said to be damaged, the state that the run resumes from)."""
        run = _run("--load", str(folder / "run"))
        _set_state(run, 99)
        run.scheduler.num_steps = 0  # a load adds to it, once
        run.progress.data_order = {"of": "before"}
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            start.load_checkpoint(run)
        named = _NAMED.search(said.getvalue())
        return named and named[1], _state(run)

    def oracle(self, folder: Path) -> Any:
        for name, data in self.files.items():
            if (folder / NEWEST / name).read_bytes() != data:
                return name, self.states[10]
        return None, self.states[20]


def _set_state(run: Run, seed: int) -> None:
    """Other values, counters and schedule for the run."""
    torch.manual_seed(seed)
    for _, _, _, parts in save.own_tensors(run):
        for _, part in parts:
            part.copy_(torch.randn(part.shape))
    run.progress.iteration = seed
    run.progress.consumed_train_samples = 8 * seed
    run.scheduler.num_steps = 8 * seed


def _state(run: Run) -> tuple[Any, ...]:
    tensors = {
        name: [part.tolist() for _, part in parts] for name, _, _, parts in save.own_tensors(run)
    }
    p = run.progress
    return p.iteration, p.consumed_train_samples, p.data_order, run.scheduler.num_steps, tensors


def read_saved_flags(folder: Path) -> str:
    """--use-checkpoint-args, before torch is loaded, and the flags that a load compares."""
    words = [*SMALL[SMALL.index("--tokenizer-type") :], "--mock-data", "--train-iters", "9"]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            line = command_line.read(
                [*words, "--load", str(folder / "run"), "--use-checkpoint-args"], {}, tree=RunConfig
            )
        except SystemExit:
            raise Refused(said.getvalue()) from None
    return repr((line.config, saved_args.saved_config(reading.load(folder / "run"))))


RUN = SavedRun()
KINDS = [
    Kind(
        "a run's checkpoints",
        RUN.make,
        RUN.read,
        (f"{NEWEST}/*",),
        ERRORS,
        cost=0.1,
        oracle=RUN.oracle,
        forged=forged.RUNS,
    ),
    Kind(
        "flags of a checkpoint",
        forged.args(forged.FLAGS),
        read_saved_flags,
        (f"{NEWEST}/args", f"{NEWEST}/manifest.json"),
        ERRORS,
        checksummed=True,
        forged=forged.ARGS,
    ),
]
