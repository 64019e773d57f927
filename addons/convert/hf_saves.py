"""The hook of --save-hf-interval: a Hugging Face directory of the run as it is now, written by rank
0 while the others send it one tensor at a time, and read again before it gets its name."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from megatron import log
from megatron.checkpoint.filesystem import DISK, CheckpointError, explained
from megatron.config import architecture
from megatron.config.run_directory import iteration_directory
from megatron.training.hook import Hook
from megatron.training.launch.hang_limits import RunPhase
from megatron.training.result import Requests
from megatron.training.run import Run

from .hf_files import write_folder
from .huggingface import HFModel, as_hf
from .links import ConversionError
from .live import RunModel, RunTensors, TensorsOfRankZero
from .options import FOLDER, SHARD_BYTES
from .stores.kept_shards import KeptShards


class HFSaves(Hook):
    """Writes them. What the disk refuses is a warning, as for checkpoints that are not the last."""

    before = ("GarbageCollection",)

    def __init__(self, run: Run, interval: int, shard_bytes: int = SHARD_BYTES):
        """Raises ConversionError for a model that cannot be written."""
        save = run.config.checkpoint.save
        assert save is not None, "--save-hf-interval requires it"
        self._run = run
        self._interval = interval
        self._shard_bytes = shard_bytes
        self._save = Path(save)
        model = RunModel(RunTensors(run), run, self._save)
        as_hf(model)
        self._tokenizer = model.tokenizer()

    def on_start(self) -> None:
        """A run that was killed between a checkpoint and its directory goes on with that."""
        iteration = self._run.progress.iteration
        if iteration and self._run.of_rank_0(lambda: not self._target(iteration).exists()):
            self._write_if_due(iteration)

    def intervals(self) -> Sequence[int | None]:
        return (self._interval,)

    def after_iteration(self, iteration: int, requests: Requests) -> None:
        self._write_if_due(iteration)

    def _target(self, iteration: int) -> Path:
        return iteration_directory(self._save / FOLDER, iteration)

    def _write_if_due(self, iteration: int) -> None:
        if iteration % self._interval:
            return
        monitor = getattr(self._run.services.signals, "monitor", None)
        if monitor:
            monitor.begin(RunPhase("Hugging Face directory", iteration, monitor.limits.save))
        try:
            self._write_together()
        except CheckpointError as error:
            log.print_rank_0(
                f"WARNING: no Hugging Face directory of iteration {iteration}: {error}; training "
                "continues"
            )

    def _write_together(self) -> None:
        run = self._run
        start = time.perf_counter()
        if run.runtime.rank != 0:
            TensorsOfRankZero(run).serve()
        target = run.of_rank_0(self._write)
        log.print_rank_0(
            f" Hugging Face directory of iteration {run.progress.iteration} saved to {target} "
            f"({time.perf_counter() - start:.1f} s)"
        )

    def _write(self) -> Path:
        """The directory. Raises CheckpointError, and then there is none, or the one before."""
        run = self._run
        target = self._target(run.progress.iteration)
        with (
            RunModel(TensorsOfRankZero(run), run, self._save, self._tokenizer) as model,
            explained("write in", target.parent),
        ):
            run.services.fence()
            for left in target.parent.glob(".iter_*.partial"):  # by a run that was killed
                DISK.remove_tree(left)
            new = as_hf(model)
            own = secrets.token_hex()  # nothing of another one is kept
            write_folder(
                target, new.config, new.tensors, new.files, self._shard_bytes, own, self._check
            )
        return target

    def _check(self, folder: Path, shards: KeptShards) -> None:
        """Raise CheckpointError unless all bytes of the shards read back as they were written, and
        the folder opens as this very model."""
        damaged = [path.name for path in folder.glob("*.safetensors") if not shards.has(path.name)]
        if damaged:
            raise CheckpointError(
                f"{folder}: {', '.join(damaged)} does not read back as it was written; check the "
                "disk [checkpoint-damaged]"
            )
        try:
            with HFModel(folder) as back:
                wrong = architecture.differences(self._run.config.model, back.model)
        except ConversionError as error:
            raise CheckpointError(str(error)) from None
        if wrong:
            names = ", ".join(difference.name for difference in wrong)
            raise CheckpointError(f"{folder}: config.json says otherwise of {names}")
        self._run.services.fence()
