"""What tools/spikes.py says of a run after the fact, against the run: replayed losses,
TensorBoard, several spikes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.spikes import program as spikes
from megatron.addons.spikes.events import find_events
from megatron.addons.spikes.loss_outliers import MASKED, scale_of
from megatron.addons.spikes.replay import Replayed, state_before, verdict
from megatron.addons.spikes.suspects import BatchRow, batch_rows, neighbours
from megatron.analysis.run_reader import read_run
from tests.core.data.vocabularies import write_bpe
from tests.load_tool import exit_code, load_tool
from tests.problems import numbers
from tests.runs import NO_DROPOUT, SMALL, train, with_flags, write_text
from tools.shared.run_data import Reading, open_run

ITERATIONS = 6


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """(exit code, stdout), which must not be 2."""
    capsys.readouterr()
    code = spikes.main(argv)
    printed = capsys.readouterr()
    assert code in (0, 10), printed.err
    return code, printed.out


# --- docs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    """The flags of a run on text that has bytes, words and documents of all lengths."""
    folder = tmp_path_factory.mktemp("corpus")
    files = write_bpe(folder)
    random = np.random.default_rng(5)
    texts = ["the cat in the hall é 猫 " * int(random.integers(1, 60)) for _ in range(80)]
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        files[0],
        "--merge-file",
        files[1],
    ]
    assert (
        load_tool("preprocess_data").main(
            [
                "--input",
                f"{folder}/x.jsonl",
                "--output-prefix",
                f"{folder}/x",
                "--append-eod",
                "--workers",
                "1",
                *words,
            ]
        )
        == 0
    )
    small = " ".join(SMALL).replace("--tokenizer-type NullTokenizer --vocab-size 211", "").split()
    return with_flags(
        small,
        *words,
        "--data-path",
        f"{folder}/x_text_document",
        "--split",
        "100,0,0",
        "--train-iters",
        "9",
        "--eval-iters",
        "0",
        "--seq-length",
        "64",
        "--max-position-embeddings",
        "64",
    )


def reading_of(run: list[str], world_size: int) -> Reading:
    return open_run(None, run, world_size=world_size)


def test_docs_of_one_micro_batch_of_one_rank_and_back_from_a_document(corpus, capsys):
    run = ["--json", "--world-size", "2", "--", *corpus]
    whole = json.loads(said(capsys, "docs", "--iteration", "4", *run)[1])
    part = json.loads(
        said(capsys, "docs", "--iteration", "4", "--microbatch", "1", "--dp-rank", "0", *run)[1]
    )
    assert part and {(row["micro_batch"], row["dp_rank"]) for row in part} == {(1, 0)}
    assert part == [row for row in whole if (row["micro_batch"], row["dp_rank"]) == (1, 0)]
    document = part[0]["document"]
    shown = json.loads(said(capsys, "docs", "--doc", str(document), *run)[1])["shown"]
    assert (4, part[0]["sample"]) in {(one["iteration"], one["sample"]) for one in shown}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--iteration", "4", "--microbatch", "4"], "--microbatch 4: iteration 4 has 0 to 3"),
        (["--iteration", "4", "--dp-rank", "1"], "--dp-rank 1: iteration 4 has 0 to 0"),
        (["--iteration", "4", "--order", "loss"], "--order loss: needs --iteration"),
        (["--doc", "4", "--order", "loss"], "--order loss: needs --iteration"),
        (["--doc", "80"], "--document 80: "),
    ],
)
def test_docs_refuses(words, message, corpus, capsys):
    assert spikes.main(["docs", *words, "--", *corpus]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


# --- replay


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small run in one process with a checkpoint every second iteration."""
    return _trained(tmp_path_factory.mktemp("run"), 1)


def _trained(folder: Path, world: int, *more: str):
    text = write_text(folder / "text", 400)
    return train(
        folder,
        [
            *SMALL,
            *NO_DROPOUT,
            "--data-path",
            text,
            "--split",
            "100,0,0",
            "--train-iters",
            str(ITERATIONS),
            "--save",
            str(folder / "save"),
            "--save-interval",
            "2",
            "--eval-iters",
            "0",
            *more,
        ],
        world,
    )


def replayed(capsys, *argv: str) -> list[dict]:
    return [json.loads(line) for line in said(capsys, "replay", "--json", *argv)[1].splitlines()]


