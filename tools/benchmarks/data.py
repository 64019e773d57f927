#!/usr/bin/env python
"""Speed and memory of the data tools, side by side with what Megatron does; `data.py tokenize
--help` says more.

python tools/benchmarks/data.py tokenize --input FILE.jsonl --vocab-file vocab.json --merge-file
merges.txt python tools/benchmarks/data.py start | resume | getitem [flags of data_startup.py]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.data.tokenizers import gpt2_bpe  # noqa: E402

TOOL = ROOT / "tools" / "preprocess_data.py"
# The tool as it is where the extra "data" is not installed.
WITHOUT = """
import importlib.util, sys
there = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "gigatoken" else there(name, *rest)
sys.modules["orjson"] = None
sys.path.insert(0, sys.argv.pop(1))
from tools import preprocess_data
sys.exit(preprocess_data.main(sys.argv[1:]))
"""
# As Megatron's preprocess_data.py does it: a pool that encodes with `tokenizers` and sends lists of
# ids to one writer.
LIKE_MEGATRON = """
import json, multiprocessing, sys
from tokenizers import Tokenizer, models, pre_tokenizers
import numpy as np
root, source, prefix, vocab, merges, workers = sys.argv[1:]
sys.path.insert(0, root)
from megatron.data.tokenizers import gpt2_bpe
from megatron.data.preprocess.dataset_writer import IndexedDatasetBuilder
vocabulary = gpt2_bpe.read_vocabulary(vocab)
engine = Tokenizer(models.BPE(vocab=vocabulary, merges=gpt2_bpe.read_merges(merges)))
engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
eod = vocabulary["<|endoftext|>"]
def encode(line):
    ids = engine.encode(json.loads(line)["text"]).ids
    return ids + [eod] if ids else ids
with open(source, encoding="utf-8") as lines, multiprocessing.Pool(int(workers)) as pool:
    with IndexedDatasetBuilder(prefix + "_text_document", np.uint16) as builder:
        for ids in pool.imap(encode, lines, 32):
            builder.add_document(ids, [len(ids)] if ids else [])
"""
# The parts of Megatron's preprocess_data_fast.py that are to be had: gigatoken on whole files,
# megatron-core's builder.
FAST_MEGATRON = """
import sys
import awkward, gigatoken, numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
source, prefix, vocabulary = sys.argv[1:]
engine = gigatoken.Tokenizer.from_json(open(vocabulary, "rb").read())
rows = engine.encode_files([source])
ends = np.cumsum(awkward.to_numpy(awkward.num(rows)))
ids = awkward.to_numpy(awkward.flatten(rows)).astype(np.uint16)
ids = np.insert(ids, ends, engine.vocab_size - 1)
lengths = np.diff(ends + np.arange(1, len(ends) + 1), prepend=0)
builder = IndexedDatasetBuilder(prefix + "_text_document.bin", dtype=np.uint16)
start = 0
for length in lengths.tolist():
    builder.add_document(ids[start:start + length], [length])
    start += length
