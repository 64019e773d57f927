"""What a run holds from before torch is imported to its end: the lock of --save, the exchange with
object stores, the writing process of --async-save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron import object_stores
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
        if line.rank == 0 and (line.load_url or line.snapshot_url):
            object_stores.part("run_directories").fetch_for(line)
        if saves and line.rank == 0:
            one_history.make_room(line)
            if line.save_url or line.snapshot_url:
                stack.enter_context(object_stores.part("run_directories").uploading_for(line))
        writer = None
        if saves and c.async_save:
            from megatron.checkpoint.async_writer import started

            writer = stack.enter_context(started())
        from megatron.training.run import Services

        services = services or Services(watch or SignalWatch())
        yield replace(services, fence=lock.check if lock else services.fence, writer=writer)
