"""Checksums of a .bin/.idx pair, stored in its PREFIX.json: written when the pair is made, compared
when its index is read for training, and of both files by `inspect_data.py check`.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from typing import Any

from megatron.checksums import ALGORITHM, block_sums
from megatron.data.parts import part_set
from megatron.data.tokenizers import metadata
from megatron.file_sums import file_sum, sum_of_file
from megatron.small_files import replace_text

FILES = metadata.FILES
HEADER_BYTES = 34
ORDER = "idx_sha256"  # sha256 of the header and lengths of the .idx: `IndexedDataset.identity`
REMEDY = (
    "copy both files again, or make the pair again with tools/preprocess_data.py (if another "
    "program wrote the pair and it is right: inspect_data.py check --write-checksums PREFIX)"
)


def order_sha256(index: bytes | memoryview | mmap.mmap) -> str:
    """The sha256 of the header and the lengths of an .idx."""
    sequences = int.from_bytes(index[18:26], "little")
    return hashlib.sha256(memoryview(index)[: HEADER_BYTES + 4 * sequences]).hexdigest()


def sums_of(
    bin_file: str, idx_file: str, threads: int = 1, sources_file: str | None = None
) -> dict[str, Any]:
    """The sizes and checksums of the two files, and of a PREFIX.sources, read once each, the first
    by so many threads. Raises OSError."""
    sources = {}
    if sources_file is not None:
        sources["sources"] = {
            "bytes": os.path.getsize(sources_file),
            "sum": sum_of_file(sources_file),
        }
    with (
        open(idx_file, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as index,
    ):
        order = order_sha256(index)
    return {
        "algorithm": ALGORITHM,
        "bin": {"bytes": os.path.getsize(bin_file), "sum": sum_of_file(bin_file, threads=threads)},
        "idx": {
            "bytes": os.path.getsize(idx_file),
            "sum": sum_of_file(idx_file),
            ORDER: order,
        },
        **sources,
    }


def describe_with_sums(
    note: Mapping[str, Any],
    bin_file: str,
    idx_file: str,
    threads: int = 1,
    sources_file: str | None = None,
) -> str:
    """The text of a PREFIX.json: `note`, the checksums of the pair, and one of the text itself."""
    return metadata.sealed({**note, FILES: sums_of(bin_file, idx_file, threads, sources_file)})


def write_sums(prefix: str) -> None:
    """Add the checksums of a pair as it is now to its PREFIX.json. Raises OSError, and ValueError
    for a PREFIX.json that cannot be parsed."""
    note = metadata.note(prefix, verify=False) or {}
    sources = f"{prefix}.sources" if "sources" in note.get(FILES, {}) else None
    text = describe_with_sums(note, f"{prefix}.bin", f"{prefix}.idx", sources_file=sources)
    replace_text(metadata.json_path(prefix), text)


def recorded(prefix: str) -> dict[str, Any] | None:
    """What PREFIX.json records of the two files; None if it records nothing. Raises ValueError for
    a file that cannot be parsed or whose own checksum differs."""
    files = (metadata.note(prefix) or {}).get(FILES)
    if files is not None and files.get("algorithm") != ALGORITHM:
        raise ValueError(
            f"{metadata.json_path(prefix)}: its checksums are of the unknown kind "
            f"{json.dumps(files.get('algorithm'))}; {REMEDY} [data-file-damaged]"
        )
    return files


def verify_index(prefix: str, index: bytes | memoryview) -> str | None:
    """Compare the bytes of an .idx with its checksum: the recorded sha256 of its header and
    lengths, None if nothing is recorded. Raises ValueError if they differ."""
    files = recorded(prefix)
    if files is None:
        return None
    if files["idx"]["sum"] != file_sum(block_sums(index)):
        raise _differs(f"{prefix}.idx", prefix)
    return files["idx"][ORDER]


def verify_tokens(prefix: str) -> bool:
    """Compare a .bin and .sources, or those of a set of parts, with their checksums, reading all of
    them; False if none is recorded. Raises ValueError if they differ, and OSError."""
    if part_set.is_set(prefix):
        return all([verify_tokens(part) for part in part_set.read_plan(prefix).parts()])
    files = recorded(prefix)
    for end in ("bin", "sources"):
        if files and end in files and files[end]["sum"] != sum_of_file(f"{prefix}.{end}"):
            raise _differs(f"{prefix}.{end}", prefix)
    return files is not None


def _differs(path: str, prefix: str) -> ValueError:
    return ValueError(
        f"{path}: differs from its checksum in {metadata.json_path(prefix)}: it was damaged or "
        f"replaced; {REMEDY} [data-file-damaged]"
    )
