"""--data-ledger of a run that goes back before a spike."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.features.spikes.injected import inject
from tests.runs import SMALL, train, with_flags, write_text

SPIKES = {31: 2.0, 32: 1.7}  # so 33 is the first to be back, and 30 to 33 are skipped


@pytest.mark.campaign
@pytest.mark.parametrize("every", ["10", "0"], ids=["from memory", "from a checkpoint"])
def test_the_ledger_is_that_of_a_run_with_the_skips_as_flags(tmp_path, every):
    text = write_text(tmp_path / "text", 800)

    def ledger(folder: Path, *extra: str) -> bytes:
        words = ["--data-path", text, "--train-iters", "40", "--save", str(folder / "save")]
        words += ["--split", "100,0,0", "--eval-iters", "0", "--save-interval", "15", *extra]
        words = with_flags(SMALL, *words, "--data-ledger", str(folder / "ledger"))
        train(folder, words, hook=functools.partial(inject, SPIKES))
        return (folder / "ledger").read_bytes()

    rewind = ["--spike-action", "rewind", "--spike-snapshot-interval", every]
    skip = ["--spike-action", "log", "--train-range-to-skip", "30", "33"]
    assert ledger(tmp_path / "rewound", *rewind) == ledger(tmp_path / "skipped", *skip)
