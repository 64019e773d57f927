"""The source of samples of a run with data in an object store."""

from dataclasses import dataclass, replace

from megatron.config.data import DataConfig
from megatron.data.build import Splits
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest
from megatron.data.sources import DataSource

from .url_names import urls_in_errors, with_urls


@dataclass(frozen=True)
class InStore:
    """A source some of whose files are in an object store: errors and table name their URLs."""

    source: DataSource

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """See `DataSource`."""
        source_rows: list[Row] = []
        with urls_in_errors(data):
            splits = self.source.build(data, request, source_rows)
        rows += _with_urls(source_rows, data)
        return splits

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """See `DataSource`."""
        with urls_in_errors(data):
            return _with_urls(self.source.plan_rows(data, request), data)


def _with_urls(rows: list[Row], data: DataConfig) -> list[Row]:
    return [replace(row, name=with_urls(row.name, data)) for row in rows]
