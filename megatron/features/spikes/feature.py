"""--spike-action: iterations whose loss or gradient norm is an outlier are found, left out or
rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.arguments import Needs, arg
from megatron.config.tree import Config, Demands
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.training.hook import Hook


@dataclass(frozen=True, kw_only=True)
class SpikeConfig(Feature):
    """Loss spikes."""

    spike_action: Literal["off", "log", "skip-update", "rewind"] = arg(
        "log",
        needs=Needs("training (--skip-train is given)", lambda v: not v["skip_train"]),
        per_run=True,
    )
    """on a spike of loss or gradient norm: log; skip-update (log, and skip the optimizer update);
    rewind (roll back before the spike and skip its iterations); off: no spike detection"""

    spike_snapshot_interval: int = arg(
        50, needs=("spike_action", "rewind"), minimum=0, per_run=True
    )
    """with --spike-action rewind: iterations between in-memory snapshots, of which two are kept; 0:
    none, roll back to checkpoints"""

    def check(self, facts: Facts) -> Iterator[str]:
        """What a rollback needs."""
        if self.spike_action != "rewind":
            return
        if not self.spike_snapshot_interval and facts["save"] is None and facts["load"] is None:
            yield (
                "--spike-action rewind: nothing to roll back to with --spike-snapshot-interval 0 "
                "and neither --save nor --load; give --save DIR, or an interval such as 50 "
                "[spike-action-without-snapshots]"
            )
        if facts["no_save_optim"]:
            yield (
                "--no-save-optim: --spike-action rewind saves the iteration it rolls back to, with "
                "the optimizer; omit one of them [spike-action-needs-optimizer-state]"
            )

    def demands(self, config: Config) -> Demands:
        """Snapshots of `RollbackBuffer`."""
        copies = {"--spike-action rewind": self._copies} if self._copies else {}
        return Demands(vetoes=self._vetoes, host_copies=copies)

    @property
    def _vetoes(self) -> bool:
        """Updates on numbers that are not finite, with skip-update on every spike."""
        return self.spike_action in ("skip-update", "rewind")

    @property
    def _copies(self) -> int:
        return 2 if self.spike_action == "rewind" and self.spike_snapshot_interval else 0

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """The detector, also where it is off: the metrics file has its columns; what acts on it."""
        from megatron.features.spikes.hook import SpikeDetection

        if not self._vetoes:
            from megatron.features.spikes.policy import SpikePolicy

            yield SpikeDetection(loop.run, SpikePolicy(self.spike_action))
            return
        from megatron.features.spikes.actions import SpikeActions
        from megatron.features.spikes.rollback import RollbackBuffer

        policy = SpikeActions(self.spike_action)
        yield SpikeDetection(loop.run, policy)
        loop.run.before_update.append(policy.before_update)
        yield RollbackBuffer(
            loop.run, loop.saving, policy, self._copies, self.spike_snapshot_interval
        )
