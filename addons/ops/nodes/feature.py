"""--gpu-sniff-test-interval: the check of tools/check_nodes.py between iterations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.training.hook import Hook


@dataclass(frozen=True)
class NodeCheckConfig(Feature):
    """Check of nodes."""

    gpu_sniff_test_interval: int | None = arg(None, minimum=1, per_run=True)
    """before training and every N iterations: measure GEMMs, copies and messages of 1 MiB on all
    ranks, and name those that are slow or whose numbers are wrong (as tools/check_nodes.py)"""

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """A line of each check."""
        if self.gpu_sniff_test_interval:
            from .hook import NodeCheck

            yield NodeCheck(loop.run, self.gpu_sniff_test_interval)
