"""From the data flags to the packed data sets of train, validation and test."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.config.data import DataConfig
from megatron.data.blend.paths import expand
from megatron.data.blend.splits import SPLITS
from megatron.data.build import Blends, Splits, read_blends
from megatron.data.indexed_dataset import IndexedDataset, idx_path
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest
from megatron.data.sample_formats import GeneratedSamples, SampleFile, SampleFormat
from megatron.data.sample_lookup import Dataset
from megatron.data.subsets import shortened
from megatron.data.tokenizers import metadata as provenance

from .documents import Documents
from .folders import subset_names, subset_of, token_files
from .loss_mask import tokens_of
from .packed_dataset import Mode, PackedDataset, PackedFile, PackingRule

HEAD = 1024  # ids of a file's first sample that are compared with the vocabulary at the start


@dataclass(frozen=True)
class Packed:
    """--packed-samples: rows of whole samples in this `mode` (`PackingRule`), of .bin/.idx pairs
    and files of `formats` without samples of fewer than `min_length` tokens, or of those that are
    `generated`."""

    mode: Mode = "pieces"
    min_length: int = 0
    formats: Sequence[SampleFormat] = ()
    generated: GeneratedSamples | None = None

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """See `build_packed_datasets`."""
        return build_packed_datasets(self, data, request, rows)

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """The data sets are built, which reads lengths only."""
        rows: list[Row] = []
        self.build(data, replace(request, check_tokens=False, identity=None), rows)
        return rows


def build_packed_datasets(
    source: Packed, data: DataConfig, request: DataRequest, rows: list[Row]
) -> Splits:
    """The data sets of train, valid and test, None where the flags give a split nothing or 0
    samples are requested. With --multiple-validation-sets valid is a list, one of each directory
    with files (and of each prefix), whose one subset has its name.

    `rows` gets the table of the plan. Raises ValueError or FileNotFoundError with flag or file,
    what is wrong and what to do.
    """
    generated = source.generated
    builder = _Builder(request, _packing_rule(source, request), rows, source.formats)
    blends: Blends = [None] * len(SPLITS) if generated else read_blends(data)
    assert isinstance(blends, list)  # packed samples have a flag of their own for each split
    datasets: list[Dataset | None] = []
    sets: list[Dataset] | None = None
    for split, blend, size in zip(SPLITS, blends, request.sizes, strict=True):
        if size == 0:
            datasets.append(None)
        elif generated and split == "train":
            datasets.append(builder.generated(f"--dummy-data {data.dummy_data}", generated, size))
        elif blend is None:
            datasets.append(None)
        elif split == "valid" and data.multiple_validation_sets:
            datasets.append(None)
            sets = [
                builder.validation(name, paths, size)
                for name, paths in validation_sets(blend[0]).items()
            ]
        else:
            name = f"--{split}-data-path {' '.join(blend[0])}"
            subsets, files = open_files(blend[0], request.identity, source.formats)
            datasets.append(builder.build(split, name, subsets, files, size))
    train, valid, test = datasets
    return train, valid if sets is None else sets, test


def _packing_rule(source: Packed, request: DataRequest) -> PackingRule:
    shortest = 0 if source.generated else source.min_length
    return PackingRule(request.sequence_length, request.micro_batch_size, source.mode, shortest)


@dataclass(frozen=True)
class _Builder:
    """Makes the packed data sets of a request by one rule; `rows` gets what each of them reads."""

    request: DataRequest
    rule: PackingRule
    rows: list[Row]
    formats: Sequence[SampleFormat]

    def build(
        self,
        split: str,
        name: str,
        subsets: list[str],
        files: list[tuple[str, SampleFile]],
        size: int | None,
    ) -> PackedDataset:
        """Of opened files, each with its subset; `size` in samples, None for all of them."""
        request = self.request
        if request.checked_vocab_size is not None:
            for _, file in files:
                _check_head(file, request.checked_vocab_size)
        packed = [PackedFile(file, subsets.index(subset), self.rule) for subset, file in files]
        micro_batches = request.global_batch_size // request.micro_batch_size
        dataset = PackedDataset(
            name,
            packed,
            subsets,
            self.rule,
            size=None if size is None else -(-size // request.micro_batch_size),
            index_split=split,
            rows_per_batch=micro_batches if split == "train" else 1,
        )
        self.rows.extend(_plan_rows(dataset, packed))
        return dataset

    def generated(self, name: str, samples: GeneratedSamples, size: int | None) -> PackedDataset:
        """For training, of samples that are in no file."""
        vocab_size = self.request.checked_vocab_size
        if vocab_size is not None and vocab_size < samples.vocabulary:
            raise ValueError(
                f"{name}: has ids up to {samples.vocabulary - 1}, the vocabulary has {vocab_size}; "
                f"give --vocab-size {samples.vocabulary} or more [token-id-out-of-range]"
            )
        files = [(samples.subsets[0], samples.open(self.request.sequence_length))]
        return self.build("train", name, list(samples.subsets), files, size)

    def validation(self, name: str, paths: Sequence[str], size: int | None) -> PackedDataset:
        """One of several validation sets; its one subset has its name."""
        request = self.request
        files = [(name, _open(path, request.identity, self.formats)) for path in paths]
        folder = f"--valid-data-path {os.path.dirname(paths[0])}"
        return self.build(f"valid-{name}", folder, [name], files, size)


def validation_sets(words: Sequence[str]) -> dict[str, list[str]]:
    """By name the files of each set: of a folder each directory with .bin files is one,
    called by what its path has beyond the folder that all are in; a prefix or a pattern is
    one."""
    sets: dict[str, list[str]] = {}
    for word in words:
        if os.path.isdir(word) and not IndexedDataset.exists(word):
            for path in token_files(word):
                sets.setdefault(os.path.dirname(path), []).append(path)
        else:
            sets[word] = [f"{prefix}.bin" for prefix in expand(word.removesuffix(".bin"))]
    return dict(zip(shortened(list(sets)), sets.values(), strict=True))


def open_files(
    words: Sequence[str],
    identity: Mapping[str, object] | None = None,
    formats: Sequence[SampleFormat] = (),
) -> tuple[list[str], list[tuple[str, SampleFile]]]:
    """(names of the subsets, (subset, file) of each file) that the words of a data flag name.

    A word is a folder, whose directories are the subsets and whose files are pairs or of one of
    `formats`; or a prefix or a pattern of pairs, of which each is a subset of its own name.
    """
    subsets: list[str] = []
    files: list[tuple[str, SampleFile]] = []
    for word in words:
        if os.path.isdir(word) and not IndexedDataset.exists(word):
            names = subset_names(word)
            subsets += names
            named_files = [(subset_of(path, word, names), path) for path in token_files(word)]
        else:
            paths = [f"{prefix}.bin" for prefix in expand(word.removesuffix(".bin"))]
            named_files = [(os.path.basename(path)[:-4], path) for path in paths]
            subsets += [name for name, _ in named_files]
        files += [(subset, _open(path, identity, formats)) for subset, path in named_files]
    return list(dict.fromkeys(subsets)), files


def _open(
    path: str, identity: Mapping[str, object] | None, formats: Sequence[SampleFormat]
) -> SampleFile:
    prefix = path[:-4]
    pair = os.path.exists(idx_path(prefix))
    for sample_format in formats:
        second = os.path.exists(path + sample_format.index)
        if pair and second:
            raise ValueError(
                f"{path}: has {idx_path(prefix)} and {path}{sample_format.index} next to it; "
                "remove the one that is not its own [packed-format-ambiguous]"
            )
        if second or (not pair and os.path.exists(path)):
            return sample_format.open(path)
    if identity is not None:
        provenance.check(prefix, identity)
    return Documents(prefix)


def _check_head(file: SampleFile, vocab_size: int) -> None:
    """Raise ValueError if the first sample begins with ids that the vocabulary does not have."""
    if not len(file.lengths):
        return
    ids = tokens_of(file.read(0, 0, min(HEAD, int(file.lengths[0]))))
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ValueError(
            f"{file.prefix}.bin: its first sample holds the id {int(ids.max())}, the vocabulary "
            f"has {vocab_size}; give the tokenizer it was made with [token-id-out-of-range]"
        )


def _plan_rows(dataset: PackedDataset, files: Sequence[PackedFile]) -> list[Row]:
    """What a run reads of each subset; its samples are counted in --seq-length tokens."""
    plan = []
    for number, subset in enumerate(dataset.subsets):
        own_files = [file for file in files if file.subset == number]
        share = sum(map(len, own_files)) * dataset.size * dataset.rule.rows / dataset.rows
        tokens = sum(file.tokens for file in own_files)
        documents = sum(len(file.order) for file in own_files)
        plan.append(
            Row(dataset.index_split, subset, documents, tokens, share, dataset.rule.sequence_length)
        )
    return plan
