"""A set of parts is read as the pair that one machine would have written, bit for bit."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.data.blend.paths import expand
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.parts import part_set
from megatron.data.tokenizers import metadata
from tests import problems
from tests.core.data.corpora import build_datasets, data_flags, planned_rows, write_corpus
from tests.core.data.parts.sets import MAKER, cut_in_parts
from tests.problems import code_of

LENGTHS = np.random.default_rng(1).integers(1, 60, 90).tolist()


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "pair", LENGTHS, seed=1, vocab=250)


@pytest.fixture
def parts(tmp_path: Path, pair: str) -> str:
    """The second part, and the last, have no documents."""
    return cut_in_parts(pair, tmp_path / "set", [1, 1, 40, 41, 90, 90])


@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_samples_and_their_order_are_those_of_the_pair(pair: str, parts: str, order: str) -> None:
    both = [
        pickle.loads(
            pickle.dumps(
                build_datasets(
                    data_flags(data_path=[prefix], split="8,1,1", data_order=order),
                    sizes=(150, 20, 20),
                    sequence_length=32,
                    seed=5,
                    vocab_size=256,
                )
            )
        )
        for prefix in (pair, parts)
    ]
    for one, other in zip(*both, strict=True):
        assert one.order() == other.order() and len(one) == len(other) > 0
        for number in range(len(one)):
            assert np.array_equal(one[number], other[number])
            for a, b in zip(one.spans_of(number), other.spans_of(number), strict=True):
                assert (a.prefix, b.prefix) == (pair, parts)
                assert (a.document, a.offset, a.length) == (b.document, b.offset, b.length)
                assert (a.first_byte, a.end_byte) == (b.first_byte, b.end_byte)


def test_every_way_to_read_it(pair: str, parts: str) -> None:
    one = IndexedDataset(pair)
    other = pickle.loads(pickle.dumps(IndexedDataset(parts)))
    other.check()
    assert one.identity == other.identity and one.order_sha256 == other.order_sha256
    assert one.id_range(None) == other.id_range(None) and one.bin_bytes == other.bin_bytes
    assert one.num_documents == other.num_documents == 90
    order = np.random.default_rng(2).permutation(len(one))
    assert np.array_equal(one.gather(order, 1, 1), other.gather(order, 1, 1))
    assert all(np.array_equal(one[number], other[number]) for number in range(len(one)))
    # bytes of several parts at once
    assert np.array_equal(one._read(0, 500), other._read(0, 500))


@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_the_plan_of_a_dry_run_is_that_of_the_pair(pair: str, parts: str, order: str) -> None:
    flags = {"split": "8,1,1", "data_order": order}
    both = [
        [
            (row.split, row.documents, row.tokens, row.samples)
            for row in planned_rows(data_flags(data_path=[prefix], **flags), (9, 1, 1), 32)
        ]
        for prefix in (pair, parts)
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize("end", ["bin", "idx", "json"])
def test_a_set_that_is_not_whole_names_the_first_part_and_its_task(parts: str, end: str) -> None:
    os.unlink(f"{parts}.parts/000005.{end}")
    os.unlink(f"{parts}.parts/000004.{end}")
    with problems.raises(ValueError, "data-parts-missing", parts, "part 4", "--task 1/3"):
        IndexedDataset(parts)
    with problems.raises(ValueError, "data-parts-missing", parts, "part 4", "--task 1/3"):
        metadata.note(parts)


def test_a_part_that_is_not_of_this_set_is_missing(tmp_path: Path, pair: str, parts: str) -> None:
    note = metadata.note(f"{parts}.parts/000002")
    note["part"]["made_of"] = "e" * 32
    Path(f"{parts}.parts/000002.json").write_text(metadata.sealed(note))
    with problems.raises(ValueError, "data-parts-missing", "part 2", "--task 2/3"):
        IndexedDataset(parts)
    plan = json.loads(Path(f"{parts}.parts/parts.json").read_text())
    plan["made_of"].pop()
    Path(f"{parts}.parts/parts.json").write_text(json.dumps(plan))
    with problems.raises(ValueError, "data-file-damaged", "parts.json"):
        IndexedDataset(parts)


def test_a_damaged_index_of_a_part_is_named_when_it_is_joined(parts: str) -> None:
    path = Path(f"{parts}.parts/000004.idx")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with problems.raises(ValueError, "data-file-damaged", path):
        IndexedDataset(parts)


def test_the_joined_index_is_kept_and_follows_the_parts(
    tmp_path: Path, pair: str, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = IndexedDataset(parts).identity
    for number in range(6):  # no index of a part is read again
        path = Path(f"{parts}.parts/{number:06d}.idx")
        if number:
            path.write_bytes(bytes(path.stat().st_size))
    assert IndexedDataset(parts).identity == before
    other = write_corpus(tmp_path / "other", LENGTHS[::-1], seed=1, vocab=250)
    cut_in_parts(other, tmp_path / "set", [1, 1, 40, 41, 90, 90])
    assert IndexedDataset(parts).identity == IndexedDataset(other).identity != before
    monkeypatch.setattr(IndexCache, "writable", lambda self: False)
    third = cut_in_parts(pair, tmp_path / "third", [30, 90])
    assert IndexedDataset(third).identity == before and not os.path.exists(f"{third}.parts/cache")


def test_a_part_cut_short_while_it_is_read_is_one_message(pair: str, parts: str) -> None:
    corpus = IndexedDataset(parts)
    os.truncate(f"{parts}.parts/000004.bin", 10)
    with problems.raises(ValueError, "file-changed-while-read", "000004.bin"):
        _ = corpus[len(corpus) - 1]


def test_a_set_is_one_data_set_wherever_it_is_named(tmp_path: Path, pair: str, parts: str) -> None:
    assert expand(parts) == expand(f"{parts}.parts") == expand(f"{tmp_path}/s*") == [parts]
    assert expand(str(tmp_path)) == [pair, parts]
    for path in Path(f"{parts}.parts").glob("0*"):
        path.unlink()  # no part is whole: opening it says so
    assert expand(str(tmp_path)) == [pair, parts]
    os.link(f"{pair}.idx", f"{parts}.idx")  # the pair that was merged of it goes before
    os.link(f"{pair}.bin", f"{parts}.bin")
    assert expand(str(tmp_path)) == [pair, parts] and len(IndexedDataset(parts)) == len(LENGTHS)


def test_what_the_parts_say_together(parts: str) -> None:
    total = sum(LENGTHS)
    expected = {"tokenizer": MAKER, "documents": 90, "tokens": total, "text_bytes": 3 * total}
    assert metadata.note(parts) == expected and metadata.text_size(parts) == (total, 3 * total)
    with problems.raises(ValueError, "data-of-another-tokenizer", parts):
        metadata.check(parts, {"class": "GPT2BPETokenizer", "files": []})


def test_more_parts_than_files_may_be_open(
    tmp_path: Path, pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.data.parts.joined.MOST_OPEN", 3)
    corpus = IndexedDataset(cut_in_parts(pair, tmp_path / "set", list(range(9, 91, 9))))
    one = IndexedDataset(pair)
    open_before = len(os.listdir("/proc/self/fd"))
    for number in [*range(90), *reversed(range(90))]:
        assert np.array_equal(corpus[number], one[number])
    assert len(os.listdir("/proc/self/fd")) <= open_before + 3


NONSENSE = (0, -5, True, 1.5, 10**400, "x", "", None, [], [0], {}, {"a": 1}, [None, "x"])


def test_nonsense_with_a_right_checksum_is_one_error(parts: str) -> None:
    wrong = 0
    for name in ("parts.json", "000002.json"):
        path = Path(f"{parts}.parts/{name}")
        original = path.read_text()
        table = json.loads(original)
        del table["checksum"]
        for key in table:
            for value in NONSENSE:
                sealed = metadata.sealed({**table, key: value})
                path.write_text(sealed)
                try:
                    IndexedDataset(parts)
                    part_set.joined_note(parts)
                except ValueError as error:
                    assert code_of(str(error)) in ("data-file-damaged", "data-parts-missing"), (
                        sealed
                    )
                    wrong += 1
        path.write_text(original)
    assert wrong > 30


@pytest.mark.parametrize("tasks", [0, -5, True, "4", None])
def test_parts_of_no_task_are_refused(parts: str, tasks: object) -> None:
    path = Path(f"{parts}.parts/parts.json")
    table = json.loads(path.read_text()) | {"tasks": tasks}
    del table["checksum"]
    path.write_text(metadata.sealed(table))
    os.unlink(f"{parts}.parts/000001.json")
    with problems.raises(ValueError, "data-file-damaged", path):
        list(part_set.read_plan(parts).records())
