"""What a run does about loss spikes. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """Loss spikes."""

    spike_action: Literal["off", "log", "skip-update", "rewind"] = arg(
        "log",
        dump=False,
        help="on a spike of loss or gradient norm: log says it; skip-update does not make that "
        "update; rewind goes back before it and skips its iterations; off does not look",
    )
    spike_snapshot_interval: int = arg(
        50,
        dump=False,
        help="with --spike-action rewind: iterations between copies of the run in host memory, of "
        "which two are kept; 0: none, go back to checkpoints",
    )

    @property
    def copies(self) -> int:
        """How many copies of the run a rank keeps in host memory."""
        return 2 if self.spike_action == "rewind" and self.spike_snapshot_interval else 0
