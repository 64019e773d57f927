"""Every single bit that flips in the files of a pair or of its index cache is named before a sample
is read, or changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data.blend.blended_dataset import BlendedDataset
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.megatron_order import open_corpus
from megatron.data.pair_checksums import write_sums
from megatron.data.preprocess.dataset_writer import IndexedDatasetBuilder
from megatron.data.request import DataRequest
from megatron.data.sources import source_of
from megatron.data.tokenizers import metadata
from tests import problems
from tests.load_tool import load_tool

INSPECT = load_tool("inspect_data")
MERGE = load_tool("merge_datasets")
PREPROCESS = load_tool("preprocess_data")
VOCAB = 1000
NO_FLAGS = {
    **dict.fromkeys(
        "train_data_path valid_data_path test_data_path data_args_path "
        "per_split_data_args_path data_cache_path object_storage_cache_path".split()
    ),
    "mock_data": False,
    "multiple_validation_sets": False,
    "packed_samples": False,
}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A small pair with documents of 0 to 9 tokens, written by preprocess_data.py."""
    numbers = np.random.default_rng(3)
    lines = [
        json.dumps({"text": " ".join(map(str, numbers.integers(0, VOCAB, n).tolist()))})
        for n in (5, 9, 1, 0, 7, 3)
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    command = "--workers 1 --tokenizer-type NullTokenizer --vocab-size 1000".split()
    files = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "x")]
    assert PREPROCESS.main([*files, *command]) == 0
    return str(tmp_path / "x_text_document")


def flips(path: Path, every: int = 1) -> Iterator[int]:
    """Flip each bit (or one of so many) of a file in turn; afterwards the file is as it was."""
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), every):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield bit
    path.write_bytes(data)


def samples(prefix: str, cache: IndexCache | None = None) -> list[list[int]]:
    """All samples of a blend of the pair with itself, as training reads them."""
    metadata.maker(prefix)
    dataset = GPTDataset(
        open_corpus(prefix), sequence_length=4, num_samples=None, seed=1, cache=cache
    )
    blend = BlendedDataset([dataset, dataset], [0.5, 0.5], 8, cache=cache)
    return [blend[number].tolist() for number in range(len(blend))]


def silent(path: Path, prefix: str, expected: list[list[int]]) -> list[int]:
    """The bits of a file of which nothing is said, and that change the samples."""
    found = []
    for bit in flips(path):
        try:
            if samples(prefix) != expected:
                found.append(bit)
        except ValueError as error:
            text = str(error)
            assert prefix in text and "\n" not in text and text.endswith("]"), text
    return found


@pytest.mark.campaign
def test_every_bit_of_an_index_is_named(prefix):
    path = Path(f"{prefix}.idx")
    expected = samples(prefix)
    assert silent(path, prefix, expected) == []
    for bit in flips(path):
        with problems.raises(ValueError, "data-file-damaged", "x_text_document"):
            IndexedDataset(prefix).check()
            raise AssertionError(f"bit {bit}")


@pytest.mark.parametrize("split", ["100,0,0", pytest.param("50,50,0", marks=pytest.mark.campaign)])
def test_every_bit_of_an_index_is_named_or_harmless_in_epoch_order(prefix, split):
    """Which reads only some numbers of an index."""

    def read() -> list[list[int]]:
        flags = SimpleNamespace(data_path=[prefix], split=split, data_order="epoch", **NO_FLAGS)
        request = DataRequest(
            sizes=(6, 2, 0), sequence_length=4, seed=1, vocab_size=VOCAB, eod=VOCAB - 1
        )
        splits = source_of(flags).build(flags, request, [])
        return [[one[n].tolist() for n in range(len(one))] for one in splits if one is not None]

    expected = read()
    for bit in flips(Path(f"{prefix}.idx")):
        try:
            assert read() == expected, bit
        except ValueError as error:
            assert "x_text_document" in str(error)


@pytest.mark.campaign
def test_every_bit_of_the_note_is_named_or_harmless(prefix):
    path = Path(f"{prefix}.json")
    expected = samples(prefix)
    said = json.loads(path.read_text())
    for bit in flips(path):
        try:
            assert metadata.note(prefix) == said, bit
            assert samples(prefix) == expected
        except ValueError as error:
            assert str(path) in str(error)


