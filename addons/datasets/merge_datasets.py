"""Join .bin/.idx pairs, or the parts of a set, into one pair: the documents of all inputs, in the
order given.

    python tools/merge_datasets.py --input PREFIX_OR_DIRECTORY_OR_PATTERN ... --output-prefix PREFIX

Memory does not grow with the data, and the output appears only when it is complete. Pairs made with
different tokenizers are refused; PREFIX.json names the tokenizer of the output. Where all inputs
have a PREFIX.sources (preprocess_data.py --metadata-keys), of the same keys, the output has one, in
48 bytes of memory for each document with an id. Training needs no merging: --data-path takes
directories and patterns.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron import host
from megatron.addons.datasets.source_reader import SourcesFile
from megatron.arguments import arg
from megatron.data import document_sources
from megatron.data.blend.paths import PARTIAL, expand
from megatron.data.document_sources import Trailer, sources_path
from megatron.data.indexed_dataset import (
    BLOCK,
    IndexedDataset,
    bin_path,
    idx_path,
)
from megatron.data.pair_checksums import describe_with_sums, verify_tokens
from megatron.data.parts import part_set
from megatron.data.preprocess.dataset_writer import write_index
from megatron.data.tokenizers import metadata
from megatron.data.tokenizers.metadata import json_path
from tools.shared.program import run_program
from tools.shared.progress import Progress

from .joined_metadata import common_maker, joined_counts

CHUNK = 8 << 20  # bytes that are copied at a time
MOST_THREADS = 16


def inputs(words: Sequence[str], output: str, threads: int) -> list[str]:
    """The prefixes to join, compared with their checksums. Raises ValueError or FileNotFoundError
    for what cannot be joined."""
    prefixes = [part for word in words for prefix in expand(word) for part in _parts(prefix)]
    same = [
        prefix
        for prefix in prefixes
        if os.path.realpath(idx_path(prefix)) == os.path.realpath(idx_path(output))
    ]
    if same:
        raise ValueError(
            f"--output-prefix {output}: is one of the inputs; give another place "
            "[output-is-an-input]"
        )
    first = IndexedDataset(prefixes[0])
    for prefix in prefixes:
        dataset = IndexedDataset(prefix)
        dataset.check()
        if dataset.dtype != first.dtype:
            raise ValueError(
                f"{prefix}: holds {dataset.dtype.name}, {prefixes[0]} holds {first.dtype.name}; "
                "only pairs of one dtype can be merged: preprocess both with the same tokenizer "
                "[data-dtype-differs]"
            )
    with ThreadPoolExecutor(threads) as pool:  # or damage would get a checksum of its own
        for _ in pool.map(verify_tokens, prefixes):
            pass
    return prefixes


def _parts(prefix: str) -> list[str]:
    """The parts of a set, all of which must be whole; a pair is itself."""
    if not part_set.is_set(prefix):
        return [prefix]
    IndexedDataset(prefix)  # raises ValueError for a part that is missing
    return part_set.read_plan(prefix).parts()


def check_space(prefixes: Sequence[str], folder: str) -> None:
    """Raise ValueError if the disk has less room than the inputs take on theirs."""
    paths = [path(prefix) for prefix in prefixes for path in (bin_path, idx_path)]
    wanted = sum(512 * os.stat(path).st_blocks for path in paths)
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < wanted:
        raise ValueError(
            f"--output-prefix: {folder} has {disk.f_bavail * disk.f_frsize:,} bytes free, the "
            f"inputs take {wanted:,}; give a directory with more space "
            "[disk-too-small]"
        )


def spans(corpus: IndexedDataset) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of its sequences in their order, those that lie one behind the other put
    together."""
    size = corpus.dtype.itemsize
    begin = 0
    end = 0
    for first in range(0, len(corpus), BLOCK):
        starts = corpus.sequence_pointers[first : first + BLOCK]
        ends = starts + corpus.sequence_lengths[first : first + BLOCK].astype(np.int64) * size
        breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), len(starts)], strict=True):
            if starts[low] != end:
                yield begin, end - begin
                begin = int(starts[low])
            end = int(ends[high - 1])
    yield begin, end - begin


def write_bin(prefixes: Sequence[str], path: str, progress: Progress) -> None:
    """The tokens of all sequences, one behind the other. Raises OSError, and ValueError for an
    input that became shorter meanwhile."""
    with open(path, "xb") as target:
        for prefix in prefixes:
            with open(bin_path(prefix), "rb") as source:
                for start, count in spans(IndexedDataset(prefix)):
                    source.seek(start)
                    while count:
                        block = source.read(min(CHUNK, count))
                        if not block:
                            raise ValueError(
                                "an input ended while it was read; leave data alone while they "
                                "are merged [file-changed-while-read]"
                            )
                        target.write(block)
                        count -= len(block)
                        progress.shift += len(block)
                        progress.update(0)
        target.flush()
        os.fsync(target.fileno())


def write_idx(prefixes: Sequence[str], path: str, progress: Progress) -> tuple[int, int, int]:
    """The index of all sequences; (tokens, sequences, documents)."""
    sizes = [(len(corpus), corpus.num_documents) for corpus in map(IndexedDataset, prefixes)]
    sequences, documents = (sum(column) for column in zip(*sizes, strict=True))

    def lengths() -> Iterator[np.ndarray]:
        for corpus in map(IndexedDataset, prefixes):
            for first in range(0, len(corpus), BLOCK):
                block = corpus.sequence_lengths[first : first + BLOCK]
                progress.shift += 8 * len(block)
                progress.update(0, "index")
                yield block

    counts = (
        np.diff(corpus.document_indices[first : first + BLOCK + 1])
        for corpus in map(IndexedDataset, prefixes)
        for first in range(0, corpus.num_documents, BLOCK)
    )
    dtype = IndexedDataset(prefixes[0]).dtype
    return write_index(path, dtype, (sequences, documents), lengths, counts), sequences, documents


