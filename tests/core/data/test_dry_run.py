"""The table of a dry run is the one that the run prints, made without samples or a cache."""

from pathlib import Path

import numpy as np
import pytest

from megatron.data.blend import members as blend_members
from megatron.data.dry_run import Shortage, read_splits, shortages
from megatron.data.indexed_dataset import HEADER
from megatron.data.plan_table import Row, validation_note
from tests import problems
from tests.core.data.corpora import build_datasets, data_flags, planned_rows, write_corpus


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "shards").mkdir()
    for name, size in (("big", 300), ("tiny", 3), ("middle", 120)):
        write_corpus(folder / "shards" / name, [5 + n % 5 for n in range(size)])
    return [
        write_corpus(folder / name, [5 + n % 7 for n in range(size)])
        for name, size in (("a", 200), ("b", 700))
    ]


BLENDS = {
    "one": {"data_path": ["A"], "split": "90,8,2"},
    "weighted": {"data_path": ["1", "A", "3", "B"], "split": "90,5,5"},
    "all": {"data_path": ["A", "B"], "split": "80,10,10"},
    "folder": {"data_path": ["F"], "split": "80,10,10"},
    "weighted folder": {"data_path": ["1", "A", "2", "F"], "split": "80,10,10"},
    "by split": {"train_data_path": ["0.3", "A", "0.7", "B"], "valid_data_path": ["A"]},
    "sets": {
        "train_data_path": ["B"],
        "valid_data_path": ["A", "B"],
        "multiple_validation_sets": True,
    },
    "epochs": {"data_path": ["epochs:2", "A", "epochs:1", "B"], "split": "90,5,5"},
}


def of(pairs: list[str], kind: str, order: str) -> object:
    words = dict(A=pairs[0], B=pairs[1], F=str(Path(pairs[0]).parent / "shards"))
    named = {
        name: [words.get(word, word) for word in value] if isinstance(value, list) else value
        for name, value in BLENDS[kind].items()
    }
    return data_flags(**{**named, "data_order": order})


def key(row: Row) -> tuple:
    return row.split, row.name, row.documents, row.tokens, row.sequence_length


@pytest.mark.parametrize("sizes", [(300, 20, 4), (4000, None, 0)])
@pytest.mark.parametrize("order", ["megatron", "epoch"])
@pytest.mark.parametrize("kind", BLENDS)
def test_it_is_the_table_of_the_run(pairs: list[str], kind: str, order: str, sizes: tuple) -> None:
    if kind == "epochs" and order == "megatron":  # refused, see below
        order = "epoch"
    if kind in ("weighted", "weighted folder", "epochs", "by split"):
        sizes = (sizes[0] if kind != "epochs" else 400, 20, sizes[2])
    flags = of(pairs, kind, order)
    rows: list[Row] = []
    build_datasets(
        flags, sequence_length=8, seed=1, sizes=sizes, vocab_size=9000, eod=8999, rows=rows
    )
    planned = planned_rows(flags, sizes, 8)
    assert sorted(map(key, planned)) == sorted(map(key, rows)) and rows
    real = {key(row): row.samples for row in rows}
    for row in planned:  # of the epoch order its shares, to a fraction
        assert abs(row.samples - real[key(row)]) <= (
            2 + 0.01 * row.samples if order == "epoch" else 0
        ), (row, real)
    assert not list(Path(pairs[0]).parent.rglob("*.tmp"))


def test_it_writes_nothing(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [7] * 99)
    before = sorted(tmp_path.rglob("*"))
    assert planned_rows(data_flags(data_path=[prefix], split="1,0,0"), (50, 0, 0), 8)
    assert sorted(tmp_path.rglob("*")) == before
    assert planned_rows(data_flags(mock_data=True), (50, 0, 0), 8) == []


