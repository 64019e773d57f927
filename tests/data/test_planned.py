"""The table of a dry run is the one that the run prints, made without samples or a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.data.build import build_train_valid_test_datasets
from megatron.data.plan_table import Row
from megatron.data.planned import planned_rows
from tests.data.corpora import data_flags, write_corpus


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    return [write_corpus(folder / name, [5 + n % 7 for n in range(size)]) for name, size in (("a", 200), ("b", 700))]


BLENDS = {
    "one": {"data_path": ["A"], "split": "90,8,2"},
    "weighted": {"data_path": ["1", "A", "3", "B"], "split": "90,5,5"},
    "all": {"data_path": ["A", "B"], "split": "80,10,10"},
    "by split": {"train_data_path": ["0.3", "A", "0.7", "B"], "valid_data_path": ["A"]},
    "sets": {"train_data_path": ["B"], "valid_data_path": ["A", "B"], "multiple_validation_sets": True},
    "epochs": {"data_path": ["epochs:2", "A", "epochs:1", "B"], "split": "90,5,5"},
}  # fmt: skip


def of(pairs: list[str], kind: str, order: str) -> object:
    named = {name: [dict(A=pairs[0], B=pairs[1]).get(word, word) for word in value] if isinstance(value, list) else value
             for name, value in BLENDS[kind].items()}
    return data_flags(**{**named, "data_order": order})


def key(row: Row) -> tuple:
    return row.split, row.name, row.documents, row.tokens, row.sequence_length


@pytest.mark.parametrize("sizes", [(300, 20, 4), (4000, None, 0)])
@pytest.mark.parametrize("order", ["megatron", "epoch"])
@pytest.mark.parametrize("kind", BLENDS)
def test_it_is_the_table_of_the_run(pairs: list[str], kind: str, order: str, sizes: tuple) -> None:
    if kind == "epochs" and order == "megatron":  # refused, see below
        order = "epoch"
    if kind in ("weighted", "epochs", "by split"):
        sizes = (sizes[0] if kind != "epochs" else 400, 20, sizes[2])
    flags = of(pairs, kind, order)
    rows: list[Row] = []
    build_train_valid_test_datasets(flags, sequence_length=8, seed=1, sizes=sizes, vocab_size=9000, eod=8999, rows=rows)
    planned = planned_rows(flags, sizes, 8)
    assert sorted(map(key, planned)) == sorted(map(key, rows)) and rows
    real = {key(row): row.samples for row in rows}
    for row in planned:  # whole samples of each set; the surplus of a mix in Megatron's order
        assert abs(row.samples - real[key(row)]) <= 2 + 0.01 * row.samples, (row, real)
    assert not list(Path(pairs[0]).parent.rglob("*.tmp"))


def test_it_writes_nothing(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [7] * 99)
    before = sorted(tmp_path.rglob("*"))
    assert planned_rows(data_flags(data_path=[prefix], split="1,0,0"), (50, 0, 0), 8)
    assert sorted(tmp_path.rglob("*")) == before
    assert planned_rows(data_flags(mock_data=True), (50, 0, 0), 8) == []


@pytest.mark.parametrize(("kind", "order", "sizes", "words"), [
    ("epochs", "epoch", (10**6, 1, 1), "the epochs asked for make "),
    ("epochs", "megatron", (9, 1, 1), "epochs: is kept by"),
    ("weighted", "epoch", (9, None, 1), "weights need a number of valid samples")])  # fmt: skip
def test_what_keeps_the_run_from_starting(pairs: list[str], kind: str, order: str, sizes: tuple, words: str) -> None:
    flags = of(pairs, kind, order)
    for make in (lambda: planned_rows(flags, sizes, 8),
                 lambda: build_train_valid_test_datasets(flags, sequence_length=8, seed=1, sizes=sizes, vocab_size=9000,
                                                         eod=8999)):
        with pytest.raises(ValueError, match=words):
            make()
