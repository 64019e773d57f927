"""Where in its files a sample stands, and which samples show a document.

It knows datasets by their own order; it must not know batches, ranks, iterations or a vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from megatron.data.blend.blended_dataset import BlendedDataset
from megatron.data.epoch.epoch_dataset import EpochBlend
from megatron.data.gpt_dataset import GPTDataset, TokenSequences
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.packed.packed_dataset import PackedDataset

Dataset = GPTDataset | BlendedDataset | EpochBlend | PackedDataset


@dataclass(frozen=True)
class Piece:
    """A run of a sample's tokens that lie together: tokens `offset .. offset + length` of document
    `document`.

    `first_byte .. end_byte` is where they are in `<prefix>.bin`; both are None for made-up data.
    """

    prefix: str
    document: int
    offset: int
    length: int
    first_byte: int | None
    end_byte: int | None


def members(dataset: GPTDataset | BlendedDataset) -> list[GPTDataset]:
    """The datasets a blend is made of, or the one dataset."""
    return dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]


def prefixes(dataset: Dataset) -> list[str]:
    """Their data, each once, in the order they were given."""
    if isinstance(dataset, EpochBlend):
        return list(
            dict.fromkeys(prefix for member in dataset.datasets for prefix in member.prefixes())
        )
    if isinstance(dataset, PackedDataset):
        return dataset.prefixes()
    return list(dict.fromkeys(member.corpus.path_prefix for member in members(dataset)))


def pieces(dataset: Dataset, index: int) -> list[Piece]:
    """Where the tokens of sample `index` of a dataset or a blend lie, in their order."""
    if isinstance(dataset, EpochBlend):
        return [piece for run in dataset.pieces(index) for piece in _documents(*run)]
    if isinstance(dataset, PackedDataset):
        rows, row = dataset.source(index)
        return [
            Piece(rows.file.prefix, *part, *(rows.file.bytes_of(*part) or (None, None)))
            for part in rows.parts(row)
        ]
    number, sample = dataset.source(index) if isinstance(dataset, BlendedDataset) else (0, index)
    member = members(dataset)[number]
    corpus = member.corpus
    found = []
    for sequence, offset, length in member.locate(sample):
        if not isinstance(corpus, IndexedDataset):
            found.append(Piece(corpus.path_prefix, sequence, offset, length, None, None))
            continue
        document, before = corpus.document_of(sequence)
        size = corpus.dtype.itemsize
        first = int(corpus.sequence_pointers[sequence]) + offset * size
        found.append(
            Piece(
                corpus.path_prefix, document, before + offset, length, first, first + length * size
            )
        )
    return found


def _documents(prefix: str, first: int, count: int) -> list[Piece]:
    """Tokens `first .. first + count` of `prefix`.bin, document by document; its sequences lie one
    behind the other."""
    corpus = IndexedDataset(prefix)
    found = []
    end = first + count
    size = corpus.dtype.itemsize
    sequence = bisect_right(corpus.sequence_pointers, first * size) - 1
    while first < end:
        start = int(corpus.sequence_pointers[sequence]) // size
        length = int(corpus.sequence_lengths[sequence])
        count = min(end, start + length) - first
        if count > 0:
            document, before = corpus.document_of(sequence)
            found.append(
                Piece(
                    prefix,
                    document,
                    before + first - start,
                    count,
                    first * size,
                    (first + count) * size,
                )
            )
            first += count
        sequence += 1
    return found


def samples_showing(dataset: Dataset, prefix: str, document: int) -> dict[int, int]:
    """{sample: how many tokens of this document of `prefix` it holds} of a dataset or a blend, in
    rising order.

    Raises ValueError for a document that is not there.
    """
    if isinstance(dataset, EpochBlend):
        return _showing_in_epochs(dataset, prefix, document)
    if isinstance(dataset, PackedDataset):
        count = next(len(rows.file.lengths) for rows in dataset.files if rows.file.prefix == prefix)
        if not 0 <= document < count:
            raise ValueError(
                f"--document {document}: {prefix} has the documents 0 to {count - 1} "
                "[value-out-of-range]"
            )
        return dataset.showing(prefix, document)
    found: dict[int, int] = {}
    for number, member in enumerate(members(dataset)):
        if member.corpus.path_prefix != prefix:
            continue
        sequences = _sequences(member.corpus, document)
        own = _samples_of(member, sequences)
        counts = {
            sample: sum(n for sequence, _, n in member.locate(sample) if sequence in sequences)
            for sample in own
        }
        if not isinstance(dataset, BlendedDataset):
            places = own
            source = own
        else:
            places = np.flatnonzero(
                (dataset.dataset_index == number) & np.isin(dataset.dataset_sample_index, own)
            ).tolist()
            source = dataset.dataset_sample_index[places].tolist()
        found |= {
            place: counts[sample]
            for place, sample in zip(places, source, strict=True)
            if counts[sample]
        }
    return dict(sorted(found.items()))


def _showing_in_epochs(dataset: EpochBlend, prefix: str, document: int) -> dict[int, int]:
    corpus = IndexedDataset(prefix)
    sequences = _sequences(corpus, document)
    if not sequences:
        return {}
    size = corpus.dtype.itemsize
    last = sequences[-1]
    first = int(corpus.sequence_pointers[sequences[0]]) // size
    end = int(corpus.sequence_pointers[last]) // size + int(corpus.sequence_lengths[last])
    found = {}
    for sample in dataset.showing(prefix, first, end):
        runs = [
            (max(at, first), min(at + count, end))
            for name, at, count in dataset.pieces(sample)
            if name == prefix
        ]
        found[sample] = sum(max(0, stop - start) for start, stop in runs)
    return found


def _sequences(corpus: TokenSequences, document: int) -> range:
    """The sequences of a document; of made-up data a document is a sequence."""
    count = corpus.num_documents if isinstance(corpus, IndexedDataset) else len(corpus)
    if not 0 <= document < count:
        raise ValueError(
            f"--document {document}: {corpus.path_prefix} has the documents 0 to {count - 1} "
            "[value-out-of-range]"
        )
    if not isinstance(corpus, IndexedDataset):
        return range(document, document + 1)
    return range(*corpus.document_indices[document : document + 2].tolist())


def _samples_of(member: GPTDataset, sequences: range) -> list[int]:
    """The samples that may hold tokens of these sequences: a few more than do, and none too few."""
    order = member.document_index
    starts = member.sample_index[:, 0]
    places = np.flatnonzero((order >= sequences.start) & (order < sequences.stop))
    # Row r reaches from the place where it starts to that where row r + 1 does, whose first token
    # is its last label.
    first = np.maximum(np.searchsorted(starts, places, side="left") - 1, 0)
    last = np.searchsorted(starts, places, side="right") - 1
    wanted = np.zeros(len(starts), bool)
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        wanted[low : high + 1] = True
    return np.flatnonzero(wanted[member.shuffle_index]).tolist()
