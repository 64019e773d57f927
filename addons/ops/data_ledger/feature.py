"""--data-ledger: which samples each iteration read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.config.tree import Config, Demands
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.training.hook import Hook


@dataclass(frozen=True)
class DataLedgerConfig(Feature):
    """Data ledger."""

    data_ledger: str | None = arg(None, per_run=True)
    """file with one 32-byte record per iteration: which samples it read, and their hash (read by
    tools/inspect_data.py)"""

    def missing(self) -> Iterator[str]:
        """The directory of the file."""
        from megatron.config.checks.paths import file_to_write

        if self.data_ledger is not None:
            yield from file_to_write("--data-ledger", self.data_ledger)

    def demands(self, config: Config) -> Demands:
        """The halves of the hash."""
        return Demands(step_numbers=2 if self.data_ledger else 0)

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """What counts and writes."""
        if self.data_ledger:
            from .hook import DataLedger

            yield DataLedger(loop.run, self.data_ledger)