def test_replay_finds_the_loss_that_training_logged(run, capsys):
    rows = replayed(capsys, "--load", str(run.save), "--iterations", "3")
    assert len(rows) == 8 and {row["iteration"] for row in rows} == {3}
    assert np.mean([row["loss"] for row in rows]) == pytest.approx(run.rows[2]["lm_loss"], rel=1e-6)
    for row in rows:  # the pieces' losses are the sample's
        counts = [piece["tokens"] - (place == 0) for place, piece in enumerate(row["pieces"])]
        of_pieces = sum(
            count * (piece["loss"] or 0) for count, piece in zip(counts, row["pieces"], strict=True)
        )
        assert of_pieces / sum(counts) == pytest.approx(row["loss"], rel=1e-5)
    at_last = replayed(capsys, "--ckpt", str(run.save / "iter_0000006"), "--iterations", "3-3")
    assert np.mean([row["loss"] for row in at_last]) < np.mean([row["loss"] for row in rows]), (
        "it has learned since"
    )


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout",
    [
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--pipeline-model-parallel-size", "2"],
        ["--use-distributed-optimizer"],
    ],
    ids=["tp", "pp", "dp"],
)
def test_replay_in_one_process_of_what_two_wrote(layout, tmp_path, capsys):
    two = _trained(tmp_path, 2, *layout)
    rows = replayed(capsys, "--load", str(two.save), "--ckpt-step", "4", "--iterations", "5")
    assert np.mean([row["loss"] for row in rows]) == pytest.approx(two.rows[4]["lm_loss"], rel=1e-5)
    assert {row["dp_rank"] for row in rows} == (
        {0, 1} if "--use-distributed-optimizer" in layout else {0}
    )


@pytest.mark.campaign
def test_replay_counts_the_tokens_that_training_counts(tmp_path):
    """Documents of their own positions and attention, and no loss behind their ends."""
    masks = ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"]
    masked = _trained(tmp_path, 1, *masks)
    reading = open_run(str(masked.save), None, 3)
    state = state_before(str(masked.save), 3, None)
    losses = np.concatenate(
        list(state.losses([reading.dataset[one.sample] for one in batch_rows(reading, 3)]))
    )
    counted = losses[losses != MASKED]
    assert 0 < len(counted) < len(losses)
    assert counted.mean(dtype=np.float64) == pytest.approx(masked.rows[2]["lm_loss"], rel=1e-6)


def test_what_stands_out_and_whether_another_state_finds_it_too():
    usual = scale_of([5 + 0.01 * n for n in range(-32, 33)] + [float("nan")])
    assert (usual.median, usual.sigma) == (
        pytest.approx(5.0),
        pytest.approx(1.4826 * 0.16, rel=0.05),
    )
    assert not usual.stands_out(6.3)
    assert all(usual.stands_out(loss) for loss in (6.6, float("nan"), float("inf")))
    assert not scale_of([5.0, 5.001, 5.002]).stands_out(5.4), (
        "a small excess is none, however alike the others are"
    )

    def told(other: float | None) -> str:
        return verdict(
            Replayed(9, BatchRow(1, 0, 0), 12.0, other), None if other is None else usual, 50
        )

    assert told(12.0).startswith("data: ") and numbers(told(12.0))[:2] == [50, 12.0]
    assert told(5.1).startswith("data x state: ") and numbers(told(5.1))[:2] == [50, 5.1]
    assert "--other-ckpt" in told(None)


def test_docs_by_loss(run, capsys):
    rows = json.loads(
        said(capsys, "docs", "--iteration", "3", "--order", "loss", "--json", str(run.save))[1]
    )
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    assert losses == sorted(losses, reverse=True) and len(losses) > 4
    _, out = said(capsys, "docs", "--iteration", "3", "--order", "loss", str(run.save))
    state = f"{run.save}/iter_0000002"
    first = out.partition("\n")[0]
    assert numbers(first) == [3, len(rows)] and first.endswith(state)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--iterations", "4-3"], "--iterations 4-3: "),
        (["--iterations", "3-7"], "--iterations 3-7: "),
        (["--iterations", "two"], "--iterations two: "),
        (["--iterations", "2"], "--ckpt-step"),
        (["--iterations", "4", "--ckpt-step", "3"], "[checkpoint-incomplete]"),
        (
            ["--iterations", "4", "--ckpt", "x"],
            "--ckpt or --load: ",
        ),
    ],
)
def test_replay_refuses(words, message, run, capsys):
    assert exit_code(spikes.main, "replay", "--load", str(run.save), *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_neighbours_are_as_many_as_it_takes(corpus):
    reading = reading_of(corpus, 1)
    assert neighbours(reading, 4, 4) == [1, 2, 3, 5, 6, 7, 8]
    assert neighbours(reading, 1, 9) == []


# --- analyze


def test_one_restart_for_several_spikes(tmp_path, capsys):
    noise = np.random.default_rng(4).normal(0, 0.02, 400)
    bad = {150: 2.0, 300: 1.5}
    log = tmp_path / "log"
    log.write_text(
        "".join(
            f" iteration {n}/ 400 | lm loss: {3 + noise[n - 1] + bad.get(n, 0):.6E} |\n"
            for n in range(1, 401)
        )
    )
    code, out = said(capsys, "analyze", str(log), "--json")
    found = json.loads(out)
    assert code == 10 and [event["cost"]["iterations"] for event in found["events"]] == [3, 3]
    assert found["restart"].startswith(
        "--load DIR --ckpt-step 148 --train-range-to-skip 149 151 299 301    (or any"
    )
    _, out = said(capsys, "analyze", str(log))
    assert out.splitlines()[-1] == f"  {found['restart']}"
    assert len(find_events(read_run(str(log)).records)) == 2
