"""tools/inspect_data.py of what other add-ons have: ledgers, object stores, files of InternLM."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from megatron.addons.datasets.tests.test_inspect_data import flags, refused
from megatron.addons.datasets.tests.test_inspect_data import texts as pairs  # noqa: F401
from megatron.addons.finetuning.tests.packed_files import write_file
from megatron.addons.internlm.tests.lines import write_lines
from megatron.addons.ops.data_ledger.writer import Ledger
from megatron.data.ledger import read_ledger
from tests.forkrun import ROOT
from tests.load_tool import load_tool
from tests.problems import assert_reported
from tests.runs import NO_DROPOUT, SMALL, train, with_flags, write_text

TOOL = load_tool("inspect_data")
RUN = [*SMALL, *NO_DROPOUT, "--eval-iters", "0"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    a, b = (write_text(folder / name, 300, seed) for seed, name in enumerate("ab"))
    return ["--data-path", "1", a, "3", b, "--split", "90,10,0"]


def ask(capsys, *words: str, code: int = 0) -> dict:
    assert TOOL.main([*words[:1], "--json", *words[1:]]) == code
    return json.loads(capsys.readouterr().out)


ORDERS = {
    "single": [],
    "cyclic": ["--dataloader-type", "cyclic"],
    "shared": ["--dataloader-type", "cyclic", "--no-data-sharding"],
    "epochs": ["--data-order", "epoch"],
    "skips": ["--train-range-to-skip", "3", "4"],
}


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(flags, id=name, marks=[pytest.mark.campaign] * (name in ("cyclic", "shared")))
        for name, flags in ORDERS.items()
    ],
)
def test_the_ledger_of_a_run_agrees(texts, tmp_path, capsys, extra):
    """Two ranks, three micro-batches: each iteration's hash is the recorded one, from flags as from
    the run directory."""
    words = with_flags(
        [*RUN, *texts],
        "--global-batch-size",
        "6",
        "--micro-batch-size",
        "1",
        "--train-iters",
        "5",
        "--data-ledger",
        str(tmp_path / "ledger"),
        "--save",
        str(tmp_path / "save"),
        "--save-interval",
        "2",
        *extra,
    )
    train(tmp_path, words, world=2)
    records = {row[0]: row for row in read_ledger(str(tmp_path / "ledger"))[1].tolist()}
    assert list(records) == [1, 2, 3, 4, 5]
    for iteration in records:
        typed = ask(capsys, "at", "--iteration", str(iteration), "--world-size", "2", "--", *words)
        assert typed == ask(capsys, "at", "--iteration", str(iteration), str(tmp_path / "save"))
        skipped = bool(extra) and extra[0] == "--train-range-to-skip" and iteration in (3, 4)
        assert typed["ledger"]["agrees"] and typed["skipped"] == skipped == bool(
            records[iteration][3]
        )
        assert records[iteration][4] == (0 if skipped else int(typed["hash"], 16))
        assert (typed["first_sample"], typed["samples"]) == (6 * iteration - 6, 6)


@pytest.mark.campaign
def test_iteration_37_of_a_run_on_two_ranks(tmp_path, capsys):
    """The ledger of a real run of 40 iterations, killed at 25 and resumed, with a ramp: asked
    without training."""
    text = write_text(tmp_path / "text", 3000)
    save = str(tmp_path / "save")
    words = [
        *RUN,
        "--data-path",
        text,
        "--train-iters",
        "40",
        "--save",
        save,
        "--load",
        save,
        "--save-interval",
        "10",
        "--num-workers",
        "0",
        "--data-ledger",
        str(tmp_path / "ledger"),
    ]
    train(tmp_path, words, world=2, kill_at=25)
    train(tmp_path, words, world=2)
    _, records = read_ledger(str(tmp_path / "ledger"))
    assert records["iteration"].tolist() == list(range(1, 41))
    found = ask(capsys, "at", "--iteration", "37", save)
    assert found["ledger"]["agrees"] and int(found["hash"], 16) == int(records["hash"][36])
    assert {row["dp_rank"] for row in found["batch"]} == {0, 1} and found["first_sample"] == 36 * 8
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "tools/inspect_data.py", "at", "--iteration", "37", save],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        time.perf_counter() - started < 60
        and "the ledger" in done.stdout
        and "agrees" in done.stdout
    )


@pytest.mark.campaign
def test_packed_samples(tmp_path, capsys):
    """Rows of packed files, over epochs."""
    random = np.random.default_rng(3)
    for name in ("en/a", "cn/b"):
        samples = [random.integers(1, 200, random.integers(1, 60)).tolist() for _ in range(30)]
        write_file(tmp_path / f"data/{name}.bin", samples)
    files = {"--train-data-path": "data", "--data-ledger": "ledger", "--save": "save"}
    words = [*RUN, "--packed-samples", "--train-iters", "12", "--save-interval", "12"]
    for flag, name in files.items():
        words += [flag, str(tmp_path / name)]
    train(tmp_path, words, world=2)
    records = read_ledger(str(tmp_path / "ledger"))[1].tolist()
    assert [row[:3] for row in records] == [(n, 8 * n - 8, 8) for n in range(1, 13)]
    for iteration in range(1, 13):
        found = ask(capsys, "at", "--iteration", str(iteration), str(tmp_path / "save"))
        assert found["ledger"]["agrees"]


def test_a_ledger_that_differs_is_said(texts, tmp_path, capsys):
    words = [*RUN, *texts, "--train-iters", "12"]
    right = ask(capsys, "at", "--iteration", "2", "--", *words)
    ledger = Ledger(str(tmp_path / "ledger"), 32)
    ledger.record(2, 8, 8, int(right["hash"], 16))
    ledger.record(3, 16, 8, 5)
    at = ["at", "--data-ledger", str(tmp_path / "ledger"), "--iteration"]
    assert ask(capsys, *at, "2", "--", *words)["ledger"]["agrees"]
    assert not ask(capsys, *at, "3", "--", *words, code=1)["ledger"]["agrees"]
    assert ask(capsys, *at, "4", "--", *words)["ledger"] == {
        "file": str(tmp_path / "ledger"),
        "recorded": False,
    }
    assert TOOL.main([*at, "3", "--", *words]) == 1
    assert "differs: 8 samples from 16 on, hash 0000000000000005" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--data-order", "epoch"]])
def test_data_in_an_object_store_have_their_url(pairs, tmp_path, capsys, more):  # noqa: F811
    a, b = pairs
    url = f"file://{b}"
    cache = ("--object-storage-cache-path", str(tmp_path / "cache"))
    local = flags("--data-path", "1", a, "3", b, *more)
    stored = flags("--data-path", "1", f"file://{a}", "3", url, *cache, *more)
    at = ("at", "--iteration", "2", "--")
    found, expected = ask(capsys, *at, *stored), ask(capsys, *at, *local)
    pieces = [piece for row in found["batch"] for piece in row["pieces"]]
    assert {piece["dataset"] for piece in pieces} == {f"file://{a}", url}
    assert json.loads(json.dumps(found).replace("file://", "")) == expected
    document = next(piece["document"] for piece in pieces if piece["dataset"] == url)
    find = ("find", "--document", str(document), "--prefix")
    found = ask(capsys, *find, url, "--", *stored)
    expected = ask(capsys, *find, b, "--", *local)
    assert found == expected | {"dataset": url} and found["shown"]
    assert_reported(
        refused(capsys, "find", "--document", "999", "--prefix", url, "--", *stored),
        "value-out-of-range",
        url,
    )


def test_files_of_internlm_are_checked_line_by_line(tmp_path, capsys):
    path = write_lines(tmp_path / "en/a.bin", [[-5, 6], [], [70, 8, 9]])

    def check(*words: str, code: int = 0) -> dict:
        assert TOOL.main(["check", "--json", path, *words]) == code
        return json.loads(capsys.readouterr().out)["pairs"][0]

    found = check("--vocab-size", "71")
    assert (found["documents"], found["tokens"], found["empty_documents"]) == (3, 5, 1)
    assert (found["smallest_id"], found["largest_id"], found["dtype"]) == (-5, 70, "JSON")
    assert "has 70" in check("--vocab-size", "70", code=1)["problem"]
    with open(path, "r+b") as file:
        file.write(b"[")
    assert "sample 0, at byte 0: is no" in check(code=1)["problem"]
