"""Small corpora for the data tests: written by our own builder, contents known token by token."""

import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.build import Splits
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest
from megatron.data.sources import source_of
from tests.pairs import PairWriter

LENGTHS = [5, 3, 8, 2, 7, 4]  # the corpus of the golden vectors: 29 tokens


def write_corpus(
    prefix: Path,
    lengths: Sequence[int],
    dtype: type = np.uint16,
    seed: int | None = None,
    vocab: int = 1000,
) -> str:
    """One document per length. Tokens count up from 0 over the whole corpus, or are random below
    `vocab`."""
    random = None if seed is None else np.random.default_rng(seed)
    at = 0
    with PairWriter(prefix, dtype) as builder:
        for length in lengths:
            tokens = (
                np.arange(at, at + length) if random is None else random.integers(0, vocab, length)
            )
            builder.add_document(tokens, [length])
            at += length
    return str(prefix)


def data_flags(**given: object) -> types.SimpleNamespace:
    """The data flags with their defaults, changed by `given`."""
    flags = dict.fromkeys(
        (
            "data_path",
            "train_data_path",
            "valid_data_path",
            "test_data_path",
            "data_args_path",
            "per_split_data_args_path",
            "split",
            "data_cache_path",
            "object_storage_cache_path",
        )
    )
    return types.SimpleNamespace(
        **{
            **flags,
            "mock_data": False,
            "mid_level_dataset_surplus": 0.005,
            "data_order": "megatron",
            "multiple_validation_sets": False,
            "dummy_data": None,
            **given,
        }
    )


def build_datasets(data: object, rows: list[Row] | None = None, **request: object) -> Splits:
    """The data sets of train, valid and test that these flags and this request give."""
    return source_of(data).build(data, DataRequest(**request), [] if rows is None else rows)


def planned_rows(
    data: object, sizes: Sequence[int | None], sequence_length: int, **request: object
) -> list[Row]:
    """The table of a dry run."""
    request = {"sizes": sizes, "sequence_length": sequence_length, **request}
    return source_of(data).plan_rows(data, DataRequest(**request))
