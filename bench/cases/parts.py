"""A corpus in many parts, beside one pair that one process writes and reads."""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases.programs import KEY, Text, make_text, preprocess, program
from harness import COMMAND, Case, Setup, Side, benchmark, each
from subject import Command, Subject

MERGED_PARTS = 25


class Opened(Subject):
    """A data set is opened. The first time, a set of parts also joins their indices."""

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._facts = {"first s": self.turn()}

    def work(self) -> Any:
        from megatron.data.indexed_dataset import IndexedDataset

        return IndexedDataset(self._prefix)

    def warm_up(self) -> list[int]:
        """Numbers of documents and tokens."""
        data = self.work()
        return [len(data.document_indices), int(data.sequence_lengths.sum())]

    def facts(self) -> dict[str, float]:
        """Seconds of the first time."""
        return super().facts() | self._facts


class Read(Subject):
    """Random documents of an open data set."""

    def __init__(self, prefix: str, documents: int):
        self._data = Opened(prefix).work()
        sequences = range(len(self._data.sequence_lengths))
        self._numbers = random.Random(1).choices(sequences, k=documents)

    def work(self) -> None:
        for number in self._numbers:
            self._data[number]


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


def part_bytes(text: Text, count: int) -> int:
    """--part-bytes that gives so many parts."""
    return -(-Path(text[0]).stat().st_size // count)


def make_parts(text: Text, folder: Path, count: int) -> Path:
    """The prefix of a set of so many parts."""
    flags = ("--task", "0/1", "--part-bytes", part_bytes(text, count))
    Command(preprocess(text, folder / "parts", *flags)).work()
    return folder / f"parts{KEY}"


def both(text: Text, folder: Path, count: int) -> Iterator[tuple[str, str]]:
    """Name and prefix of a set of so many parts, and of one pair."""
    yield f"{count} parts", str(make_parts(text, folder, count))
    Command(preprocess(text, folder / "pair")).work()
    yield "one pair", f"{folder}/pair{KEY}"


def opened(text: Text, folder: Path, small: bool) -> Iterator[Case]:
    """A set is opened again."""
    sides = [
        Side(name, "cases.parts:Opened", {"prefix": prefix})
        for name, prefix in both(text, folder, 10 if small else 1_000)
    ]
    yield Case("open", sides)


def read(text: Text, folder: Path, small: bool) -> Iterator[Case]:
    """Random documents, 20 a part."""
    documents = 200 if small else 20_000
    sides = [
        Side(name, "cases.parts:Read", {"prefix": prefix, "documents": documents})
        for name, prefix in both(text, folder, documents // 20)
    ]
    yield Case("read", sides, documents, "documents")


def merge(text: Text, folder: Path, small: bool) -> Iterator[Case]:
    """With all checksums, beside a copy of the same bytes."""
    prefix = make_parts(text, folder, MERGED_PARTS)
    output, copy = str(folder / "merged"), str(folder / "copy.bin")
    words = program("tools/merge_datasets.py", "--input", prefix, "--output-prefix", output)
    files = sorted(Path(f"{prefix}.parts").glob("*.bin"))
    copied = [sys.executable, "-c", COPY, *map(str, files), copy]
    sides = [
        Side("merge", COMMAND, {"words": words, "writes": output, "digest": (".bin",)}),
        Side("copy", COMMAND, {"words": copied, "writes": copy, "digest": (".bin",)}),
    ]
    yield Case("merge", sides, sum(file.stat().st_size for file in files) / 1e6, "MB")


def plan(text: Text, folder: Path, small: bool) -> Iterator[Case]:
    """The last of so many tasks, whose input is one line at the end of a sparse file."""
    counts = (100 if small else 100_000, 10)
    sides = []
    for tasks in counts:
        source = folder / f"sparse-{tasks}.jsonl"
        line = b'\n{"text": "a"}\n'
        with open(source, "wb") as file:
            file.seek((tasks << 20) - len(line))
            file.write(line)
        prefix = f"{folder}/planned-{tasks}"
        flags = ("--task", f"{tasks - 1}/{tasks}", "--part-bytes", 1 << 20, "--workers", 1)
        words = preprocess((str(source), *text[1:]), prefix, *flags)
        sides.append(Side(f"{tasks} tasks", COMMAND, {"words": words, "writes": prefix}))
    yield Case("plan", sides, counts[0], "parts")


def ray(text: Text, folder: Path, small: bool) -> Iterator[Case]:
    """A cluster of this machine, up while the case runs."""
    if not importlib.util.find_spec("ray"):
        raise ValueError("parts what=ray: needs the package ray (make ray)")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    address = ("--cluster-address", cluster.address, "--part-bytes", part_bytes(text, MERGED_PARTS))
    sides = []
    for name, *flags in (("--cluster ray", *address), ("--workers 2",)):
        prefix = f"{folder}/{name.replace(' ', '')}"
        words = preprocess(text, prefix, *name.split(), *flags)
        sides.append(Side(name, COMMAND, {"words": words, "writes": prefix}))
    try:
        yield Case("ray", sides, Path(text[0]).stat().st_size / 1e6, "MB")
    finally:
        cluster.shutdown()


WHAT = {"open": opened, "read": read, "merge": merge, "plan": plan, "ray": ray}


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
    megabytes = mb / 10 if what in ("open", "read") else mb
    text = make_text(folder, 0.3 if setup.small else megabytes)
    yield from WHAT[what](text, folder, setup.small)
