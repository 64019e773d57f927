"""Checkpoints of earlier versions (tests/golden/checkpoints) resume with the losses that the version
which wrote them had."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from megatron.config import saved_flags
from tests.runs import train

GOLDEN = Path(__file__).parents[3] / "golden" / "checkpoints"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_checkpoint_of_an_earlier_version_resumes_with_its_losses(tmp_path, name):
    shutil.copytree(GOLDEN / name / "run", tmp_path / "run")
    run = str(tmp_path / "run")
    flags = shlex.split((GOLDEN / name / "flags").read_text())
    resumed = train(
        tmp_path / "log",
        [*flags, "--num-workers", "0", "--load", run, "--save", run, "--save-interval", "100"],
    )
    rows = {row["iteration"]: [row["lm_loss"], row["grad_norm"]] for row in resumed.rows}
    expected = json.loads((GOLDEN / name / "losses.json").read_text())
    assert rows.keys() == set(map(int, expected)) == {5, 6, 7, 8}
    for iteration, values in expected.items():
        assert rows[int(iteration)] == pytest.approx(values, rel=1e-10)
    assert "resume-not-bit-for-bit" not in resumed.log  # it did not say where it was
    saved = saved_flags.read(tmp_path / "run/iter_0000008/args").config
    assert saved.model == saved_flags.read(tmp_path / "run/iter_0000004/args").config.model
