"""A part is made: under temporary names, then renamed, its record last. `plan` has the design."""

import os
import shutil
import uuid
from collections.abc import Callable, Sequence

from megatron.data.parts.part_set import PartSet
from megatron.small_files import fsync

MAKING = ".making-"
BAD_RECORDS = ".bad_records.jsonl"


def make(sets: Sequence[PartSet], number: int, write: Callable[[str], None]) -> bool:
    """Make part `number` of each set, unless it is whole: whether it was made.

    `write(folder)` writes the pairs folder/0, folder/1, ..., one for each set, and folder/bad if
    records were skipped, all of it durable. Raises what it raises, and OSError; then nothing is
    left behind.
    """
    if is_whole(sets, number):
        return False
    folder = f"{sets[0].part(number)}{MAKING}{uuid.uuid4().hex}"
    os.mkdir(folder)
    try:
        write(folder)
        _publish(sets, number, folder)
    except FileNotFoundError:  # another process has made the part and tidied up
        if not is_whole(sets, number):
            raise
        return False
    finally:
        _remove(folder)
    return True


def _remove(folder: str) -> None:
    """Remove it, also where Ctrl-C, or Ray cancelling a task, comes while that is done."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def is_whole(sets: Sequence[PartSet], number: int) -> bool:
    """Whether the part is whole in each set."""
    return all(each.record(number) is not None for each in sets)


def tidy(sets: Sequence[PartSet]) -> None:
    """Remove what processes that were killed have left of parts that are whole, and parts beyond
    the last. Raises OSError."""
    folder = sets[0].folder
    for name in os.listdir(folder):
        number, making, _ = name.partition(MAKING)
        if making and number.isdecimal():
            if int(number) >= len(sets[0]) or is_whole(sets, int(number)):
                shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
    for each in sets:
        for name in os.listdir(each.folder):
            number = name.partition(".")[0]
            if number.isdecimal() and int(number) >= len(each) and MAKING not in name:
                os.unlink(f"{each.folder}/{name}")


def _publish(sets: Sequence[PartSet], number: int, folder: str) -> None:
    for key, each in enumerate(sets):
        for end in ("bin", "idx"):
            os.replace(f"{folder}/{key}.{end}", f"{each.part(number)}.{end}")
        _replace_or_remove(f"{folder}/{key}.sources", f"{each.part(number)}.sources")
    _replace_or_remove(f"{folder}/bad", f"{sets[0].part(number)}{BAD_RECORDS}")
    for each in sets:  # a record must not outlast a power failure that its files did not
        fsync(each.folder)
    for key, each in enumerate(sets):
        os.replace(f"{folder}/{key}.json", f"{each.part(number)}.json")
        fsync(each.folder)


def _replace_or_remove(source: str, target: str) -> None:
    """Have the target be the source; where there is none, have no target."""
    if os.path.exists(source):
        os.replace(source, target)
    elif os.path.exists(target):
        os.unlink(target)