def test_every_bit_of_the_tokens_is_found_by_check(prefix):
    path = Path(f"{prefix}.bin")
    for bit in flips(path):
        found = INSPECT.check_pair(prefix, VOCAB, all_tokens=False)
        assert str(path) in found.get("problem", ""), bit
    assert INSPECT.check_pair(prefix, VOCAB, all_tokens=False)["checksums"]


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.campaign)])
def test_every_bit_of_a_cache_entry_makes_it_unusable(tmp_path, capsys, every):
    cache = IndexCache(str(tmp_path))
    arrays = {"a": np.arange(5, dtype=np.int32), "b": np.ones((2, 2), np.int64)}
    cache.store("Kind", "text", arrays)
    for path in sorted(tmp_path.iterdir()):
        for bit in flips(path, every):
            assert cache.load("Kind", "text", arrays) is None, (path, bit)
    assert cache.load("Kind", "text", arrays) is not None
    assert "checksums" in capsys.readouterr().out


def test_a_damaged_index_cache_is_built_again(prefix, tmp_path, capsys):
    folder = tmp_path / "cache"
    cache = IndexCache(str(folder))
    expected = samples(prefix, cache)
    sound = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(sound) == 4 + 3  # indices of the data set and of the blend
    for path, data in sound.items():
        for bit in flips(path, 97):
            assert samples(prefix, cache) == expected, (path, bit)
            assert path.read_bytes() == data, (path, bit)


def test_merged_and_foreign_pairs(prefix, tmp_path, capsys):
    """Merging writes checksums and refuses what differs from its own; other pairs get them on
    request."""
    out = str(tmp_path / "out")
    assert MERGE.main(["--input", prefix, prefix, "--output-prefix", out]) == 0
    assert INSPECT.check_pair(out, VOCAB, all_tokens=False)["checksums"]
    for bit in flips(Path(f"{out}.idx"), 7):
        with problems.raises(ValueError, "data-file-damaged"):
            IndexedDataset(out).check()
            raise AssertionError(f"bit {bit}")
    data = bytearray(Path(f"{out}.bin").read_bytes())
    data[3] ^= 16
    Path(f"{out}.bin").write_bytes(data)
    assert MERGE.main(["--input", out, "--output-prefix", str(tmp_path / "two")]) == 1
    assert "out.bin: " in capsys.readouterr().err

    foreign = str(tmp_path / "foreign")
    for end in ("bin", "idx"):
        shutil.copy(f"{prefix}.{end}", f"{foreign}.{end}")
    assert INSPECT.main(["check", foreign]) == 0
    assert "no checksums" in capsys.readouterr().out
    assert INSPECT.main(["check", "--write-checksums", foreign]) == 0
    assert "no checksums" not in capsys.readouterr().out
    assert metadata.maker(foreign) is None
    for bit in flips(Path(f"{foreign}.idx"), 7):
        with problems.raises(ValueError, "data-file-damaged"):
            IndexedDataset(foreign).check()
            raise AssertionError(f"bit {bit}")


def test_pointers_are_compared_with_the_running_sum_of_lengths(tmp_path, capsys):
    """A pair without checksums: each flipped pointer is named."""
    prefix = str(tmp_path / "x")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in (5, 2, 9, 1, 4):
            builder.add_document(np.arange(length), [length])
    path = Path(f"{prefix}.idx")
    data = path.read_bytes()
    first = 34 + 4 * 5
    for bit in range(8 * first, 8 * (first + 8 * 5)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"x\.(idx|bin): "):
            IndexedDataset(prefix).check()
            raise AssertionError(f"bit {bit}")
    changed = bytearray(data)
    changed[34 + 8] = 7  # the third sequence is shorter: two tokens are in no sequence
    path.write_bytes(changed)
    IndexedDataset(prefix).check()
    assert "4 bytes" in capsys.readouterr().out


def test_replacing_a_pair_removes_no_checksum_unseen(prefix):
    """A pair of another program under the same name is refused until it gets checksums."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document(np.arange(40), [40])
    with pytest.raises(ValueError, match="--write-checksums"):
        IndexedDataset(prefix).check()
    write_sums(prefix)
    IndexedDataset(prefix).check()
