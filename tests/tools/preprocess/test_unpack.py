"""Compressed files and parquet that unpack to far more than they have: read in pieces of bounded
memory, a record that is too long is passed by and named."""

import gzip
import lzma
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron.data.preprocess import encode, readers, unpack
from megatron.data.preprocess.readers import FileBlock, FileReader, InputPosition
from tests.problems import raises

ZST = partial(pytest.param, marks=pytest.mark.peers)
LINES = b"0123456\n" * 500
LONG = b"x" * 70_000


def zst(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(content)


def same_byte(blocks: int, byte: bytes = b"\n", window: int = 17) -> bytes:
    """A zstd frame of so many blocks of 128 KiB, 4 bytes each; log2 of its window."""
    zst(b"")  # skips the test where nothing reads such frames
    head = b"\x28\xb5\x2f\xfd\0" + bytes([window - 10 << 3])
    one = [
        struct.pack("<I", (number == blocks - 1) | 1 << 1 | 1 << 20)[:3] + byte
        for number in range(blocks)
    ]
    return head + b"".join(one)


def read(file: Path, position: InputPosition | None = None, **flags: bool) -> list[FileBlock]:
    return list(
        FileReader([str(file)], ("text",), **flags).blocks(
            position or InputPosition(), lambda name: None
        )
    )


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": gzip.compress,
    ".jsonl.xz": lzma.compress,
    ".jsonl.zst": zst,
}


@pytest.mark.parametrize("suffix", [ZST(suffix) if "zst" in suffix else suffix for suffix in PACK])
@pytest.mark.parametrize("last", [LINES, b""])
def test_a_line_that_is_too_long_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, last: bytes
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(readers, "RECORD_BYTES", 50_000)
    allowed = b"y" * 49_000 + b"\n"
    file = tmp_path / f"x{suffix}"
    file.write_bytes(PACK[suffix](LINES + allowed + LONG + b"\n" + last + LONG))
    blocks = read(file)
    long = [block for block in blocks if block.kind == "long"]
    assert [block.end - block.start for block in long] == [70_001, 70_000]
    rest = b"".join(block.content() for block in blocks if block.kind != "long")
    assert rest == LINES + allowed + last
    assert all(len(block.content()) <= 51_000 for block in blocks if block.kind != "long")
    assert [block.start for block in blocks[1:]] == [block.end for block in blocks[:-1]]
    for done in range(1, len(blocks)):
        again = read(file, InputPosition(0, blocks[done - 1].end))
        assert [(b.kind, b.start, b.end) for b in again] == [
            (b.kind, b.start, b.end) for b in blocks[done:]
        ]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_text_that_is_too_long_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(readers, "RECORD_BYTES", 50_000)
    (tmp_path / f"x{suffix}").write_bytes(PACK[suffix.replace("txt", "jsonl")](LONG))
    (block,) = read(tmp_path / f"x{suffix}")
    assert (block.kind, block.start, block.end) == ("long", 0, 70_000)
    ((texts_at, size),) = encode.records(block, ("text",))
    assert size == 70_000
    with pytest.raises(ValueError, match="50000"):
        texts_at()


def test_the_limit_is_of_a_record_not_of_where_blocks_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "RECORD_BYTES", 50_000)
    monkeypatch.setattr(encode, "RECORD_BYTES", 50_000)
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "' + b"x" * 49_987 + b'"}\n')
    for more in (0, 1):
        (block,) = read(tmp_path / "x.jsonl")
        ((texts_at, size),) = encode.records(block, ("text",))
        assert size == 50_000 + more
        if more:
            with pytest.raises(ValueError, match="50000"):
                texts_at()
        else:
            assert len(texts_at()[0][0]) == 49_987
        (tmp_path / "x.jsonl").write_bytes(b'{"text": "' + b"x" * 49_988 + b'"}\n')


BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "gzip": (".jsonl.gz", lambda: gzip.compress(LINES * 16_000)),
    "xz": (".jsonl.xz", lambda: lzma.compress(LINES * 16_000, preset=0)),
    "zstd": (".jsonl.zst", lambda: zst(LINES * 16_000)),
    "zstd, one byte": (".jsonl.zst", lambda: same_byte(500)),
    "zstd, frames": (".jsonl.zst", lambda: same_byte(8) * 60),
}


@pytest.mark.parametrize("name", [ZST(name) if "zstd" in name else name for name in BOMBS])
def test_64_mb_out_of_a_few_kb_take_less(tmp_path: Path, name: str) -> None:
    suffix, make = BOMBS[name]
    file = tmp_path / f"x{suffix}"
    file.write_bytes(make())
    assert file.stat().st_size < 400_000
    tracemalloc.start()
    size = 0
    for block in FileReader([str(file)], ("text",)).blocks(InputPosition(), lambda _: None):
        size += len(block.content())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 60_000_000 and peak < (70_000_000 if "zstd" in name else 6_000_000)


