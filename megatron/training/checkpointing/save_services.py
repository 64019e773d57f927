"""What a run holds from before torch is imported to its end: the lock of --save, the exchange with
object stores, the writing process of --async-save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.config.command_line import CommandLine
from megatron.training.checkpointing import one_history
from megatron.training.launch.signals import SignalWatch

if TYPE_CHECKING:
    from megatron.training.run import Services


@contextmanager
def save_services(
    line: CommandLine, services: Services | None = None, watch: SignalWatch | None = None
) -> Iterator[Services]:
    """`services` (the usual ones if None, with `watch`) and those that saving needs. Raises
    CheckpointError for a directory that is locked, SystemExit for one with checkpoints of another
    history."""
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
        _fetch(line)
        if saves and line.rank == 0:
            one_history.make_room(line)
            _upload(line, stack)
        writer = None
        if saves and c.async_save:
            from megatron.checkpoint.async_writer import started

            writer = stack.enter_context(started())
        from megatron.training.run import Services

        services = services or Services(watch or SignalWatch())
        yield replace(services, fence=lock.check if lock else services.fence, writer=writer)


def _fetch(line: CommandLine) -> None:
    """On rank 0, what --load and --snapshot-dir name in an object store."""
    c = line.config.checkpoint
    if line.rank or not (line.load_url or line.snapshot_url):
        return
    from megatron.checkpoint import object_store

    if line.load_url and c.load:
        object_store.fetch(
            line.load_url, c.load, c.ckpt_step, required=line.load_url != line.save_url
        )
    if line.snapshot_url and c.snapshot_dir and c.load and c.ckpt_step is None:
        object_store.fetch_snapshot(line.snapshot_url, c.snapshot_dir, c.load)


def _upload(line: CommandLine, stack: ExitStack) -> None:
    """Upload what is saved while `stack` is open, if it belongs in an object store."""
    if not (line.save_url or line.snapshot_url):
        return
    from megatron.checkpoint import object_store

    c = line.config.checkpoint
    assert c.save is not None, "the run saves"
    snapshots = c.snapshot_dir if c.snapshot_interval else None
    targets = object_store.upload_targets(c.save, line.save_url, snapshots, line.snapshot_url)
    stack.enter_context(object_store.uploading(targets))
