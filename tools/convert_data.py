#!/usr/bin/env python
"""Convert token data between InternLM's format (X.bin of JSON lines, X.bin.meta) and Megatron's (X.bin, X.idx). Knows files
of both; knows no model and no tokenizer.

    python tools/convert_data.py to-megatron FOLDER OUT      every X.bin with X.bin.meta below FOLDER
    python tools/convert_data.py to-internlm FOLDER OUT      every X.bin with X.idx below FOLDER

A sample is a document, ids stay what they are (negative ones too), and files keep their place below the folder, so that
subsets stay subsets. It streams, writes aside and renames; what OUT has already is never written over. Exit codes: 0 done,
1 something is wrong with the data or the disk, 2 a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np  # noqa: E402

from megatron.data.documents import Documents  # noqa: E402
from megatron.data.indexed_dataset import IndexedDatasetBuilder, idx_path  # noqa: E402
from megatron.data.jsonl_tokens import JsonlTokens, JsonlWriter, meta_path, token_files  # noqa: E402

EVERY = 5.0  # seconds between two lines of progress


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("to-megatron", "to-internlm"):
        command = commands.add_parser(name, help=f"{name[3:]}'s format from the other one")
        command.add_argument("folder", metavar="FOLDER", help="where the data are")
        command.add_argument("out", metavar="OUT", help="directory for the result; made if it is not there")
        if name == "to-megatron":
            command.add_argument("--dtype", choices=("int32", "uint16"), default="int32",
                                 help="of the ids: uint16 for ids from 0 to 65535, half the size (default: int32)")
    return parser


def to_megatron(path: str, out: str, dtype: str, told: Callable[[int, int], None]) -> tuple[int, int]:
    """One file; the number of its samples and of its tokens."""
    samples = JsonlTokens(path)
    with IndexedDatasetBuilder(out, dtype) as builder:
        for number in range(len(samples.lengths)):
            ids = samples.ids(number)
            try:
                builder.add_document(ids, [len(ids)])
            except ValueError as error:
                raise ValueError(f"{path}: sample {number}: {error}") from None
            told(number + 1, len(samples.lengths))
    return len(samples.lengths), int(samples.lengths.sum())


def to_internlm(path: str, out: str, told: Callable[[int, int], None]) -> tuple[int, int]:
    """The same, the other way."""
    documents = Documents(path[:-4])
    with JsonlWriter(f"{out}.bin") as writer:
        for number, length in enumerate(documents.lengths.tolist()):
            writer.add(documents.read(number, 0, length) if length else np.empty(0, np.int64))
            told(number + 1, len(documents.lengths))
    return len(documents.lengths), int(documents.lengths.sum())


def outputs(folder: str, out: str, command: str) -> Iterator[tuple[str, str]]:
    """(a file, its result without .bin). Raises ValueError before anything is written if one cannot be."""
    if not os.path.isdir(folder):
        raise ValueError(f"{folder}: is no directory; give the folder that holds the data")
    inside, outside = os.path.realpath(folder), os.path.realpath(out)
    if os.path.commonpath((inside, outside)) in (inside, outside):
        raise ValueError(f"{out}: lies in {folder}, or the other way round; give a directory apart from it")
    theirs, mine = (meta_path, lambda path: idx_path(path[:-4]))[:: 1 if command == "to-megatron" else -1]
    found = [path for path in token_files(folder) if os.path.exists(theirs(path))]
    if not found:
        raise ValueError(f"{folder}: holds no .bin with a {'.bin.meta' if command == 'to-megatron' else '.idx'} beside it; "
                         "this command reads such files")
    for path in found:
        result = os.path.join(out, os.path.relpath(path, folder))
        for there in (result, mine(result)):
            if os.path.lexists(there):
                raise ValueError(f"{there}: is there already; give another directory, or remove it")
    for path in found:
        yield path, os.path.join(out, os.path.relpath(path, folder))[:-4]


def convert(options: argparse.Namespace) -> None:
    """All files; a line on stdout for each, and progress within long ones on stderr."""
    jobs = list(outputs(options.folder, options.out, options.command))
    totals = np.zeros(2, np.int64)
    for number, (path, out) in enumerate(jobs, 1):
        said = time.monotonic()

        def told(done: int, of: int, number: int = number, path: str = path) -> None:
            nonlocal said
            if time.monotonic() - said >= EVERY:
                said = time.monotonic()
                print(f"[{number} of {len(jobs)}] {path}: {done:,} of {of:,} samples", file=sys.stderr, flush=True)

        os.makedirs(os.path.dirname(out), exist_ok=True)
        if options.command == "to-megatron":
            counts = to_megatron(path, out, options.dtype, told)
        else:
            counts = to_internlm(path, out, told)
        totals += counts
        print(f"[{number} of {len(jobs)}] {path} -> {out}.bin: {counts[0]:,} samples, {counts[1]:,} tokens", flush=True)
    print(f"{len(jobs)} files, {totals[0]:,} samples, {totals[1]:,} tokens", flush=True)


def main(argv: Sequence[str]) -> int:
    """Exit codes as above."""
    options = arguments().parse_args(argv)
    try:
        convert(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
