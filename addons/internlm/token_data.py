"""Convert token data between InternLM's format (X.bin of JSON lines, X.bin.meta) and Megatron's
(X.bin, X.idx, and X.json with their checksums).

Each sample becomes a document; ids are not changed, negative ones neither. The output has the
folders of the input, so that subsets stay subsets. Existing files are never overwritten. Exit
codes: 0 done, 1 wrong data or a disk error, 2 a wrong command line.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megatron.arguments import arg
from megatron.data.blend.paths import PARTIAL
from megatron.data.indexed_dataset import bin_path, idx_path
from megatron.data.pair_checksums import write_sums
from megatron.data.preprocess.dataset_writer import write_index
from megatron.data.tokenizers.metadata import json_path
from tools.shared.program import Command, run_command
from tools.shared.progress import Progress

from .token_files import JsonlTokens, JsonlWriter, meta_path


@dataclass(frozen=True, kw_only=True)
class ToInternLM:
    """Options of to-internlm."""

    folder: str = arg(position="positional", metavar="FOLDER")
    """directory with the data, searched recursively"""

    out: str = arg(position="positional", metavar="OUT")
    """directory for the result; created if missing"""


@dataclass(frozen=True, kw_only=True)
class ToMegatron(ToInternLM):
    """Options of to-megatron."""

    dtype: Literal["int32", "uint16"] = arg("int32")
    """format of the ids: uint16 holds ids from 0 to 65535 in half the space"""


def to_megatron(
    path: str, out: str, dtype: str, progress: Callable[[int, int], None]
) -> tuple[int, int]:
    """One file, and the checksums of its result in PREFIX.json; the number of its samples and of
    its tokens."""
    samples = JsonlTokens(path)
    lengths = samples.lengths
    fits = np.iinfo(dtype)
    partial = f"{out}{PARTIAL}{uuid.uuid4().hex}"
    try:
        with open(bin_path(partial), "xb") as file:
            for number in range(len(lengths)):
                ids = samples.ids(number)
                if len(ids) and not fits.min <= ids.min() <= ids.max() <= fits.max:
                    raise ValueError(
                        f"{path}: sample {number}: token ids {ids.min()} .. {ids.max()} do not fit "
                        f"{dtype}; give another --dtype [token-id-out-of-range]"
                    )
                file.write(ids.astype(dtype).tobytes())
                progress(number + 1, len(lengths))
            file.flush()
            os.fsync(file.fileno())
        each = np.ones(len(lengths), np.int64)
        write_index(
            idx_path(partial), np.dtype(dtype), (len(each), len(each)), lambda: [lengths], [each]
        )
        for path_of in (bin_path, idx_path):
            os.replace(path_of(partial), path_of(out))
    finally:
        for path_of in (bin_path, idx_path):
            Path(path_of(partial)).unlink(missing_ok=True)
    write_sums(out)
    return len(samples.lengths), int(samples.lengths.sum())


def to_internlm(path: str, out: str, progress: Callable[[int, int], None]) -> tuple[int, int]:
    """The same, the other way."""
    from ..finetuning.documents import Documents

    documents = Documents(path[:-4])
    with JsonlWriter(f"{out}.bin") as writer:
        for number, length in enumerate(documents.lengths.tolist()):
            writer.add(documents.read(number, 0, length) if length else np.empty(0, np.int64))
            progress(number + 1, len(documents.lengths))
    return len(documents.lengths), int(documents.lengths.sum())


def outputs(folder: str, out: str, to: type) -> Iterator[tuple[str, str]]:
    """(a file, its result without .bin). Raises ValueError before anything is written if one cannot
    be."""
    if not os.path.isdir(folder):
        raise ValueError(f"{folder}: is no directory; give the folder that holds the data")
    inside = os.path.realpath(folder)
    outside = os.path.realpath(out)
    if os.path.commonpath((inside, outside)) in (inside, outside):
        raise ValueError(
            f"{out}: is inside {folder}, or the other way round; give a directory apart from it"
        )
    indices = (meta_path, lambda path: idx_path(path[:-4]))
    input_index, output_index = indices if to is ToMegatron else indices[::-1]
    notes = (lambda path: json_path(path[:-4]),) if to is ToMegatron else ()
    from ..finetuning.folders import token_files

    inputs = [path for path in token_files(folder) if os.path.exists(input_index(path))]
    if not inputs:
        raise ValueError(
            f"{folder}: holds no .bin with a {'.bin.meta' if to is ToMegatron else '.idx'} next to "
            "it; this command reads such files"
        )
    for path in inputs:
        result = os.path.join(out, os.path.relpath(path, folder))
        for existing in (result, output_index(result), *(note(result) for note in notes)):
            if os.path.lexists(existing):
                raise ValueError(
                    f"{existing}: is there already; give another directory, or remove it"
                )
    for path in inputs:
        yield path, os.path.join(out, os.path.relpath(path, folder))[:-4]


def convert(options: ToInternLM) -> int:
    """All files; a line on stdout for each, and progress within long ones on stderr."""
    jobs = list(outputs(options.folder, options.out, type(options)))
    totals = np.zeros(2, np.int64)
    progress = Progress(sum(os.path.getsize(path) for path, _ in jobs))
    for number, (path, out) in enumerate(jobs, 1):
        size = os.path.getsize(path)

        def report(done: int, of: int, number: int = number, size: int = size) -> None:
            progress.update(
                size * done // of, f"file {number} of {len(jobs)}, {done:,} of {of:,} samples"
            )

        os.makedirs(os.path.dirname(out), exist_ok=True)
        if isinstance(options, ToMegatron):
            counts = to_megatron(path, out, options.dtype, report)
        else:
            counts = to_internlm(path, out, report)
        totals += counts
        progress.shift += size
        progress.clear()
        print(
            f"[{number} of {len(jobs)}] {path} -> {out}.bin: {counts[0]:,} samples, "
            f"{counts[1]:,} tokens",
            flush=True,
        )
    print(f"{len(jobs)} files, {totals[0]:,} samples, {totals[1]:,} tokens", flush=True)
    return 0


COMMANDS = {
    "to-megatron": Command(
        "write X.bin, X.idx and X.json for every X.bin with X.bin.meta below FOLDER",
        ToMegatron,
        convert,
    ),
    "to-internlm": Command(
        "write X.bin and X.bin.meta for every X.bin with X.idx below FOLDER", ToInternLM, convert
    ),
}


def main(argv: Sequence[str]) -> int:
    """Exit codes as above."""
    return run_command(COMMANDS, argv, prog="convert_data.py", description=__doc__ or "")