def merge(
    prefixes: Sequence[str], output: str, threads: int, note: Mapping[str, Any]
) -> tuple[int, int, int]:
    """Write the pair, whose .json says `note`; (tokens, sequences, documents)."""
    partial = f"{output}{PARTIAL}{uuid.uuid4().hex}"
    sources = sources_path(partial)
    try:
        progress = Progress(
            sum(
                os.path.getsize(path(prefix))
                for prefix in prefixes
                for path in (bin_path, idx_path)
            )
        )
        write_bin(prefixes, bin_path(partial), progress)
        counts = write_idx(prefixes, idx_path(partial), progress)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(output) or ".") as folder:
            has_sources = merge_sources(sources, prefixes, folder)
        progress.clear()
        # The old index goes first: a reader meets the old pair, no index, or the new pair, never a
        # mixture.
        Path(idx_path(output)).unlink(missing_ok=True)
        Path(json_path(output)).unlink(missing_ok=True)
        Path(sources_path(output)).unlink(missing_ok=True)
        text = describe_with_sums(
            note,
            bin_path(partial),
            idx_path(partial),
            threads,
            sources_file=sources if has_sources else None,
        )
        Path(json_path(output)).write_text(text, encoding="utf-8")
        if has_sources:
            os.replace(sources, sources_path(output))
        os.replace(bin_path(partial), bin_path(output))
        os.replace(idx_path(partial), idx_path(output))
    finally:
        for path in (bin_path(partial), idx_path(partial), sources):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return counts


def merge_sources(target: str, prefixes: Sequence[str], folder: str) -> bool:
    """Write the sources of the documents of all these pairs, one pair behind the other; False if
    some pair has none, or the keys differ. `folder`: for files that are removed again. Raises
    OSError, and ValueError for a damaged file."""
    notes = [metadata.note(prefix) or {} for prefix in prefixes]
    if not all("sources" in note.get(metadata.FILES, {}) for note in notes):
        return False
    files = [SourcesFile(prefix, note) for prefix, note in zip(prefixes, notes, strict=True)]
    keys = files[0].trailer.keys
    if any(file.trailer.keys != keys for file in files):
        return False
    inputs: dict[tuple[str, int], int] = {}
    paths = [f"{folder}/{kind}" for kind in document_sources.KINDS]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(open(path, "wb")) for path in paths]
        documents = fields = 0
        for file in files:
            numbers = [
                inputs.setdefault((name, size), len(inputs)) for name, size in file.trailer.files
            ]
            for content, output in zip(
                file.shifted(numbers, documents, fields), outputs, strict=True
            ):
                output.write(content)
            documents += file.count
            fields += file.fields_size
    document_sources.write(target, Trailer(keys, list(inputs)), paths)
    return True


def note_of(options: Options, prefixes: Sequence[str]) -> dict[str, Any]:
    """What the .json says beside checksums; of one set of parts all that one machine would have
    written. Raises ValueError for pairs of two tokenizers."""
    sets = [prefix for word in options.input for prefix in expand(word)]
    if len(sets) == 1 and part_set.is_set(sets[0]):
        return part_set.joined_note(sets[0])
    made_by = common_maker(prefixes)
    return {"tokenizer": made_by, **joined_counts(prefixes)} if made_by else {}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    input: tuple[str, ...] = arg(metavar="PATH")
    """what to join: prefixes, directories or patterns"""

    output_prefix: str = arg(metavar="PREFIX")
    """prefix of the .bin and .idx to write"""

    threads: int | None = arg(
        None,
        minimum=1,
        help=f"threads that compute checksums (default: one per CPU core, at most {MOST_THREADS})",
    )

    overwrite: bool = arg(False)
    """replace the .bin and .idx of --output-prefix if they exist"""

    def problems(self) -> list[str]:
        """What is wrong with it."""
        output = self.output_prefix
        if self.overwrite or not all(os.path.exists(path(output)) for path in (bin_path, idx_path)):
            return []
        return [
            f"--output-prefix {output}: {output}.bin and .idx exist; give --overwrite to replace "
            "them, or another prefix "
            "[output-exists]"
        ]


def run(options: Options) -> str:
    """Merge; what to print. Raises OSError and ValueError."""
    output = options.output_prefix
    folder = os.path.dirname(output) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"--output-prefix {output}: there is no directory {folder}; make it first "
            "[directory-missing]"
        )
    threads = options.threads or min(host.cores(), MOST_THREADS)
    prefixes = inputs(options.input, output, threads)
    check_space(prefixes, folder)
    tokens, sequences, documents = merge(prefixes, output, threads, note_of(options, prefixes))
    return (
        f"{output}: {len(prefixes)} data sets, {documents:,} documents, {sequences:,} sequences, "
        f"{tokens:,} tokens"
    )


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 merged, 1 it could not be done, 2 a wrong command line."""
    return run_program(
        Options,
        lambda options: print(run(options)),
        argv,
        prog="merge_datasets.py",
        description=__doc__ or "",
        check=Options.problems,
    )
