"""--log-straggler: the slowest rank of each log interval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.training.hook import Hook


@dataclass(frozen=True)
class StragglerConfig(Feature):
    """Stragglers."""

    log_straggler: bool = arg(False)
    """at each log interval, the rank with the longest forward and backward passes and their share
    of the iteration"""

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """The line of each log interval."""
        if self.log_straggler:
            from .hook import Stragglers

            yield Stragglers(loop.run)
