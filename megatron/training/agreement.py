"""What the ranks agree on in each iteration: the requests of all ranks, counted."""

import operator
from collections.abc import Sequence
from signal import Signals

import torch

from megatron.training.hook import Hook
from megatron.training.result import Requests
from megatron.training.run import Run


class Agreement:
    """The requests of this rank and of all ranks. In a training step they travel with the loss
    (`train_step`); elsewhere they take a collective, which all ranks must call."""

    def __init__(self, run: Run, started: float, hooks: Sequence[Hook] = ()):
        """`started`: when the program began, in seconds of `run.services.clock`; `hooks`: all of
        the loop."""
        self._run = run
        self._started = started
        self._hooks = hooks

    def own(self, iteration: int) -> Requests:
        """What this rank requests after `iteration`: signal and time, and what the hooks do."""
        total = Requests(bool(self._run.services.signals.received), self._time_is_up())
        for hook in self._hooks:
            if requests := hook.requests(iteration):
                total = Requests(*map(operator.add, total, requests))
        return total

    def of_all(self, requests: Requests) -> Requests:
        """The requests of all ranks, by a collective; `requests` are those of this rank."""
        run = self._run
        if run.runtime.world_size == 1:
            return requests
        counts = torch.tensor(requests, dtype=torch.float64, device=run.runtime.device)
        total = run.services.all_reduce(counts, run.runtime.ctx.world)
        return Requests(*map(int, total.tolist()))

    def out_of_time(self) -> bool:
        """Is the time over for any rank? By a collective, within evaluations."""
        return self.of_all(Requests(time_up=self._time_is_up())).time_up > 0

    def signal_name(self) -> str:
        """The signal that this or another rank has received, by a collective."""
        run = self._run
        number = torch.tensor(
            float(run.services.signals.received or 0),
            dtype=torch.float64,
            device=run.runtime.device,
        )
        return Signals(
            int(run.services.all_reduce(number, run.runtime.ctx.world, "max").item())
        ).name

    def minutes(self) -> float:
        """How long the program has run."""
        return (self._run.services.clock() - self._started) / 60.0

    def _time_is_up(self) -> bool:
        limit = self._run.config.training.exit_duration_in_mins
        return limit is not None and self.minutes() > limit
