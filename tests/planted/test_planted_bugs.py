"""Each bug is patched into a copy of the product code; the test named beside it must fail there."""
from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.forkrun import ROOT


class Bug(NamedTuple):
    file: str
    old: str
    new: str
    test: str


BUGS = {
    "off by one in the sample index": Bug(
        "megatron/data/index_helpers.py", "    return rows\n", "    rows[1:, 1] += 1\n    return rows\n",
        "tests/data/test_gpt_dataset.py::test_golden_indices"),
    "forgotten loss mask": Bug(
        "pretrain_gpt.py", "(losses * batch.loss_mask).sum(), batch.loss_mask.sum()", "losses.sum(), losses.numel()",
        "tests/training/test_step.py::test_loss_and_norm_are_those_of_the_whole_batch"),
    "weight decay on biases": Bug(
        "megatron/optimizer/param_groups.py", 'return not name.endswith(".bias") and len(shape) != 1', "return True",
        "tests/optimizer/test_param_groups.py::test_weight_decay_rule"),
    "gradient not averaged over accumulation": Bug(
        "megatron/training/step.py", "backward_scale = run.optimizer.loss_scale / nominal",
        "backward_scale = run.optimizer.loss_scale / nominal * run.plan.num_microbatches(iteration)",
        "tests/training/test_step.py::test_loss_and_norm_are_those_of_the_whole_batch"),
}


def run(copy: Path, test: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, tmp_path):
    bug = BUGS[name]
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for part in ("megatron", "tests"):
        shutil.copytree(ROOT / part, copy / part, ignore=ignore)
    for part in ("pretrain_gpt.py", ".pytest.ini"):
        shutil.copy(ROOT / part, copy / part)
    path = copy / bug.file
    text = path.read_text()
    assert text.count(bug.old) == 1, f"{bug.file} no longer holds the line that this bug replaces"
    path.write_text(text.replace(bug.old, bug.new))
    result = run(copy, bug.test)
    assert result.returncode == 1 and " failed" in result.stdout, result.stdout[-2000:] + result.stderr[-2000:]
