"""Data of a script's own: what its train_valid_test_datasets_provider returns, as data sets of
ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron.config.data import DataConfig
from megatron.data.blend.splits import SPLITS
from megatron.data.build import Splits
from megatron.data.ledger import tokens_hash
from megatron.data.megatron_order import check_tokenizer
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest
from megatron.data.sample_lookup import TokenSpan
from megatron.data.sources import source_of


class MapDataset(Protocol):
    """A `torch.utils.data.Dataset`: its items are dictionaries of tensors or arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class OfFlags:
    """In the answer of a provider: the data set of the flags, of so many samples (None: all)."""

    size: int | None


# Called with the samples needed of train, valid and test (None: one epoch); gives three data sets.
DatasetsProvider = Callable[..., Sequence[MapDataset | None]]


def refused(text: str) -> ValueError:
    """The error about what a provider returned."""
    return ValueError(
        f"train_valid_test_datasets_provider: {text}; docs/own_scripts.md has the form of data "
        "sets and samples [datasets-provider-result]"
    )


class ScriptData:
    """A `DataSource`: the data sets that `provider` returns."""

    def __init__(self, provider: DatasetsProvider) -> None:
        self.provider = provider

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """See `DataSource`. The provider is called on every rank; every data set is asked for its
        first sample."""
        stage = "vp_stage" in inspect.signature(self.provider).parameters
        datasets = self.provider(list(request.sizes), **({"vp_stage": None} if stage else {}))
        if not isinstance(datasets, (tuple, list)) or len(datasets) != len(SPLITS):
            raise refused("returned no three data sets: train, valid and test, each may be None")
        sizes = [items.size if isinstance(items, OfFlags) else -1 for items in datasets]
        if sizes == list(request.sizes):
            return _of_flags(data, request, rows)
        if data.mock_data or any(isinstance(items, OfFlags) for items in datasets):
            raise ValueError(
                "train_valid_test_datasets_provider: returned data sets of its own beside those of "
                "the flags, or other numbers of samples than it was asked for; omit --mock-data, "
                "and return all three of one kind [two-data-sources]"
            )
        train, valid, test = (
            None
            if items is None or size == 0
            else self._data_set(split, items, size, data, request, rows)
            for split, items, size in zip(SPLITS, datasets, request.sizes, strict=True)
        )
        if train is None and request.sizes[0] != 0:
            raise refused("returned None for train; only a run with --skip-train needs none")
        return train, valid, test

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """A dry run does not call the provider."""
        return []

    def _data_set(
        self,
        split: str,
        items: MapDataset,
        size: int | None,
        data: DataConfig,
        request: DataRequest,
        rows: list[Row],
    ) -> ScriptDataset:
        if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
            raise refused(f"{split} is {type(items).__name__}, without len() or numbered items")
        count = len(items)
        once = split == "test" or data.dataloader_type != "cyclic"
        if count == 0 or (once and size is not None and count < size):
            raise ValueError(
                f"train_valid_test_datasets_provider: {split} has {count} samples, the run reads "
                f"{size}; return as many as are asked for, read data more than once with "
                "--dataloader-type cyclic, or lower --train-iters or --eval-iters [data-exhausted]"
            )
        dataset = ScriptDataset(split, items, request, data.reset_attention_mask)
        length = request.sequence_length
        read = count if size is None else size
        rows.append(Row(split, dataset.name, count, count * length, read, length))
        return dataset


