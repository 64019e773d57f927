"""What is done about spikes: which updates are skipped, what is skipped after a rollback, when the
run gives up.

Iterations and their values in, decisions out, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron import log
from megatron.training.launch.signals import Refusal
from megatron.training.spikes.detector import TOGETHER, Finding, SpikeDetector

BUDGET = 10
WITHIN = 1000  # updates skipped, in so many iterations
# iterations after what was skipped: a spike there is the same trouble
AGAIN = 200
BEFORE = 100
AFTER = 200  # what the second attempt skips around the first spike
ATTEMPTS = 2
EXIT_CODE = 3  # of a run that gives up


@dataclass(frozen=True)
class Rollback:
    """The run rolls back to before `start` and skips `start` to `end`. `first`: the first outlier
    of the spike."""

    attempt: int
    start: int
    end: int
    first: int


@dataclass
class OpenSpike:
    """Consecutive outliers: first and last, and the first precursor before them."""

    first: int
    last: int
    mark: int


class SpikePolicy:
    """Checks trained iterations one after the other, and decides. Iterations skipped by the user or
    by an overflow are not checked and change nothing."""

    def __init__(self, action: str = "log"):
        self.action = action
        self.finding = Finding()  # of the last iteration
        self.rewinds: list[Rollback] = []
        self._detector = SpikeDetector()
        # iterations with a finding since the last row, at most TOGETHER old
        self._marks: list[int] = []
        self._row: OpenSpike | None = None
        self._over: OpenSpike | None = None  # the row that the last iteration has ended
        self._spent: list[int] = []

    @property
    def decides(self) -> bool:
        """Must it be asked before an update is made?"""
        return self.action in ("skip-update", "rewind")

    @property
    def spike_open(self) -> bool:
        """Is it still open how far a spike reaches?"""
        return self._row is not None

    def check(self, iteration: int, loss: float, grad_norm: float | None) -> Finding:
        """Take in a trained iteration; what it is."""
        self.finding = finding = self._detector.check(loss, grad_norm)
        self._over = None
        if finding.spike:
            if self._row is None:
                marks = [n for n in self._marks if n >= iteration - TOGETHER]
                self._row = OpenSpike(iteration, iteration, min([*marks, iteration]))
                self._marks = []
                self._spent.append(iteration)
            elif finding.kind == "non-finite":
                self._spent.append(iteration)
            self._row.last = iteration
        else:
            if finding.kind != "level shift":
                self._over = self._row
            self._row = None
            self._marks = [n for n in self._marks if n >= iteration - TOGETHER] + [
                iteration
            ] * bool(finding.kind)
        self._spent = [n for n in self._spent if n > iteration - WITHIN]
        return finding

    def record(
        self, iteration: int, loss: float, grad_norm: float | None, skipped: str | None
    ) -> Finding:
        """The finding on a trained iteration, printed on the last rank; one that overflowed is not
        checked."""
        if self.action == "off" or skipped == "overflow":
            return Finding()
        if not self.decides:
            self.check(iteration, loss, grad_norm)
        line = self.line(iteration, loss, grad_norm)
        if line:
            log.print_rank_last(line)
        return self.finding

    def should_update(self, iteration: int, loss: float, grad_norm: float | None) -> bool:
        """Take in an iteration before its update; is that to be made?"""
        finding = self.check(iteration, loss, grad_norm)
        return not (finding.spike if self.action == "skip-update" else finding.kind == "non-finite")

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
        """Is it time to go back, after `iteration`? A row of spikes is waited for until it is over.
        Raises Refusal where nothing helps any more."""
        self._check_budget()
        row = self._over
        if row is None and (self.finding.kind == "non-finite" or iteration == train_iters):
            row = self._row
        if self.action != "rewind" or row is None:
            return None
        before = (
            self.rewinds[-1] if self.rewinds and row.first <= self.rewinds[-1].end + AGAIN else None
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
        """What has been skipped because of a spike at `first`."""
        ranges = [f"{one.start} to {one.end}" for one in self.rewinds if one.first == first]
        return (
            f"the run rolled back to before the spike at iteration {first} and skipped "
            f"{' and then '.join(ranges)}"
        )

    def line(self, iteration: int, loss: float, grad_norm: float | None) -> str | None:
        """What a reader is told about the last iteration; None where there is nothing to
        tell."""
        found = self.finding
        if found.kind == "level shift":
            return (
                f"level shift at iteration {iteration}: many outliers in a row; the new level is "
                "accepted"
            )
        if not found.spike:
            return None
        norm = "" if grad_norm is None else f", gradient norm {grad_norm:.4g}"
        what = {
            "loss": f"loss {loss:.4f} is {found.excess:.3f} nats ({found.loss_z:.1f} sigma) above "
            f"the trend{norm}",
            "grad-norm": f"gradient norm {grad_norm or math.nan:.4g} is {found.ratio:.3g} times "
            f"the trend ({found.norm_z:.1f} sigma), loss {loss:.4f}",
            "non-finite": f"loss {loss}{norm}",
        }[found.kind]
        done = {
            "log": "no action; tools/spikes.py analyze says what to skip",
            "skip-update": f"optimizer update skipped ({len(self._spent)} of {BUDGET} in {WITHIN} "
            "iterations)",
            "rewind": "will roll back once the spike ends",
        }[self.action]
        return f"spike at iteration {iteration}: {what}; {done}"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        if self.action == "off":
            return {}
        return {
            "detector": self._detector.state_dict(),
            "marks": list(self._marks),
            "spent": list(self._spent),
            "row": self._row and asdict(self._row),
            "rewinds": [asdict(one) for one in self.rewinds],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept; an empty one is of a run that did not look."""
        self.__init__(self.action)
        if state and self.action != "off":
            self._detector.load_state_dict(state["detector"])
            self._marks = list(map(int, state["marks"]))
            self._spent = list(map(int, state["spent"]))
            self._row = state["row"] and OpenSpike(**state["row"])
            self.rewinds = [Rollback(**one) for one in state["rewinds"]]