@pytest.mark.parametrize(
    ("kind", "order", "sizes", "words"),
    [
        ("epochs", "epoch", (10**6, 1, 1), "epochs-too-few"),
        ("epochs", "megatron", (9, 1, 1), "epochs-need-data-order-epoch"),
        ("weighted", "epoch", (9, None, 1), "weights-without-number-of-samples"),
    ],
)
def test_what_keeps_the_run_from_starting(
    pairs: list[str], kind: str, order: str, sizes: tuple, words: str
) -> None:
    flags = of(pairs, kind, order)
    for make in (
        lambda: planned_rows(flags, sizes, 8),
        lambda: build_datasets(
            flags, sequence_length=8, seed=1, sizes=sizes, vocab_size=9000, eod=8999
        ),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_a_large_blend_is_counted_by_its_shares(
    pairs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = [row.samples for row in planned_rows(of(pairs, "weighted", "megatron"), (500, 0, 0), 8)]
    monkeypatch.setattr(blend_members, "COUNTED", 100)
    shares = [
        row.samples for row in planned_rows(of(pairs, "weighted", "megatron"), (500, 0, 0), 8)
    ]
    assert shares == [125.0, 375.0] and all(
        abs(one - other) <= 1 for one, other in zip(exact, shares, strict=True)
    )


@pytest.mark.parametrize(
    ("kind", "short"), [("all", True), ("folder", True), ("one", False), ("weighted", False)]
)
def test_a_blend_without_weights_that_is_too_small(
    pairs: list[str], kind: str, short: bool
) -> None:
    """Exactly what a run finds when it is built: as many samples as it needs are enough, one more
    is not."""
    flags = of(pairs, kind, "megatron")
    train, _, _ = build_datasets(
        flags, sequence_length=8, seed=1, sizes=(10**5, 0, 0), vocab_size=9000, eod=8999
    )
    there = len(train) if short else 10**5

    def found(*sizes: int) -> list[Shortage]:
        return shortages(read_splits(flags, sizes), 8)

    assert found(there, 0, 0) == []
    assert found(there + 1, 0, 0) == ([Shortage("train", there, there + 1)] if short else [])
    assert [one.split for one in found(1, 10**5, 0)] == ["valid"] * short


def test_scattered_sequences_are_planned_in_megatrons_order(tmp_path: Path) -> None:
    """Pairs that only Megatron's order can read: the table is that of the run."""
    prefix = write_corpus(tmp_path / "a", [7] * 99)
    index = bytearray(Path(prefix + ".idx").read_bytes())
    first = HEADER.size + 4 * 99
    pointers = np.frombuffer(index, "<i8", 99, first)[::-1].copy()
    index[first : first + 8 * 99] = pointers.tobytes()
    Path(prefix + ".idx").write_bytes(index)
    flags = data_flags(data_path=[prefix], split="1,0,0")
    rows = []
    build_datasets(
        flags, sequence_length=8, seed=1, sizes=(50, 0, 0), vocab_size=9000, eod=8999, rows=rows
    )
    assert planned_rows(flags, (50, 0, 0), 8) == rows
    with problems.raises(ValueError, "data-not-contiguous", "--data-order"):
        planned_rows(
            data_flags(data_path=[prefix], split="1,0,0", data_order="epoch"), (50, 0, 0), 8
        )


def test_validation_that_repeats_itself_is_noted():
    """More than 20 epochs of all its data together, not of one small part or of training."""

    def row(split: str, tokens: int, samples: float) -> Row:
        return Row(split, "a", 1, tokens, samples, 10)

    assert not validation_note([row("train", 100, 5000), row("valid", 100, 200)])
    (line,) = validation_note([row("train", 100, 1), row("valid", 100, 2010)])
    problems.assert_problem(line, "validation-repeats", "--eval-iters")
    assert 201 in problems.numbers(line) and 100 in problems.numbers(line)
    assert not validation_note([row("valid", 100, 300), row("valid", 900, 300)])
    assert not validation_note([]) and not validation_note([row("valid", 0, 9)])
