"""--data-ledger in whole small runs: the same numbers for every layout, over resumes, ramps and
skipped iterations."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from megatron.data.ledger import MASK, read_ledger, sample_hash, tokens_hash
from megatron.training import step
from tests.runs import NO_DROPOUT, SMALL, allow_workers, train, with_flags, write_text

LAYOUTS = {
    "micro-batches of 1": (1, ["--micro-batch-size", "1"]),
    "data workers": (1, ["--num-workers", "2"]),
    "dp 2": (2, []),
    "tp 2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp 2": (2, ["--pipeline-model-parallel-size", "2"]),
    "cp 2": (2, ["--context-parallel-size", "2"]),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


def argv(text: str, folder: Path, *extra: str) -> list[str]:
    mine = [
        "--data-path",
        text,
        "--split",
        "90,10,0",
        "--train-iters",
        "4",
        "--eval-iters",
        "0",
        "--data-ledger",
        str(folder / "ledger"),
    ]
    return with_flags([*SMALL, *NO_DROPOUT, *mine], *extra)


def ledger(folder: Path) -> list[tuple[int, ...]]:
    sequence_length, records = read_ledger(str(folder / "ledger"))
    assert sequence_length == 32
    return records.tolist()


@pytest.fixture(scope="module")
def reference(text, tmp_path_factory) -> list[tuple[int, ...]]:
    folder = tmp_path_factory.mktemp("reference")
    train(folder, argv(text, folder))
    return ledger(folder)


def note_samples(folder: str) -> None:
    """Write down the tokens of everything that is trained on, in the order it comes."""
    make = step.make_batch

    def noted(samples, *rest):
        with open(f"{folder}/tokens", "ab") as file:
            file.write(samples.rows.numpy().astype("<i4").tobytes())
        return make(samples, *rest)

    step.make_batch = noted


def test_the_hash_is_that_of_what_was_trained_on(text, tmp_path, reference):
    """The tokens that reach the model, seen from outside, make the hashes; sample numbers count up
    from 0."""
    train(tmp_path, argv(text, tmp_path), hook=functools.partial(note_samples, str(tmp_path)))
    seen = np.fromfile(tmp_path / "tokens", "<i4").reshape(-1, 8, 33)
    expected = [
        (
            n + 1,
            8 * n,
            8,
            0,
            sum(sample_hash(8 * n + i, tokens_hash(row)) for i, row in enumerate(batch)) & MASK,
        )
        for n, batch in enumerate(seen)
    ]
    assert ledger(tmp_path) == reference == expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_writes_the_same(text, tmp_path, reference, name):
    world, flags = LAYOUTS[name]
    train(tmp_path, argv(text, tmp_path, *flags), world, hook=allow_workers)
    assert ledger(tmp_path) == reference


def test_skipped_iterations_are_recorded_unread(text, tmp_path, reference):
    train(tmp_path, argv(text, tmp_path, "--train-range-to-skip", "2", "3"))
    assert ledger(tmp_path) == [reference[0], (2, 8, 8, 1, 0), (3, 16, 8, 1, 0), reference[3]]


def test_a_run_killed_and_resumed_writes_each_iteration_once(text, tmp_path, reference):
    """Killed in iteration 3, after the save of 1: 2 is done again, and the file is that of the
    straight run."""
    save = str(tmp_path / "save")
    words = argv(text, tmp_path, "--save", save, "--load", save, "--save-interval", "1")
    train(tmp_path, words, kill_at=3)
    assert [row[0] for row in ledger(tmp_path)] == [1, 2]
    train(tmp_path, with_flags(words, "--ckpt-step", "1"))
    assert ledger(tmp_path) == reference


@pytest.mark.campaign
def test_a_ramp_keeps_samples_apart(text, tmp_path):
    """Batches of 2, 4, 6, 8 samples: counts and first samples follow, for one rank as for two."""
    ramp = [
        "--rampup-batch-size",
        "2",
        "2",
        "12",
        "--train-samples",
        "38",
        "--micro-batch-size",
        "1",
    ]
    for world in (1, 2):
        folder = tmp_path / str(world)
        words = argv(text, folder, *ramp)
        at = words.index("--train-iters")
        del (
            words[at : at + 2],
            words[words.index("--lr-warmup-iters") : words.index("--lr-warmup-iters") + 2],
        )
        folder.mkdir()
        train(folder, words, world)
    one = ledger(tmp_path / "1")
    assert one == ledger(tmp_path / "2") and [row[2] for row in one][0] == 2 and one[-1][2] == 8
    assert all(row[1] + row[2] == after[1] for row, after in zip(one, one[1:], strict=False))