builder.finalize(prefix + "_text_document.idx")
"""
FAST = "gigatoken as in Megatron's fast tool"
# A process's peak begins with what its parent held when it forked, so a small one starts the run
# and says what it took.
STARTER = """
import json, os, subprocess, sys, time
start = time.monotonic()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
seconds = time.monotonic() - start
print(json.dumps([seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]))
sys.exit(os.waitstatus_to_exitcode(status) & 255)
"""


class Measured(NamedTuple):
    """One run: wall clock and CPU seconds of the whole process and its workers, peak memory of the
    largest, a hash."""

    seconds: float
    cpu: float
    peak_mb: float
    digest: str


def measure(command: Sequence[str], prefix: Path) -> Measured:
    """Run a command that writes PREFIX_text_document. Raises CalledProcessError with what it
    said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    starter = [sys.executable, "-S", "-c", STARTER, *command]
    said = subprocess.run(
        starter, env=environment, capture_output=True, cwd=ROOT, check=True
    ).stdout
    digest = hashlib.sha256()
    for end in ("bin", "idx"):
        with open(f"{prefix}_text_document.{end}", "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return Measured(*json.loads(said), digest.hexdigest()[:12])


def commands(args: argparse.Namespace, prefix: Path, source: str) -> dict[str, list[str]]:
    """What is run, by name."""
    flags = [
        "--input",
        source,
        "--output-prefix",
        str(prefix),
        "--overwrite",
        "--append-eod",
        "--log-interval",
        "100000000",
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        args.vocab_file,
        "--merge-file",
        args.merge_file,
    ]
    found = {}
    for workers in args.workers:
        found[f"with the extra, {workers} workers"] = [
            sys.executable,
            str(TOOL),
            *flags,
            "--workers",
            str(workers),
        ]
    for workers in args.workers:
        found[f"without it, {workers} workers"] = [
            sys.executable,
            "-c",
            WITHOUT,
            str(ROOT),
            *flags,
            "--workers",
            str(workers),
        ]
    found[f"tokenizers as in Megatron, {max(args.workers)} workers"] = [
        sys.executable,
        "-c",
        LIKE_MEGATRON,
        str(ROOT),
        source,
        str(prefix),
        args.vocab_file,
        args.merge_file,
        str(max(args.workers)),
    ]
    if all(map(importlib.util.find_spec, ("awkward", "gigatoken", "megatron.core"))):
        found[FAST] = [
            sys.executable,
            "-c",
            FAST_MEGATRON,
            source,
            str(prefix),
            vocabulary_in_one(args, prefix.parent),
        ]
    return found


def vocabulary_in_one(args: argparse.Namespace, folder: Path) -> str:
    """The path of a tokenizer.json of the vocabulary, without special pieces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    engine = Tokenizer(
        models.BPE(
            vocab=gpt2_bpe.read_vocabulary(args.vocab_file),
            merges=gpt2_bpe.read_merges(args.merge_file),
        )
    )
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def head_of(source: str, size: int, folder: str) -> str:
    """The first lines of a file, no more than `size` bytes: for what would take too long on all of
    it."""
    if os.path.getsize(source) <= size:
        return source
    head = f"{folder}/head.jsonl"
    with open(source, "rb") as lines, open(head, "wb") as written:
        for line in lines:
            if written.tell() + len(line) > size:
                break
            written.write(line)
    return head


def tokenize(argv: Sequence[str]) -> int:
    """Whole runs from .jsonl to .bin and .idx, in turns; the best of each, and ratios."""
    parser = argparse.ArgumentParser(prog="data.py tokenize", description=tokenize.__doc__)
    parser.add_argument("--input", required=True, help=".jsonl file")
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--slow-mb", type=int, default=20, help="MB of the input that the slower ones get"
    )
    parser.add_argument("--only", default="", help="only runs whose name holds this")
    parser.add_argument("--json", help="file to write the figures to")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(args.input))) as folder:
        head = head_of(args.input, args.slow_mb * 1_000_000, folder)
        runs = {}
        for name in commands(args, Path(folder, "x"), head):
            source = args.input if name.startswith(("with the extra", FAST)) else head
            runs[name] = (source, commands(args, Path(folder, "x"), source)[name])
        runs["with the extra, on the slower ones' input"] = (
            head,
            commands(args, Path(folder, "x"), head)[f"with the extra, {max(args.workers)} workers"],
        )
        runs = {name: run for name, run in runs.items() if args.only in name}
        best: dict[str, Measured] = {}
        for _ in range(args.rounds):
            for name, (_, command) in runs.items():
                found = measure(command, Path(folder, "x"))
                best[name] = min(best.get(name, found), found)
        report = {
            name: {**found._asdict(), "mb": os.path.getsize(runs[name][0]) / 1e6}
            for name, found in best.items()
        }
    for name, row in report.items():
        print(
            f"{name:42} {row['mb']:6.0f} MB {row['seconds']:7.2f} s = "
            f"{row['mb'] / row['seconds']:6.1f} MB/s, {row['cpu']:6.2f} s CPU, peak "
            f"{row['peak_mb']:4.0f} MB, {row['digest']}"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    for size in {row["mb"] for row in report.values()}:
        if len({row["digest"] for row in report.values() if row["mb"] == size}) > 1:
            print("error: runs on the same input wrote different bytes", file=sys.stderr)
            return 1
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 measured, 1 outputs differ, 2 a wrong command line."""
    if argv[:1] == ["tokenize"]:
        return tokenize(argv[1:])
    if argv[:1] in (["start"], ["resume"], ["getitem"]):
        return subprocess.run(
            [sys.executable, Path(__file__).with_name("data_startup.py"), *argv], check=False
        ).returncode
    print(__doc__, end="", file=sys.stdout if argv[:1] in (["-h"], ["--help"]) else sys.stderr)
    return 0 if argv[:1] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
