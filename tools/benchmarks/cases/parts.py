"""A corpus in many parts, beside one pair that one process writes and reads."""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases.data import make_text
from cases.subject import Command, Subject
from harness import COMMAND, Case, Setup, Side, benchmark, each
from processes import ROOT

WHAT = ("open", "read", "merge", "plan", "ray")
KEY = "_text_document"
MERGED_PARTS = 25


def tool_command(name: str, *words: object) -> list[str]:
    """The command line of a program of tools/."""
    return [sys.executable, str(ROOT / "tools" / name), *map(str, words)]


def preprocess_command(text: tuple[str, str, str], prefix: Path, *flags: object) -> list[str]:
    """The command line that tokenizes text.jsonl with vocab.json and merges.txt."""
    source, vocab, merges = text
    tokenizer = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab)
    files = ("--merge-file", merges, "--input", source, "--output-prefix", prefix)
    return tool_command("preprocess_data.py", "--append-eod", *tokenizer, *files, *flags)


def part_bytes(count: int, text: tuple[str, str, str]) -> int:
    """--part-bytes that gives so many parts."""
    return -(-Path(text[0]).stat().st_size // count)


def tokenize_in_parts(text: tuple[str, str, str], prefix: Path, count: int) -> None:
    """Make a set of so many parts on this machine."""
    flags = ("--task", "0/1", "--part-bytes", part_bytes(count, text))
    Command(preprocess_command(text, prefix, *flags)).turn()


class Opened(Subject):
    """A data set is opened. The first time, a set of parts also joins their indices."""

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._first = 0.0

    def warm_up(self) -> list[int]:
        """Numbers of documents and tokens."""
        self._first = self.turn()
        data = self._open()
        return [len(data.document_indices), int(data.sequence_lengths.sum())]

    def _open(self) -> Any:
        from megatron.data.indexed_dataset import IndexedDataset

        return IndexedDataset(self._prefix)

    def turn(self) -> float:
        """Seconds until it can be read."""
        start = time.perf_counter()
        self._open()
        return time.perf_counter() - start

    def facts(self) -> dict[str, float]:
        """Seconds of the first time."""
        return {"first s": self._first}


class Read(Opened):
    """Random documents of an open data set."""

    def __init__(self, prefix: str, documents: int):
        super().__init__(prefix)
        self._data = self._open()
        sequences = len(self._data.sequence_lengths)
        self._numbers = random.Random(1).choices(range(sequences), k=documents)

    def turn(self) -> float:
        """Seconds of all of them."""
        start = time.perf_counter()
        for number in self._numbers:
            self._data[number]
        return time.perf_counter() - start

    def facts(self) -> dict[str, float]:
        """None."""
        return {}


COPY = """
import os, shutil, sys
*parts, output = sys.argv[1:]
with open(output, "wb") as written:
    for part in parts:
        with open(part, "rb") as file:
            shutil.copyfileobj(file, written, 1 << 24)
    written.flush()
    os.fsync(written.fileno())
"""


@benchmark
def parts(setup: Setup, what: str = each(*WHAT), mb: float = 240.0) -> Iterator[Case]:
    """1,000 parts beside one pair: opened again (open), 20,000 random documents (read);
    merge_datasets.py of 25 parts beside a copy of their .bin files with fsync (merge); the last
    of 100,000 tasks beside the last of ten (plan); preprocess_data.py --cluster ray on 2 CPUs of
    a cluster that is up beside --workers 2 (ray). mb: MB of this repository's sources (a tenth of
    it for open and read)."""
    if what not in WHAT:
        raise ValueError(f"what={what}: is none of {', '.join(WHAT)}")
    folder = Path(tempfile.mkdtemp(prefix=f"{what}-", dir=setup.folder))
    small = what in ("open", "read")
    text = make_text(folder, 0.3 if setup.small else mb / 10 if small else mb)
    pair, part_set = folder / "pair", folder / "parts"
    amount = Path(text[0]).stat().st_size / 1e6
    if what == "ray":
        yield from ray_case(text, folder, amount)
    elif what == "plan":
        yield plan_case(text, folder, 100 if setup.small else 100_000)
    elif what == "merge":
        tokenize_in_parts(text, part_set, MERGED_PARTS)
        yield merge_case(f"{part_set}{KEY}", folder)
    else:
        count = 10 if setup.small else 1_000
        Command(preprocess_command(text, pair)).turn()
        tokenize_in_parts(text, part_set, count)
        subject = "cases.parts:Opened" if what == "open" else "cases.parts:Read"
        arguments = {} if what == "open" else {"documents": 20 * count}
        sides = [
            Side(name, subject, {"prefix": f"{prefix}{KEY}", **arguments}, ours=prefix == part_set)
            for name, prefix in ((f"{count} parts", part_set), ("one pair", pair))
        ]
        documents = arguments.get("documents", 1)
        yield Case(what, sides, documents, "documents" if documents > 1 else "")


def ray_case(text: tuple[str, str, str], folder: Path, amount: float) -> Iterator[Case]:
    """A cluster of this machine, up while the case runs."""
    if not importlib.util.find_spec("ray"):
        raise ValueError("parts what=ray: needs the package ray (make ray)")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        ray = ("--cluster", "ray", "--cluster-address", cluster.address)
        sides = []
        for name, flags in (
            ("--cluster ray", (*ray, "--part-bytes", part_bytes(MERGED_PARTS, text))),
            ("--workers 2", ("--workers", 2)),
        ):
            prefix = folder / name.replace(" ", "")
            words = preprocess_command(text, prefix, *flags)
            sides.append(Side(name, COMMAND, {"words": words, "writes": str(prefix)}))
        yield Case("ray", sides, amount, "MB")
    finally:
        cluster.shutdown()


def plan_case(text: tuple[str, str, str], folder: Path, count: int) -> Case:
    """The last of so many tasks, whose input is one line at the end of a sparse file."""
    sides = []
    for tasks in (count, 10):
        source = folder / f"sparse-{tasks}.jsonl"
        line = b'\n{"text": "a"}\n'
        with open(source, "wb") as file:
            file.seek((tasks << 20) - len(line))
            file.write(line)
        prefix = folder / f"planned-{tasks}"
        flags = ("--task", f"{tasks - 1}/{tasks}", "--part-bytes", 1 << 20, "--workers", 1)
        words = preprocess_command((str(source), *text[1:]), prefix, *flags)
        sides.append(Side(f"{tasks} tasks", COMMAND, {"words": words, "writes": str(prefix)}))
    return Case("plan", sides, count, "parts")


def merge_case(prefix: str, folder: Path) -> Case:
    """With all checksums, beside a copy of the same bytes."""
    output, copy = folder / "merged", folder / "copy.bin"
    words = tool_command("merge_datasets.py", "--input", prefix, "--output-prefix", output)
    files = sorted(map(str, Path(f"{prefix}.parts").glob("*.bin")))
    size = sum(Path(file).stat().st_size for file in files)
    copied = [sys.executable, "-c", COPY, *files, str(copy)]
    common = {"digest": (".bin",)}
    sides = [
        Side("merge", COMMAND, {"words": words, "writes": str(output), **common}),
        Side("copy", COMMAND, {"words": copied, "writes": str(copy), **common}, ours=False),
    ]
    return Case("merge", sides, size / 1e6, "MB")
