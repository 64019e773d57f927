"""What a run holds from before torch is imported to its end: the lock of --save, the exchange with
object stores, the writing process of --async-save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron import launcher
from megatron.config import command_line
from megatron.config.command_line import CommandLine
from megatron.training.launch.signals import SignalWatch

if TYPE_CHECKING:
    from megatron.training.run import Services


@contextmanager
def save_services(
    line: CommandLine, services: Services | None = None, watch: SignalWatch | None = None
) -> Iterator[Services]:
    """`services` (the usual ones if None, with `watch`) and those that saving needs. Raises
    CheckpointError for a directory that is locked, SystemExit for an object store that another run
    has saved to."""
    config = line.config
    c = config.checkpoint
    saves = bool(c.save) and not config.training.skip_train
    with ExitStack() as stack:
        lock = None
        if saves and c.save and line.rank == 0:
            from megatron.checkpoint.lock import held

            lock = stack.enter_context(held(c.save))
            if watch:
                watch.leaving = lock.release
        if line.load_url or line.save_url or line.snapshot_url:
            _exchange_with_object_store(line, stack)
        writer = None
        if saves and c.async_save:
            from megatron.checkpoint.async_writer import started

            writer = stack.enter_context(started())
        from megatron.training.run import Services

        services = services or Services(watch or SignalWatch())
        yield replace(services, fence=lock.check if lock else services.fence, writer=writer)


def _exchange_with_object_store(line: CommandLine, stack: ExitStack) -> None:
    """Fetch what --load names there; what is saved while `stack` is open is uploaded."""
    from megatron.checkpoint import object_store

    c = line.config.checkpoint
    writes = line.rank == 0 and not line.config.training.skip_train
    if writes and line.save_url and (c.finetune or not c.load):
        if problems := object_store.overwritten(line.save_url):
            command_line.refuse(problems, launcher.info())
    if line.load_url and c.load and line.rank == 0:
        object_store.fetch(
            line.load_url, c.load, c.ckpt_step, required=line.load_url != line.save_url
        )
    fetches = line.rank == 0 and c.ckpt_step is None
    if line.snapshot_url and c.snapshot_dir and c.load and fetches:
        object_store.fetch_snapshot(line.snapshot_url, c.snapshot_dir, c.load)
    if writes and c.save:
        snapshots = c.snapshot_dir if c.snapshot_interval else None
        targets = object_store.upload_targets(c.save, line.save_url, snapshots, line.snapshot_url)
        stack.enter_context(object_store.uploading(targets, c.save))
