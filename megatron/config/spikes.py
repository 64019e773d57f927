"""Flags of the spike detector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import Needs, arg


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """Loss spikes."""

    spike_action: Literal["off", "log", "skip-update", "rewind"] = arg(
        "log",
        needs=Needs("training (--skip-train is given)", lambda v: not v["skip_train"]),
        per_run=True,
        dump=False,
        help="on a spike of loss or gradient norm: log; skip-update (log, and skip the "
        "optimizer update); rewind (roll back before the spike and skip its "
        "iterations); off: no spike detection",
    )
    spike_snapshot_interval: int = arg(
        50,
        needs=("spike_action", "rewind"),
        minimum=0,
        per_run=True,
        dump=False,
        help="with --spike-action rewind: iterations between in-memory snapshots, of which "
        "two are kept; 0: none, roll back to checkpoints",
    )

    @property
    def copies(self) -> int:
        """How many copies of the run a rank keeps in host memory."""
        return 2 if self.spike_action == "rewind" and self.spike_snapshot_interval else 0