@pytest.mark.peers
def test_a_wide_window_of_zstd_is_filled_by_text_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zstandard")
    monkeypatch.setattr(unpack, "WINDOW", 1 << 20)
    (tmp_path / "x.jsonl.zst").write_bytes(same_byte(40, window=31))
    with raises(ValueError, "unpacking-takes-memory", "x.jsonl.zst"):
        read(tmp_path / "x.jsonl.zst")
    monkeypatch.setattr(unpack, "WINDOW", 8 << 20)
    assert sum(len(block.content()) for block in read(tmp_path / "x.jsonl.zst")) == 40 << 17


@pytest.mark.peers
def test_frames_of_zstd_that_are_skipped(tmp_path: Path) -> None:
    skipped = b"\x53\x2a\x4d\x18" + struct.pack("<I", 100_000) + bytes(100_000)
    (tmp_path / "x.jsonl.zst").write_bytes(zst(LINES) + skipped + zst(b"end\n"))
    assert b"".join(block.content() for block in read(tmp_path / "x.jsonl.zst")) == LINES + b"end\n"
    (tmp_path / "x.jsonl.zst").write_bytes(zst(LINES) + skipped[:-1])
    with raises(ValueError, "input-file-damaged", "x.jsonl.zst"):
        read(tmp_path / "x.jsonl.zst")


def test_the_dictionary_of_xz_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl.xz").write_bytes(lzma.compress(LINES, preset=6))
    assert len(read(tmp_path / "x.jsonl.xz")) == 1
    monkeypatch.setattr(unpack, "MEMORY", 4 << 20)
    with raises(ValueError, "unpacking-takes-memory", "x.jsonl.xz"):
        read(tmp_path / "x.jsonl.xz")


def test_streams_of_xz_with_zeros_between(tmp_path: Path) -> None:
    (tmp_path / "x.xz").write_bytes(lzma.compress(b"a\n") + bytes(8) + lzma.compress(b"b\n") * 2)
    assert b"".join(block.content() for block in read(tmp_path / "x.xz")) == b"a\nb\nb\n"


@pytest.mark.peers
class TestParquet:
    def write(self, file: Path, text: str, rows: int, **flags: object) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.table({"text": [text] * rows})
        pyarrow.parquet.write_table(table, file, compression="zstd", **flags)
        del table
        for pool in (pyarrow.default_memory_pool(), pyarrow.system_memory_pool()):
            pool.release_unused()  # which could be used again without asking for more

    @pytest.fixture(autouse=True)
    def little_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("pyarrow.parquet")
        monkeypatch.setattr(unpack, "MEMORY", 32 << 20)
        monkeypatch.setattr(unpack, "ROWS_BYTES", 1 << 20)

    def test_rows_of_one_long_string_are_read_one_by_one(self, tmp_path: Path) -> None:
        self.write(tmp_path / "x.parquet", "a" * 400_000, 200, dictionary_pagesize_limit=1 << 24)
        assert (tmp_path / "x.parquet").stat().st_size < 2000
        blocks = read(tmp_path / "x.parquet")
        assert [(block.start, block.end) for block in blocks] == [(n, n + 1) for n in range(200)]
        assert all(block.data == [["a" * 400_000]] for block in blocks)
        assert [b.start for b in read(tmp_path / "x.parquet", InputPosition(0, 7))] == [
            *range(7, 200)
        ]

    def test_a_row_that_is_too_long_is_passed_by(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readers, "RECORD_BYTES", 1 << 20)
        self.write(tmp_path / "x.parquet", "a" * (2 << 20), 3)
        assert [block.kind for block in read(tmp_path / "x.parquet")] == ["long"] * 3

    def test_a_page_that_takes_too_much_is_named(self, tmp_path: Path) -> None:
        self.write(tmp_path / "x.parquet", "a" * (4 << 20), 20, use_dictionary=False)
        with raises(ValueError, "unpacking-takes-memory", "x.parquet, row 1"):
            read(tmp_path / "x.parquet")

    def test_row_groups_are_put_together_in_spans_of_a_size(self, tmp_path: Path) -> None:
        self.write(tmp_path / "x.parquet", "a" * 99, 200, row_group_size=10)
        size = (tmp_path / "x.parquet").stat().st_size // 4
        cuts = [(0, 50), (50, 100), (100, 150), (150, 200)]
        assert readers.spans(str(tmp_path / "x.parquet"), size, False) == (True, cuts)
