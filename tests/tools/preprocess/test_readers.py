"""Input files in blocks: every kind of file gives the same lines, wherever reading begins, and a
damaged one is named."""

import gzip
import json
import lzma
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron.data.preprocess import readers as inputs
from megatron.data.preprocess import unpack
from megatron.data.preprocess.readers import FileBlock, FileReader, InputPosition
from tests import problems


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(inputs, "SCAN", 64)
    monkeypatch.setattr(unpack, "ROWS", 7)
    monkeypatch.setattr(unpack, "CHUNK", 99)


def zst(content: bytes) -> bytes:
    """Two frames, as `cat a.zst b.zst` has them, the first without its size in its head."""
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2
    machine = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return machine.compress(content[:half]) + machine.flush() + zstandard.compress(content[half:])


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": lambda content: gzip.compress(content[:500]) + gzip.compress(content[500:]),
    ".jsonl.xz": lambda content: lzma.compress(content[:500]) + lzma.compress(content[500:]),
    ".jsonl.zst": zst,
}


def lines_of(seed: int, count: int = 300) -> bytes:
    """Lines of 0 to 400 bytes, one of them longer than three blocks, the last without its end."""
    draw = random.Random(seed)
    lines = [bytes(draw.choices(b"ab \xc3\xa9", k=draw.randint(0, 400))) for _ in range(count)]
    lines[count // 2] = b"x" * 3500
    return b"\n".join([*lines, b"end"])


def read(files: list[str], position: InputPosition | None = None, **flags: bool) -> list[FileBlock]:
    return list(
        FileReader(files, ("text",), **flags).blocks(position or InputPosition(), lambda name: None)
    )


ZST = partial(pytest.param, marks=pytest.mark.peers)


def test_a_plain_file_is_left_to_who_encodes(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines_of(1))
    assert all(block.data is None for block in read([str(tmp_path / "x.jsonl")]))
    block = read([str(tmp_path / "x.jsonl")])[-1]
    (tmp_path / "x.jsonl").write_bytes(b"1\n")
    with problems.raises(ValueError, "file-changed-while-read", "x.jsonl"):
        block.content()


DAMAGED = {
    "gzip cut": (".jsonl.gz", lambda packed: packed[:-3], "the gzip file is damaged or cut short"),
    "xz cut": (".jsonl.xz", lambda packed: packed[:-3], "the xz file is damaged or cut short"),
    "zstd cut": (".jsonl.zst", lambda packed: packed[:-3], "the zstd file is damaged or cut short"),
    "xz bit": (
        ".jsonl.xz",
        lambda packed: packed[:60] + bytes([packed[60] ^ 4]) + packed[61:],
        "the xz file is damaged",
    ),
    "zstd bits": (
        ".jsonl.zst",
        lambda packed: packed[:40] + b"\xff" * 9 + packed[49:],
        "the zstd file is damaged",
    ),
    "gz that is none": (".jsonl.gz", lambda packed: b"{}", "it does not begin as a gzip file does"),
    "zst that is none": (
        ".jsonl.zst",
        lambda packed: b"{}",
        "it does not begin as a zstd file does",
    ),
}


@pytest.mark.parametrize("what", [ZST(what) if "zst" in what else what for what in DAMAGED])
def test_a_damaged_file_is_named(tmp_path: Path, what: str) -> None:
    suffix, damage, says = DAMAGED[what]
    file = tmp_path / f"x{suffix}"
    file.write_bytes(damage(PACK[suffix](lines_of(1))))
    with pytest.raises(ValueError, match=f"{file}.*{says}"):
        read([str(file)])


@pytest.mark.peers
@pytest.mark.parametrize(
    "damage", [lambda p: p[: len(p) // 2], lambda p: p[:-4] + b"xxxx", lambda p: b"{}" + p]
)
def test_a_damaged_parquet_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": ["a"] * 100}), file)
    file.write_bytes(damage(file.read_bytes()))
    with problems.raises(ValueError, "input-file-damaged", file):
        read([str(file)])


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    (tmp_path / "x.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(unpack.importlib, "import_module", no_library)
    for name, package in (("x.zst", "zstandard"), ("x.parquet", "pyarrow")):
        with problems.raises(ValueError, "package-missing", name, package):
            read([str(tmp_path / name)])


def test_the_content_decides_not_the_name(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(gzip.compress(b'{"text": 1}\n'))
    assert json.loads(read([str(tmp_path / "x")])[0].content()) == {"text": 1}
