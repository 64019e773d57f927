"""The parts of a pair that many tasks write: their names, and which of them are whole. `plan` has
the design."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.data.token_bytes import size_of
from megatron.file_sums import table_sum
from megatron.small_files import make_directories, read_json, replace_text

FOLDER = ".parts"
FORMAT = 1
# what the .json of a pair counts
COUNTS = (
    "documents",
    "bad_records",
    "blank_lines",
    "input_bytes",
    "tokens",
    "text_bytes",
    "trained_tokens",
)


def plan_path(prefix: str) -> str:
    """The file that says of which parts the pair `prefix` consists."""
    return f"{prefix}{FOLDER}/parts.json"


@dataclass(frozen=True)
class PartSet:
    """The parts of the pair `prefix`. `tasks`: how many make them; `made_of`: for each part a hash
    of what it is made of; `job`: what is the same for all parts."""

    prefix: str
    tasks: int
    made_of: tuple[str, ...]
    job: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.made_of)

    @property
    def folder(self) -> str:
        """Where the parts are."""
        return f"{self.prefix}{FOLDER}"

    def part(self, number: int) -> str:
        """The prefix of a part."""
        return f"{self.folder}/{number:06d}"

    def parts(self) -> list[str]:
        """The prefixes of all parts in order."""
        return [self.part(number) for number in range(len(self))]

    def record(self, number: int) -> dict[str, Any] | None:
        """What the .json of a part says; None unless the part is whole."""
        part = self.part(number)
        try:
            note = read_json(f"{part}.json")
            if note.pop("checksum") != table_sum(note):
                return None
            if note["part"]["made_of"] != self.made_of[number]:
                return None
            if any(type(note.get(name, 0)) is not int for name in COUNTS):
                return None
            files = note["files"]
            ends = [end for end in ("bin", "idx", "sources") if end != "sources" or end in files]
            sizes = [size_of(f"{part}.{end}") for end in ends]
            return note if sizes == [files[end]["bytes"] for end in ends] else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def records(self) -> Iterator[dict[str, Any]]:
        """`record` of every part in order. Raises ValueError for the first that is not whole."""
        for number in range(len(self)):
            note = self.record(number)
            if note is None:
                raise ValueError(
                    f"{self.prefix}: part {number} of 0 .. {len(self) - 1} is missing or not "
                    f"whole; preprocess_data.py --task {number % self.tasks}/{self.tasks}, with "
                    "the flags of the others, makes it [data-parts-missing]"
                )
            yield note

    def write_plan(self, overwrite: bool = False) -> None:
        """Write parts.json, unless it says the same already. Raises OSError; ValueError for the
        parts of another command unless `overwrite`."""
        make_directories(self.folder)
        before = None
        if os.path.exists(plan_path(self.prefix)) and not overwrite:
            before = read_plan(self.prefix)
            if before == self:
                return
        if before is not None and before.made_of != self.made_of:
            names = {**self.job, **before.job}
            differ = sorted(name for name in names if before.job.get(name) != self.job.get(name))
            raise ValueError(
                f"--output-prefix: {self.folder} has parts of another command "
                f"({', '.join(differ) or '--input or --part-bytes'} differed); give --overwrite to "
                "replace them, or another prefix [output-exists]"
            )
        table = {
            "format": FORMAT,
            "tasks": self.tasks,
            "job": dict(self.job),
            "made_of": list(self.made_of),
        }
        text = json.dumps({**table, "checksum": table_sum(table)})
        replace_text(plan_path(self.prefix), text)


def joined_note(prefix: str) -> dict[str, Any]:
    """What the .json of the pair would say, without checksums: that of the first part, and the
    counts of all of them together. Raises ValueError for a set that is not whole."""
    joined: dict[str, Any] = {}
    for note in read_plan(prefix).records():
        for name, value in note.items():
            if name in COUNTS:
                joined[name] = joined.get(name, 0) + value
            elif name not in ("part", "files"):
                joined[name] = value
    return joined


def is_set(prefix: str) -> bool:
    """Whether there are parts of this pair, and not the pair itself."""
    return os.path.exists(plan_path(prefix)) and not os.path.exists(f"{prefix}.idx")


def set_of(folder: str) -> str | None:
    """The pair whose parts are in this folder, or above it; None for any other folder."""
    prefix, inside, _ = f"{folder}/".rpartition(f"{FOLDER}/")
    return prefix if inside and os.path.exists(plan_path(prefix)) else None


def read_plan(prefix: str) -> PartSet:
    """The parts of the pair `prefix`, whole or not. Raises ValueError for a parts.json that cannot
    be understood."""
    path = plan_path(prefix)
    try:
        table = read_json(path)
        if table.pop("checksum") != table_sum(table) or table["format"] != FORMAT:
            raise ValueError("its checksum or format differs")
        tasks, made_of, job = table["tasks"], table["made_of"], table["job"]
        if not (type(tasks) is int and tasks > 0 and isinstance(job, dict)):
            raise ValueError("its tasks are no number above 0, or its job no table")
        if not (isinstance(made_of, list) and made_of):
            raise ValueError("its made_of is no list with an entry for each part")
        return PartSet(prefix, tasks, tuple(made_of), job)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: cannot be used ({type(error).__name__}: {error}); any task of "
            "preprocess_data.py writes it again with --overwrite, and parts that are whole are "
            "kept [data-file-damaged]"
        ) from None
