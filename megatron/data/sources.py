"""The sources of samples and which flags choose them. A new source is a class in a file of its own
and a row of SOURCES."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megatron import object_stores
from megatron.config.data import DataConfig
from megatron.data.build import Splits, build_mock
from megatron.data.request import DataRequest

if TYPE_CHECKING:
    from megatron.data.plan_table import Row


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


class SourceRow(NamedTuple):
    """A source, and whether the flags choose it."""

    chosen: Callable[[DataConfig], bool]
    source: DataSource


# The first whose condition holds is taken.
SOURCES = (
    SourceRow(lambda data: data.mock_data, Mock()),
    SourceRow(lambda data: data.data_order == "epoch", EpochOrder()),
    SourceRow(lambda data: True, MegatronOrder()),
)


def source_of(data: DataConfig) -> DataSource:
    """The source that these flags choose; that of --packed-samples is a feature's."""
    source = next(choice.source for choice in SOURCES if choice.chosen(data))
    if not data.object_storage_cache_path:
        return source
    in_store: DataSource = object_stores.part("stored_source").InStore(source)
    return in_store
