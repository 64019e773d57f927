"""The sources of samples and which flags choose them. A new source is a class in a file of its own
and a row of SOURCES."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from megatron import addons
from megatron.config.data import DataConfig
from megatron.data.build import Splits, build_mock
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest
from megatron.data.url_names import urls_in_errors, with_urls


class DataSource(Protocol):
    """Where samples come from, and in which order. Its data sets are `sample_lookup.Dataset`s,
    which locate their samples. Both methods raise ValueError or FileNotFoundError with flag or
    file, what is wrong and what to do."""

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """Data sets of train, valid and test; `rows` gets the table of what is read."""

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """The same table for a dry run, without samples and index caches."""


class Mock:
    """--mock-data: no files."""

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """See `DataSource`."""
        return build_mock(data, request, rows)

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """No file is read, so there is no row."""
        return []


class MegatronOrder:
    """--data-order megatron: .bin/.idx pairs in Megatron's order, from cached indices."""

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """See `DataSource`."""
        from megatron.data.megatron_order import build_in_megatron_order

        return build_in_megatron_order(data, request, rows)

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """See `DataSource`."""
        from megatron.data.dry_run import rows_in_megatron_order

        return rows_in_megatron_order(data, request)


class EpochOrder:
    """--data-order epoch: .bin/.idx pairs in a permutation of each epoch, without indices."""

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """See `DataSource`."""
        from megatron.data.epoch.build import build_in_epoch_order

        return build_in_epoch_order(data, request, rows)

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """See `DataSource`."""
        from megatron.data.epoch.build import rows_in_epoch_order

        return rows_in_epoch_order(data, request)


class Packed:
    """--packed-samples: rows of whole samples, which an add-on reads (packed_samples.py)."""

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """See `DataSource`."""
        packed = addons.needed("packed_samples", "--packed-samples")
        splits: Splits = packed.build_packed_datasets(data, request, rows)
        return splits

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """The data sets are built, which reads lengths only."""
        rows: list[Row] = []
        self.build(data, replace(request, check_tokens=False, identity=None), rows)
        return rows


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


class SourceRow(NamedTuple):
    """A source, and whether the flags choose it."""

    chosen: Callable[[DataConfig], bool]
    source: DataSource


# The first whose condition holds is taken.
SOURCES = (
    SourceRow(lambda data: data.packed_samples, Packed()),
    SourceRow(lambda data: data.mock_data, Mock()),
    SourceRow(lambda data: data.data_order == "epoch", EpochOrder()),
    SourceRow(lambda data: True, MegatronOrder()),
)


def source_of(data: DataConfig) -> DataSource:
    """The source that these flags choose."""
    source = next(choice.source for choice in SOURCES if choice.chosen(data))
    return InStore(source) if data.object_storage_cache_path else source
