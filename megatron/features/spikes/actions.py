"""--spike-action skip-update and rewind: which updates are skipped, what is skipped after a
rollback, when the run gives up.

Iterations and their values in, decisions out, the same on every rank.
"""

from megatron.features.spikes.policy import WITHIN, Rollback, SpikePolicy
from megatron.training.launch.process import Refusal
from megatron.training.run import Veto

BUDGET = 10  # updates skipped, in WITHIN iterations
# iterations after what was skipped: a spike there is the same trouble
RECURS_WITHIN = 200
BEFORE = 100
AFTER = 200  # what the second attempt skips around the first spike
ATTEMPTS = 2
EXIT_CODE = 3  # of a run that gives up


class SpikeActions(SpikePolicy):
    """Decides after each iteration that was checked."""

    decides = True

    @property
    def spike_open(self) -> bool:
        """Whether a spike has not ended yet."""
        return self._row is not None

    def before_update(self, iteration: int, loss: float, grad_norm: float) -> Veto | None:
        """Check an iteration before its update; the veto, where there is one."""
        finding = self.check(iteration, loss, grad_norm)
        if finding.kind == "non-finite":
            return Veto("spike", "nonfinite")
        return Veto("spike", "spike") if finding.spike and self.action == "skip-update" else None

    def _check_budget(self) -> None:
        """Raise Refusal when more updates were skipped than allowed. A spike counts as one,
        since it is the data or the level that has changed; numbers that are not finite count
        each."""
        if self.action == "skip-update" and self.finding.spike and len(self._spent) > BUDGET:
            raise Refusal(
                (
                    f"{len(self._spent)} spikes within {WITHIN} iterations (at "
                    f"{', '.join(map(str, self._spent))}), of which --spike-action skip-update "
                    f"skips at most {BUDGET}: the data alone rarely cause so many. Resume from "
                    "before the first with a lower --lr or --clip-grad, or continue regardless "
                    "with --spike-action log [spike-limit-reached]"
                ),
                EXIT_CODE,
            )

    def due(self, train_iters: int, iteration: int) -> Rollback | None:
        """The rollback to make after `iteration`, or None; consecutive outliers are waited for
        until they end. Raises Refusal if a spike remains after all attempts."""
        self._check_budget()
        row = self._over
        if row is None and (self.finding.kind == "non-finite" or iteration == train_iters):
            row = self._row
        if self.action != "rewind" or row is None:
            return None
        before = (
            self.rewinds[-1]
            if self.rewinds and row.first <= self.rewinds[-1].end + RECURS_WITHIN
            else None
        )
        attempt, first = (before.attempt + 1, before.first) if before else (1, row.first)
        if attempt > ATTEMPTS:
            raise Refusal(
                (
                    f"a spike at iteration {row.first}, though {self.tried(first)}. So it is not "
                    "the data of these iterations: resume from a checkpoint before iteration "
                    f"{self.rewinds[-1].start} with a lower --lr, or look at the data "
                    "(tools/spikes.py docs) [spike-not-caused-by-data]"
                ),
                EXIT_CODE,
            )
        start, end = (
            (row.mark - 1, row.last + 1)
            if attempt == 1
            else (first - BEFORE, max(first + AFTER, row.last + 1))
        )
        return Rollback(attempt, max(1, start), min(end, train_iters), first)

    def tried(self, first: int) -> str:
        """What was tried against a spike at `first`, for a message."""
        ranges = [
            f"{rewind.start} to {rewind.end}" for rewind in self.rewinds if rewind.first == first
        ]
        return (
            f"the run rolled back to before the spike at iteration {first} and skipped "
            f"{' and then '.join(ranges)}"
        )

    def _done(self) -> str:
        if self.action == "rewind":
            return "will roll back once the spike ends"
        return f"optimizer update skipped ({len(self._spent)} of {BUDGET} in {WITHIN} iterations)"