def _of_flags(data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
    """As without a provider, whose data no rule has looked at before."""
    if not data.mock_data:
        named = (data.data_path, data.train_data_path, data.data_args_path)
        if not any((*named, data.per_split_data_args_path)):
            raise ValueError(
                "no data: the train_valid_test_datasets_provider reads those of the flags; give "
                "--data-path, or --mock-data [data-missing]"
            )
        check_tokenizer(data, request.identity or {})
    return source_of(data).build(data, request, rows)


class ScriptDataset:
    """A data set (`sample_lookup.Dataset`) of a script's items.

    Samples are int64: [s + 1] of an item with "text", else [5, s]: the lines of a packed row, whose
    labels are plain ids here, and its loss mask.
    """

    def __init__(
        self, split: str, items: MapDataset, request: DataRequest, reset_attention_mask: bool
    ) -> None:
        self.index_split = split
        self.name = type(items).__name__
        self._dataset = items
        self._length = request.sequence_length
        self._vocab_size = request.vocab_size
        self._eod = request.eod if reset_attention_mask else None
        self._has_text = "text" in self._sample(0)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`. Raises ValueError for one that is none, with what it lacks."""
        sample = self._sample(index)
        if self._has_text:
            return self._ids(index, sample, "text", self._length + 1)
        tokens = self._ids(index, sample, "tokens", self._length)
        mask = self._numbers(index, sample, "loss_mask", self._length, "biuf").astype(np.float32)
        # what has no loss may have any label, such as -100
        labels = self._ids(index, sample, "labels", self._length, mask != 0)
        positions = np.arange(self._length)
        if sample.get("position_ids") is not None:
            positions = self._ids(index, sample, "position_ids", self._length, limit=self._length)
        if sample.get("attention_mask") is not None:
            self._check_attention(index, np.asarray(sample["attention_mask"]), tokens)
        # The bits of the mask, since a sample is one array of integers.
        return np.stack((tokens, labels, positions, np.zeros_like(tokens), mask.view(np.int32)))

    def order(self) -> dict[str, object]:
        """What the order depends on is the script's: its first sample stands for it."""
        return {
            "kind": "script",
            "dataset": self.name,
            "sequence_length": self._length,
            "first_sample": f"{tokens_hash(self[0]):016x}",
        }

    def prefixes(self) -> list[str]:
        """There are no files."""
        return []

    def spans_of(self, index: int) -> list[TokenSpan]:
        """The sample as a document of its own."""
        return [TokenSpan(self.name, index, 0, self._length, None, None)]

    def samples_showing(self, prefix: str, document: int) -> dict[int, int]:
        """The sample of that number."""
        return {document: self._length}

    def _sample(self, index: int) -> Mapping[str, Any]:
        sample = self._dataset[index]
        if not isinstance(sample, Mapping):
            raise self._wrong(index, f"is {type(sample).__name__}, no dictionary")
        return sample

    def _ids(
        self,
        index: int,
        sample: Mapping[str, Any],
        key: str,
        length: int,
        counted: np.ndarray | None = None,
        limit: int | None = None,
    ) -> np.ndarray:
        """Numbers [length] from 0 to below `limit`, without one to the vocabulary's size; 0 where
        they are not `counted`."""
        ids = self._numbers(index, sample, key, length, "iu").astype(np.int64)
        if counted is not None:
            ids = np.where(counted, ids, 0)
        limit = limit or self._vocab_size
        # As unsigned numbers negative ids are large ones.
        if limit is not None and int(ids.view(np.uint64).max()) >= limit:
            worst = ids[ids.view(np.uint64) >= limit][0]
            raise self._wrong(index, f"has {worst} in '{key}', not in 0 to {limit - 1}")
        return ids

    def _numbers(
        self, index: int, sample: Mapping[str, Any], key: str, length: int, kinds: str
    ) -> np.ndarray:
        if key not in sample:
            keys = ", ".join(map(str, sample)) or "no key"
            raise self._wrong(index, f"has {keys}; needed: text, or tokens, labels and loss_mask")
        try:
            numbers = np.asarray(sample[key])
        except (TypeError, RuntimeError) as error:  # a tensor of another device or dtype
            raise self._wrong(index, f"has no array of '{key}': {error}") from error
        if numbers.shape != (length,) or numbers.dtype.kind not in kinds:
            raise self._wrong(
                index,
                f"has '{key}' {list(numbers.shape)} of {numbers.dtype}, needed: [{length}] of "
                f"{'integers' if kinds == 'iu' else 'numbers'}",
            )
        return numbers

    def _check_attention(self, index: int, mask: np.ndarray, tokens: np.ndarray) -> None:
        """Raise ValueError unless `mask` [1, s, s], True where nothing is seen, is what the model
        computes: causal, with --reset-attention-mask inside documents."""
        causal = np.tri(self._length, dtype=bool)
        if self._eod is not None:
            ends = tokens == self._eod
            documents = ends.cumsum() - ends
            causal &= documents[:, None] == documents
        if mask.size != causal.size or not np.array_equal(mask.reshape(causal.shape) != 0, ~causal):
            raise ValueError(
                f"{self.index_split} sample {index} of {self.name}: attention is causal, with "
                "--reset-attention-mask inside documents; leave attention_mask out "
                "[attention-mask-given]"
            )

    def _wrong(self, index: int, problem: str) -> ValueError:
        return refused(f"{self.index_split} sample {index} of {self.name} {problem}")
