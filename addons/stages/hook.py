"""Ends a run where its stage ends."""

from collections.abc import Collection

from megatron.training.hook import Hook
from megatron.training.launch.hang_limits import RunPhase, limits
from megatron.training.run import Run


class StageEnds(Hook):
    """Of a run in stages: the iterations after which another one goes on, which may take as long to
    start as the first."""

    after = ("HangWatch",)

    def __init__(self, run: Run, ends: Collection[int]):
        self._run = run
        self._ends = frozenset(ends)

    def ends_stage(self, iteration: int) -> bool:
        return iteration in self._ends

    def after_save(self, iteration: int) -> None:
        if iteration in self._ends:
            self.on_end()

    def on_end(self) -> None:
        monitor = getattr(self._run.services.signals, "monitor", None)
        if monitor:
            limit = limits(self._run.config).startup
            monitor.begin(RunPhase("start of the next stage", limit=limit))
