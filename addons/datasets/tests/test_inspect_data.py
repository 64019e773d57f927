"""tools/inspect_data.py: what it says of iterations, documents and files is what training reads and
what lies there."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.ledger import tokens_hash
from tests.core.data.corpora import write_corpus
from tests.forkrun import ROOT
from tests.load_tool import load_tool
from tests.pairs import PairWriter
from tests.problems import assert_reported, numbers
from tests.runs import NO_DROPOUT, SMALL, with_flags, write_text

TOOL = load_tool("inspect_data")


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("data")
    # documents of sentences, some empty
    with PairWriter(folder / "b", np.int32) as builder:
        random = np.random.default_rng(1)
        for _ in range(300):
            lengths = random.integers(0, 20, int(random.integers(0, 4)))
            builder.add_document(random.integers(0, 210, int(lengths.sum())), lengths)
    return write_text(folder / "a", 300), str(folder / "b")


def flags(*more: str) -> list[str]:
    return with_flags(
        [*SMALL, *NO_DROPOUT, "--split", "90,10,0", "--train-iters", "12", "--eval-iters", "0"],
        *more,
    )


def ask(capsys, *words: str, code: int = 0) -> dict:
    assert TOOL.main([*words[:1], "--json", *words[1:]]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words: str) -> str:
    assert TOOL.main(words) == 1
    out, error = capsys.readouterr()
    assert error.startswith("error: ") and "Traceback" not in error
    return out + error


# each blend and each order; both together are a campaign
QUICK = ("one in epochs", "weighted", "all in epochs", "sentences")
KINDS = [
    pytest.param(kind + order, marks=[pytest.mark.campaign] * (kind + order not in QUICK))
    for kind in ("one", "weighted", "all", "sentences")
    for order in ("", " in epochs")
]


def blends(texts, kind: str) -> list[str]:
    a, b = texts
    kind, epochs, _ = kind.partition(" in epochs")
    data = {"one": [a], "weighted": ["1", a, "3", b], "all": [a, b], "sentences": [b]}[kind]
    return [
        "--data-path",
        *data,
        "--mid-level-dataset-surplus",
        "0.1",
        *(["--data-order", "epoch"] if epochs else []),
    ]


# --- at


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_it_names_are_the_samples(texts, capsys, kind):
    """The tokens at the printed byte ranges, joined, have the printed hash; documents and offsets
    name the same bytes."""
    for iteration in (1, 7):
        found = ask(
            capsys,
            "at",
            "--iteration",
            str(iteration),
            "--world-size",
            "2",
            "--",
            *flags(*blends(texts, kind)),
        )
        assert [row["sample"] for row in found["batch"]] == [
            8 * (iteration - 1) + n for n in (0, 1, 4, 5, 2, 3, 6, 7)
        ]
        assert [(row["dp_rank"], row["micro_batch"]) for row in found["batch"]] == [
            (0, 0),
            (0, 0),
            (0, 1),
            (0, 1),
            (1, 0),
            (1, 0),
            (1, 1),
            (1, 1),
        ]
        for row in found["batch"]:
            tokens = []
            for piece in row["pieces"]:
                corpus = IndexedDataset(piece["dataset"])
                data = Path(piece["dataset"] + ".bin").read_bytes()[slice(*piece["bytes"])]
                tokens.append(np.frombuffer(data, corpus.dtype).astype(np.int64))
                first, last = corpus.document_indices[piece["document"] : piece["document"] + 2]
                document = np.concatenate([corpus[n] for n in range(first, last)])
                part = document[piece["offset"] : piece["offset"] + piece["tokens"]]
                assert part.tolist() == tokens[-1].tolist() and len(part) == piece["tokens"] > 0
                assert piece["text"].split() == [str(token) for token in part[:16]]
            joined = np.concatenate(tokens)
            assert len(joined) == 33 and f"{tokens_hash(joined):016x}" == row["hash"]


def test_made_up_data(capsys):
    words = [word for word in flags("--mock-data") if word not in ("--split", "90,10,0")]
    found = ask(capsys, "at", "--iteration", "2", "--", *words)
    assert {piece["dataset"] for row in found["batch"] for piece in row["pieces"]} == {
        "--mock-data"
    }
    assert all(piece["bytes"] is None for row in found["batch"] for piece in row["pieces"])


def test_no_torch_is_loaded(texts):
    code = (
        "import sys; sys.argv[0] = 'x'; from megatron.addons.datasets import inspect_data; "
        "assert inspect_data.main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    )
    for words in (["at", "--iteration", "3"], ["find", "--document", "3"]):
        subprocess.run(
            [sys.executable, "-c", code, *words, "--", *flags(*blends(texts, "one"))],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )


def test_what_cannot_be_told(texts, tmp_path, capsys):
    words = flags(*blends(texts, "weighted"))
    said = refused(capsys, "at", "--iteration", "13", "--", *words)
    assert "--iteration" in said and numbers(said) == [13, 1, 12]
    assert "--save" in refused(capsys, "at", "--iteration", "1")
    assert str(tmp_path) in refused(capsys, "at", "--iteration", "1", str(tmp_path))
    said = refused(capsys, "find", "--document", "1", "--", *words)
    assert "--prefix" in said and all(prefix in said for prefix in texts)
    said = refused(capsys, "find", "--document", "300", "--prefix", texts[0], "--", *words)
    assert_reported(said, "value-out-of-range", "--document 300", texts[0], "0 to 299")


# --- find


@pytest.mark.parametrize("kind", KINDS)
def test_find_is_the_inverse_of_at(texts, capsys, kind):
    """Every document of the run, found by reading all iterations, is found by asking for it, and no
    more."""
    several_epochs = ["--global-batch-size", "64"] if "in epochs" in kind else []
    words = flags(*blends(texts, kind), "--train-range-to-skip", "5", "5", *several_epochs)
    shown: dict[tuple[str, int], dict[int, list]] = {}
    for iteration in range(1, 13):
        for row in ask(capsys, "at", "--iteration", str(iteration), "--", *words)["batch"]:
            for piece in row["pieces"]:
                key = (piece["dataset"], piece["document"])
                one = shown.setdefault(key, {}).setdefault(row["sample"], [iteration, 0])
                one[1] += piece["tokens"]
    assert len(shown) > 100
    asked = [
        *list(shown)[::7],
        *((prefix, n) for prefix in {key[0] for key in shown} for n in (0, 1, 2, 299)),
    ]
    for prefix, document in asked:
        found = ask(capsys, "find", "--document", str(document), "--prefix", prefix, "--", *words)
        got = {one["sample"]: [one["iteration"], one["tokens"]] for one in found["shown"]}
        assert got == shown.get((prefix, document), {})
        assert all(one["skipped"] == (one["iteration"] == 5) for one in found["shown"])


def test_find_in_a_cyclic_order(texts, capsys):
    words = flags(*blends(texts, "one"), "--dataloader-type", "cyclic", "--train-iters", "60")
    sample = ask(capsys, "at", "--iteration", "2", "--", *words)["batch"][3]
    found = ask(capsys, "find", "--document", str(sample["pieces"][0]["document"]), "--", *words)[
        "shown"
    ]
    assert (2, sample["sample"]) in [(one["iteration"], one["sample"]) for one in found]


# --- check


def test_check_tells_sound_pairs(texts, tmp_path, capsys):
    found = ask(capsys, "check", *texts)
    a, b = found["pairs"]
    assert found["problems"] == 0
    assert (a["documents"], a["dtype"], a["smallest_id"], a["largest_id"]) == (
        300,
        "uint16",
        0,
        210,
    )
    assert b["tokens"] * 4 == b["bin_bytes"] and b["empty_documents"] > 0
    assert TOOL.main(["check", *texts]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert numbers(last) == [2, a["tokens"] + b["tokens"], 0]


def noted(prefix: Path, **changed: object) -> str:
    """A pair of 50 documents and 500,000 tokens with a PREFIX.json beside it."""
    path = write_corpus(prefix, [10000] * 50, seed=3)
    tokens = int(IndexedDataset(path).sequence_lengths.sum())
    note = {
        "tokenizer": {"class": "GPT2BPETokenizer", "fingerprint": "f" * 64, "vocab_size": 65000},
        "tokens": tokens,
        "documents": 50,
    }
    Path(f"{path}.json").write_text(json.dumps({**note, **changed}))
    return path


def test_check_names_the_tokenizer(tmp_path, capsys):
    one = noted(tmp_path / "one")
    none = write_corpus(tmp_path / "none", [10000] * 50, seed=3)
    assert TOOL.main(["check", one, none]) == 0
    out, error = capsys.readouterr()
    assert (
        "made by GPT2BPETokenizer of 65000 ids (ffffffffffff)" in out.splitlines()[0] and not error
    )
    assert [
        pair["tokenizer"] and pair["tokenizer"]["class"]
        for pair in ask(capsys, "check", one, none)["pairs"]
    ] == ["GPT2BPETokenizer", None]
    two = noted(
        tmp_path / "two",
        tokenizer={"class": "TikTokenizer", "fingerprint": "e" * 64, "vocab_size": 70000},
    )
    assert TOOL.main(["check", one, two]) == 0
    error = capsys.readouterr().err
    assert_reported(error, "data-of-another-tokenizer", two, "TikTokenizer", "e" * 12, "f" * 12)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokens": 7}, " 7 tokens, "),
        ({"documents": 7}, " 7 documents, "),
        (
            {"tokenizer": {"class": "Null", "fingerprint": "f", "vocab_size": 3}},
            "Null has 3 ids, ",
        ),
        ({"tokenizer": 3}, "[tokenizer-record-malformed]"),
    ],
)
def test_check_finds_a_note_of_another_pair(tmp_path, capsys, changed, words):
    prefix = noted(tmp_path / "d", **changed)
    assert f"error: {prefix}.json: " in (said := refused(capsys, "check", prefix)) and words in said
