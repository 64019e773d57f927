"""A corpus that many tasks tokenize in parts, which are read as if one machine had written them.

**Unit.** The input files are cut into units: a function of their names, sizes and --part-bytes, not
of the number of tasks. Lines (JSON Lines, .txt with --txt-lines) are cut at byte offsets: a line
belongs to the unit in whose bytes it begins. Parquet is cut at row groups; a compressed file and a
.txt document are whole; successive small files are one unit. Unit k makes part k, and task I of N
makes the parts k with k % N == I.

**Files** of a pair PREFIX (such as corpus_text_document), in PREFIX.parts/:

    parts.json               number of tasks, and for each part a hash of what it is made of
    000000.bin .idx .json    part 0, a pair like any other; its .json has that hash, too
    000000.sources           with --metadata-keys: `document_sources`
    000000.making-*/         where a process makes part 0; nobody reads it
    writer-*.json            locked by a process that makes parts; says which (`writers`)

**Whole.** The .json of a part is renamed to its place last. A part is whole if its .json is sealed,
has the hash that parts.json has, and the sizes that it records are those of the files. The hash is
over flags, vocabulary, format, and path, size and time of the input files, so a part that is whole
is not made again by whatever task, and one of another command is. Two processes that make one part
write the same bytes, each in a folder of its own: whose renames come last does not matter.

**Read.** All parts in order are what one machine writes: token files one behind the other, indices
joined. A set has no closing step: where PREFIX.parts/ exists and PREFIX.idx does not,
`IndexedDataset` reads the parts as PREFIX (`joined`).

**Engine.** What runs the tasks needs a `corpus.Corpus`, which is picklable. Its `make` may be
called for any part, anywhere, any number of times. An add-on may have one (part_engine.py).
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron import cluster
from megatron.data.preprocess.readers import InputPosition, spans

PART_BYTES = 1 << 30


@dataclass(frozen=True)
class Task:
    """Task `number`, from 0, of `count`."""

    number: int
    count: int


@dataclass(frozen=True)
class Unit:
    """What a part is made of: whole `files`, or of one file the bytes or rows `span`."""

    files: tuple[str, ...]
    span: tuple[int, int] | None = None
    rows: bool = False

    @property
    def position(self) -> InputPosition:
        """Where reading begins; line 0 stands for one whose number is not known."""
        if self.span is None or self.span[0] == 0:
            return InputPosition()
        return InputPosition(0, self.span[0], self.span[0] + 1 if self.rows else 0)

    def sources(self) -> dict[str, Any]:
        """Its part of the input, with path, size and time of change of each file. Raises
        OSError."""
        stats = [(os.path.abspath(file), os.stat(file)) for file in self.files]
        return {
            "files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
            "span": self.span,
        }

    def made_of(self, job: Mapping[str, Any]) -> str:
        """A hash of all that its part depends on, 32 hexadecimal digits; `job`: what is the same
        for all units. Raises OSError."""
        text = json.dumps({**job, **self.sources()}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def units(files: Sequence[str], part_bytes: int, txt_lines: bool = False) -> list[Unit]:
    """The input cut into units of about `part_bytes` (as stored), in order. Raises ValueError and
    OSError for a file that cannot be read."""
    return list(_units(files, part_bytes, txt_lines))


def _units(files: Sequence[str], part_bytes: int, txt_lines: bool) -> Iterator[Unit]:
    small: list[str] = []
    total = 0
    for file in files:
        size = os.path.getsize(file)
        if small and total + size > part_bytes:
            yield Unit(tuple(small))
            small = []
            total = 0
        if size <= part_bytes:
            small.append(file)
            total += size
            continue
        rows, cuts = spans(file, part_bytes, txt_lines)
        if len(cuts) < 2:
            yield Unit((file,))
        else:
            yield from (Unit((file,), span, rows) for span in cuts)
    if small:
        yield Unit(tuple(small))


def task_of(word: str) -> Task:
    """The task that --task names: I/N, or `slurm` for the task of a SLURM array that this process
    is. Raises ValueError."""
    if word == "slurm":
        return Task(*cluster.array_task(os.environ))
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", word, re.ASCII)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(
            f"--task {word}: give I/N, I from 0 to N - 1 (0/4 is the first of four tasks), or "
            "slurm [task-malformed]"
        )
    return Task(int(match[1]), int(match[2]))
