"""What passes iterations to the spike detector and its findings to the log."""

from typing import Any

from megatron.features.spikes.detector import Finding
from megatron.features.spikes.policy import NAME, SpikePolicy
from megatron.training.hook import Hook
from megatron.training.result import IterationResult
from megatron.training.run import Run


class SpikeDetection(Hook):
    """Checks each trained iteration, with skip-update and rewind before its update is made."""

    before = ("IterationLog",)

    def __init__(self, run: Run, policy: SpikePolicy):
        """Raises ForeignCheckpoint for a state that is none."""
        self._run = run
        self._policy = policy
        self._tag = "train/spike_sigma" if run.config.logging.is_short else "spike"
        policy.load_state_dict(run.progress.features.get(NAME, {}))

    def after_step(self, result: IterationResult) -> None:
        assert result.loss is not None  # the iteration was trained
        finding = self._policy.record(
            result.iteration, result.loss, result.grad_norm, result.skipped
        )
        result.columns.update(_columns(finding))
        if finding.spike:
            result.points[self._tag] = finding.sigma

    def after_skip(self, first: int, result: IterationResult) -> None:
        result.columns.update(_columns(Finding()))

    def before_save(self) -> None:
        self._run.progress.features[NAME] = self._policy.state_dict()


def _columns(finding: Finding) -> dict[str, Any]:
    """Those of the metrics file."""
    return {"spike": finding.kind or None, "spike_sigma": round(finding.sigma, 3)}
