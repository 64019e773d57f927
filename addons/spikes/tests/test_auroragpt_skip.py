"""The skipping example with a smaller model: a bad document that is found, explained, skipped and
rolled back, and the seed's experiment of two skipped iterations."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.forkrun import ROOT

EXAMPLE = ROOT / "examples" / "auroragpt_skip"
SMALL = "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --train-iters 220".split()


def script(python: str, name: str, runs: Path, data: Path, *words: str) -> str:
    """What a script of the example printed."""
    environ = {
        **os.environ,
        "PYTHON": python,
        "DATA": str(data),
        "RUNS": str(runs),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["sh", str(EXAMPLE / name), *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (
        f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def data(warm_python, tmp_path_factory) -> Path:
    """The example's corpora."""
    folder = tmp_path_factory.mktemp("auroragpt_skip") / "data"
    script(warm_python, "prepare.sh", folder.parent, folder)
    return folder


def spike_is_found_explained_and_skipped(
    python: str, kind: str, reason: str, data: Path, runs: Path
) -> None:
    """Every step of spike.sh: it ends by comparing the bytes of the restart and of the rewind."""
    printed = script(python, "spike.sh", runs, data, kind, *SMALL)
    (event,) = json.loads((runs / kind / "events.json").read_text())["events"]
    # the bad document is read in iteration 194; precursors before it depend on the processor
    assert (event["peak"], event["end"]) == (194, 195) and 150 < event["start"] <= 193
    assert (
        event["restart"]
        == f"--load {runs}/{kind}/bad --ckpt-step 150 --train-range-to-skip {event['start']} 195"
    )
    docs, replay, restart, rewind = re.split(r"== [3-6]\. ", printed)[1:]
    assert f"{kind}_text_document document 86, tokens " in docs.splitlines()[4] and reason in docs
    assert (
        "data: at iteration 50 " in replay
        and f"{kind}_text_document document 86, tokens " in replay
    )
    assert restart.rstrip().endswith("no spike")
    assert "iteration 195 to 150" in rewind and "same bytes" in rewind
    assert (runs / kind / "spike.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.campaign
def test_a_bad_document_is_found_explained_and_skipped(data, tmp_path, warm_python):
    reason = "tokens per character, where"
    spike_is_found_explained_and_skipped(warm_python, "language", reason, data, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["noise", "repeats"])
def test_two_other_bad_documents_are_found_explained_and_skipped(kind, data, tmp_path, warm_python):
    reason = "tokens per character, where"
    spike_is_found_explained_and_skipped(warm_python, kind, reason, data, tmp_path)


@pytest.mark.campaign
def test_the_posts_two_runs_and_tables(data, tmp_path, warm_python):
    # the script makes it
    printed = script(
        warm_python, "skip_two.sh", tmp_path / "new" / "runs", data, "--num-layers", "1"
    )
    first, second = re.findall(r"(?:^\| \d.*\n)+", printed, re.M)
    rows = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in (first, second)
    ]
    assert [row[:4] for row in rows[0]] == [row[:4] for row in rows[1]]
    assert [row[1] for row in rows[0]] == ["32", "64", "96", "128"]
    assert [(row[4] == "", row[5] == "", row[6]) for row in rows[1]] == [
        (False, False, "0"),
        (True, True, "1"),
        (True, True, "1"),
        (False, False, "0"),
    ]
    assert rows[0][0][4:6] == rows[1][0][4:6], "the first iteration is the same to the digit"
    assert rows[0][3][4] != rows[1][3][4], "the fourth stands on other weights"
    assert ": iteration, consumed_samples, consumed_tokens, learning_rate\n" in printed
    assert printed.count("\ngood: ") == 3
