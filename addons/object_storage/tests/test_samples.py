"""Data of an object store give the samples that the same files give on a disk, through a cache that
never exceeds its bound."""

import itertools
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.finetuning.packed_samples import Packed
from megatron.addons.object_storage import block_cache, mirror
from megatron.addons.object_storage.block_cache import BlockCache, StoredFile
from megatron.addons.object_storage.stored_source import InStore
from megatron.addons.object_storage.tests.stored import stored_file
from megatron.data.megatron_order import check_tokenizer
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest
from tests import problems
from tests.core.data.corpora import build_datasets, data_flags, planned_rows, write_corpus
from tests.core.data.parts.sets import cut_in_parts
from tests.tools.kills import status_of_killed

BLOCK = 512
SIZES = {"sizes": (60, 5, 2), "sequence_length": 32}
LENGTHS = np.random.default_rng(0).integers(1, 120, 90).tolist()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(mirror, "BLOCK_BYTES", BLOCK)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two pairs and a set of parts, in a directory that stands for a bucket."""
    (tmp_path / "store" / "sub").mkdir(parents=True)
    a = write_corpus(tmp_path / "store" / "a", LENGTHS, seed=1)
    write_corpus(tmp_path / "store" / "b", LENGTHS[::-1], seed=2)
    cut_in_parts(a, tmp_path / "store" / "c", [40, 41, 90])
    write_corpus(tmp_path / "store" / "sub" / "d", LENGTHS[:70], seed=3)
    return tmp_path / "store"


def of_store(folder: Path, store: Path, bound: int = 1 << 20, **given: object) -> object:
    """The flags, their paths as those in `store`."""
    url = f"file://{store}"
    words = tuple(word.replace("@", url) for word in given.pop("data_path"))
    return data_flags(
        data_path=words,
        object_storage_cache_path=str(folder),
        object_storage_cache_gib=bound / (1 << 30),
        **given,
    )


def filled(folder: Path) -> int:
    """Bytes of the blocks, as the disk counts them."""
    sizes = [path.stat().st_size for path in folder.glob("blocks/*/*")]
    return sum(-(-size // 4096) * 4096 for size in sizes)


WORDS = [
    ("@/a",),
    ("@/c",),
    ("0.3", "@/a", "0.7", "@/b"),
    ("@/sub",),
    ("@/[ab]",),
    ("@/a", "@/b*.idx"),
]


@pytest.mark.parametrize(
    ("order", "words"), list(itertools.product(("megatron", "epoch"), WORDS)), ids=str
)
def test_samples_are_those_of_the_files(
    order: str, words: tuple[str, ...], store: Path, tmp_path: Path
) -> None:
    here = tuple(word.replace("@", str(store)) for word in words)
    flags = {"data_order": order, "split": "6,3,1"}
    local_rows, rows = [], []
    local = build_datasets(data_flags(data_path=here, **flags), local_rows, **SIZES)
    bound = 4 * 4096
    data = of_store(tmp_path / "cache", store, bound, data_path=words, **flags)
    assert len(planned_rows(data, *SIZES.values())) == len(local_rows)
    for dataset, other in zip(local, build_datasets(data, rows, **SIZES), strict=True):
        assert dataset.order() == other.order() and len(dataset) == len(other)
        for number in range(len(dataset)):
            assert np.array_equal(dataset[number], other[number])
            assert filled(tmp_path / "cache") <= bound
    assert [replace(row, name="") for row in rows] == [replace(row, name="") for row in local_rows]


@pytest.mark.parametrize("word", ["@", "@/a", "@/[ab]"])
def test_packed_samples_are_those_of_the_files(word: str, store: Path, tmp_path: Path) -> None:
    """Of a folder with subsets, of a prefix and of a pattern; what reads them ahead needs their
    blocks alone."""
    (store / "other").mkdir()
    for name in ("a", "b"):
        shutil.copy(store / f"{name}.idx", store / "other")
        shutil.copy(store / f"{name}.bin", store / "other")
    if word == "@":  # a folder of folders has its pairs in them
        for path in [*store.glob("*.idx"), *store.glob("*.bin"), *store.glob("c.parts/*")]:
            path.unlink()
        (store / "c.parts").rmdir()
    request = DataRequest(
        sizes=(60, 0, 0), sequence_length=32, micro_batch_size=2, global_batch_size=4
    )
    here = data_flags(train_data_path=(word.replace("@", str(store)),))
    bound = 24 * 4096
    data = data_flags(
        train_data_path=(word.replace("@", f"file://{store}"),),
        object_storage_cache_path=str(tmp_path / "cache"),
        object_storage_cache_gib=bound / (1 << 30),
    )
    local = Packed().build(here, request, [])[0]
    read = InStore(Packed()).build(data, request, [])[0]
    assert len(read) == len(local) and read.order() == local.order()
    cache = block_cache.block_cache(str(tmp_path / "cache"))
    for number in range(len(local)):
        for needed in cache.noted(read.__getitem__, [number]):
            cache.fetch(needed.stored, needed.number, time.time_ns())
        missed = cache.counts().missed
        assert np.array_equal(read[number], local[number])
        assert cache.counts().missed == missed and filled(tmp_path / "cache") <= bound


def test_a_copy_that_was_not_finished_is_made_again(store: Path, tmp_path: Path) -> None:
    """Killed while the index was copied, and after."""
    folder = tmp_path / "cache"
    data = of_store(folder, store, data_path=("@/a",), split="1,0,0")

    def work() -> int:
        build_datasets(data, sizes=(9, 0, 0), sequence_length=32)
        return 0

    assert status_of_killed("rename", 1, work) == -9
    assert len(list((folder / "files").glob("*/"))) == 1
    assert len(build_datasets(data, sizes=(9, 0, 0), sequence_length=32)[0][8]) == 33
    [mirrored] = (folder / "files").glob("*/")
    assert len(mirrored.name) == 16


def test_what_is_not_there_is_said(store: Path, tmp_path: Path) -> None:
    for word in ("@/x", "@/x*", "@/nowhere/x"):
        data = of_store(tmp_path / "cache", store, data_path=(word,))
        with problems.raises(FileNotFoundError, "data-not-found", word[2:]):
            build_datasets(data, **SIZES)
    data = of_store(tmp_path / "cache", store, data_path=("@/../store/a",))
    with problems.raises(ValueError, "name-not-safe", store):
        build_datasets(data, **SIZES)
    data = data_flags(data_path=("s3://bucket/a",), object_storage_cache_path=None)
    with problems.raises(ValueError, "object-storage-cache-missing", "s3://bucket/a"):
        build_datasets(data, **SIZES)


@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_errors_name_the_url(order: str, store: Path, tmp_path: Path) -> None:
    """Of what is wrong in the store, and of a copy that is damaged: by a build, a dry run and the
    check of the tokenizer."""
    folder = tmp_path / "cache"
    idx = (store / "a.idx").read_bytes()
    sealed = (store / "c.parts/000001.json").read_bytes()
    identity = {"class": "GPT2BPETokenizer", "files": []}
    calls = {
        "build": lambda data: build_datasets(data, **SIZES),
        "plan": lambda data: planned_rows(data, *SIZES.values()),
        "tokenizer": lambda data: check_tokenizer(data, identity),
    }
    for word, name, content, code, named, reads in (
        ("@/a", "a.idx", idx[:-8], "data-file-damaged", "a.idx", ["build", "plan"]),
        ("@/a", "a.idx", b"x" * len(idx), "data-file-damaged", "a.idx", ["build", "plan"]),
        ("@/a", "a.bin", b"12", "data-file-damaged", "a.bin", ["build", "plan"]),
        ("@/a", "a.json", b"{", "tokenizer-record-malformed", "a.json", ["tokenizer"]),
        ("@/c", "c.parts/parts.json", sealed, "data-file-damaged", "c.parts/parts.json", calls),
        ("@/c", "c.parts/000001.json", sealed[:-9], "data-parts-missing", "c: ", calls),
        ("@/c", "c.parts/000001.json", sealed, "data-of-another-tokenizer", "c: ", ["tokenizer"]),
    ):
        before = (store / name).read_bytes() if (store / name).exists() else None
        (store / name).write_bytes(content)
        mirror.local_word.cache_clear()
        data = of_store(folder, store, data_path=(word,), split="1,0,0", data_order=order)
        for read in reads:
            with pytest.raises(ValueError) as caught:
                calls[read](data)
            said = str(caught.value)
            problems.assert_problem(said, code, f"file://{store}/{named}")
            assert "/files/" not in said
            assert ("--object-storage-cache-path" in said) == (code == "data-file-damaged")
        (store / name).unlink()
        if before is not None:
            (store / name).write_bytes(before)
    mirror.local_word.cache_clear()
    rows: list[Row] = []
    build_datasets(data, rows, **SIZES)
    assert {row.name for row in rows} == {f"file://{store}/c"}


def test_a_file_that_is_replaced_is_read_again(store: Path, tmp_path: Path) -> None:
    data = of_store(tmp_path / "cache", store, data_path=("@/a",), split="1,0,0")
    first = build_datasets(data, **SIZES)[0][0]
    shutil.copy(store / "b.bin", store / "a.bin")
    shutil.copy(store / "b.idx", store / "a.idx")
    mirror.local_word.cache_clear()  # as another process
    second = build_datasets(data, **SIZES)[0]
    of_b = build_datasets(data_flags(data_path=(str(store / "b"),), split="1,0,0"), **SIZES)[0]
    assert np.array_equal(second[0], of_b[0]) and not np.array_equal(first, second[0])


@pytest.mark.parametrize("change", ["same size", "shorter", "longer", "removed"])
def test_a_file_that_is_replaced_while_it_is_read(
    change: str, stored: StoredFile, store: Path, tmp_path: Path
) -> None:
    """Blocks of the old content may be read on, none of the new one is given or kept."""
    path = store / "a.bin"
    whole = path.read_bytes()
    cache = BlockCache(str(tmp_path / "cache"))
    cache.set_bound(1 << 20)
    assert cache.read(stored, 0, 2 * BLOCK) == whole[: 2 * BLOCK]
    other = bytes(255 - byte for byte in whole)
    contents = {"same size": other, "shorter": other[:BLOCK], "longer": other + b"x"}
    path.unlink()
    if change in contents:
        path.write_bytes(contents[change])
    assert cache.read(stored, 0, 2 * BLOCK) == whole[: 2 * BLOCK]
    began = time.monotonic()
    for number in (2, 3):
        with problems.raises(ValueError, "object-store-changed", stored.url):
            cache.read(stored, number * BLOCK, BLOCK)
    assert time.monotonic() - began < 5
    assert {block.name for block in (tmp_path / "cache").glob("blocks/*/*")} == {
        "00000000",
        "00000001",
    }


@pytest.fixture
def stored(store: Path) -> StoredFile:
    path = store / "a.bin"
    return stored_file(path)


@pytest.mark.parametrize("damage", ["flipped", "cut short", "longer", "empty"])
def test_a_damaged_block_is_fetched_again(
    damage: str, stored: StoredFile, store: Path, tmp_path: Path
) -> None:
    """As a power failure may leave it: a name, and not the bytes behind it."""
    whole = (store / "a.bin").read_bytes()
    before = BlockCache(str(tmp_path / "cache"))
    before.set_bound(1 << 20)
    assert before.read(stored, 0, stored.size) == whole
    path = sorted((tmp_path / "cache").glob("blocks/*/*"))[1]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    damaged = {"flipped": data, "cut short": data[:-1], "longer": bytes(data) + b"x", "empty": b""}
    path.write_bytes(damaged[damage])
    after = BlockCache(str(tmp_path / "cache"))
    assert after.read(stored, 0, stored.size) == whole
    assert after.counts().blocks == 1
    assert len(path.read_bytes()) == BLOCK + 8
    after.set_bound(0)
    assert filled(tmp_path / "cache") == 0


@pytest.mark.parametrize("call", ["write", "utime", "replace"])
def test_a_block_of_a_killed_process_is_not_used(
    call: str, stored: StoredFile, store: Path, tmp_path: Path
) -> None:
    """Killed while it writes a block: the next process fetches that one, and the bound holds."""
    bound = 3 * 4096

    def work() -> int:
        cache = BlockCache(str(tmp_path / "cache"))
        cache.set_bound(bound)
        cache.read(stored, 0, stored.size)
        return 0

    assert status_of_killed(call, 3, work) == -9
    assert (tmp_path / "cache" / "partial").exists()
    cache = BlockCache(str(tmp_path / "cache"))
    for start in range(0, stored.size - 10, 300):
        assert cache.read(stored, start, 10) == (store / "a.bin").read_bytes()[start : start + 10]
        assert filled(tmp_path / "cache") <= bound
    assert cache.counts().blocks >= stored.size // BLOCK - 2


def test_what_was_used_longest_ago_goes_first(stored: StoredFile, tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path / "cache"))
    cache.set_bound(4 * 4096)
    for number in (3, 0, 1, 2, 4):
        cache.read(stored, number * BLOCK, 1)
    names = {path.name for path in (tmp_path / "cache").glob("blocks/*/*")}
    assert names == {f"{number:08x}" for number in (0, 1, 2, 4)}


def test_a_full_disk_is_one_error(
    stored: StoredFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache(str(tmp_path / "cache"))
    cache.set_bound(1 << 20)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(block_cache.os, "write", full)
        with problems.raises(ValueError, "object-storage-cache-unusable", str(tmp_path / "cache")):
            cache.read(stored, 0, 1)
    cache.read(stored, 0, 1)
    assert filled(tmp_path / "cache") == 4096


def test_processes_share_blocks_and_the_bound(
    stored: StoredFile, store: Path, tmp_path: Path
) -> None:
    whole = (store / "a.bin").read_bytes()
    folder = str(tmp_path / "cache")
    BlockCache(folder).set_bound(6 * 4096)
    children = []
    for seed in range(4):
        child = os.fork()
        if not child:
            random = np.random.default_rng(seed)
            cache = BlockCache(folder)
            for start in random.integers(0, stored.size - 700, 100).tolist():
                if cache.read(stored, start, 700) != whole[start : start + 700]:
                    os._exit(3)
                if filled_or_changing(tmp_path / "cache") > 6 * 4096:
                    os._exit(4)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4


def filled_or_changing(folder: Path) -> int:
    """As `filled`, while other processes remove blocks."""
    total = 0
    for path in folder.glob("blocks/*/*"):
        try:
            total += -(-path.stat().st_size // 4096) * 4096
        except FileNotFoundError:
            pass
    return total


def test_the_cache_is_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        BlockCache(str(tmp_path / "cache"))
    finally:
        os.umask(before)
    for folder in ("", "blocks", "windows", "files"):
        path = tmp_path / "cache" / folder
        assert path.stat().st_mode & 0o777 == 0o700
        for mode in (0o770, 0o707, 0o722):
            path.chmod(mode)
            with problems.raises(ValueError, "object-storage-cache-not-private", path):
                BlockCache(str(tmp_path / "cache"))
        path.chmod(0o755)  # others may read it
        BlockCache(str(tmp_path / "cache"))
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with problems.raises(ValueError, "object-storage-cache-not-private", tmp_path / "cache"):
        BlockCache(str(tmp_path / "cache"))
