"""Spikes of a run: which iterations are outliers, what is printed about them, what a checkpoint
keeps of them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron import log
from megatron.config.run_directory import (
    ForeignCheckpoint,
)
from megatron.features.spikes.detector import TOGETHER, Finding, SpikeDetector

NAME = "spikes"  # of the state in a checkpoint
WITHIN = 1000  # iterations in which spikes are counted


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
    """--spike-action off and log: checks trained iterations one after the other. Iterations skipped
    by the user or by an overflow are not checked and change nothing."""

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

    decides = False  # does it check before an update is made?

    def check(self, iteration: int, loss: float, grad_norm: float | None) -> Finding:
        """Check a trained iteration; returns the finding."""
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

    def line(self, iteration: int, loss: float, grad_norm: float | None) -> str | None:
        """What is printed about the last iteration; None where there is nothing to print."""
        finding = self.finding
        if finding.kind == "level shift":
            return (
                f"level shift at iteration {iteration}: many outliers in a row; the new level is "
                "accepted"
            )
        if not finding.spike:
            return None
        norm = "" if grad_norm is None else f", gradient norm {grad_norm:.4g}"
        action = {
            "loss": f"loss {loss:.4f} is {finding.excess:.3f} nats ({finding.loss_z:.1f} sigma) "
            f"above the trend{norm}",
            "grad-norm": f"gradient norm {grad_norm or math.nan:.4g} is {finding.ratio:.3g} times "
            f"the trend ({finding.norm_z:.1f} sigma), loss {loss:.4f}",
            "non-finite": f"loss {loss}{norm}",
        }[finding.kind]
        return f"spike at iteration {iteration}: {action}; {self._done()}"

    def _done(self) -> str:
        """The action taken on a spike, for the log."""
        return "no action; tools/spikes.py analyze says what to skip"

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON data."""
        if self.action == "off":
            return {}
        return {
            "detector": self._detector.state_dict(),
            "marks": list(self._marks),
            "spent": list(self._spent),
            "row": self._row and asdict(self._row),
            "rewinds": [asdict(rewind) for rewind in self.rewinds],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; it is empty if that run had no spike detection. Raises
        ForeignCheckpoint."""
        SpikePolicy.__init__(self, self.action)
        if not state or self.action == "off":
            return
        try:
            self._detector.load_state_dict(state["detector"])
            self._marks = list(map(int, state["marks"]))
            self._spent = list(map(int, state["spent"]))
            self._row = state["row"] and OpenSpike(**state["row"])
            self.rewinds = [Rollback(**rewind) for rewind in state["rewinds"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ForeignCheckpoint(
                f"the state of {NAME} in the checkpoint lacks something or has it in another form "
                f"({type(error).__name__} {error}); use another checkpoint, or --finetune "
                "[checkpoint-damaged]"
            ) from None
