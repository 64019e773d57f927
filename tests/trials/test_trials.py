"""What a small extension costs: the files that a person writes, kept as patches with their test.

A patch that no longer applies is made again: apply what is left of it, edit, and
`git diff -U2 > tests/trials/NAME.patch`. docs/flags.md is generated, not part of it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.planted import bugs

FOLDER = Path(__file__).parent
FORWARD = "tests/core/training/test_forward_step_metrics.py::"
# The patch, the test in it, the files of the program and of the tests that it touches.
TRIALS = {
    "optimizer_flag": ("tests/core/optimizer/test_adam.py::test_nesterovs_momentum_is_ahead", 2, 1),
    "metric": (FORWARD + "test_the_factor_of_clipping", 2, 1),
    "log_format": (FORWARD + "test_lines_of_commas", 2, 1),
    "window": ("tests/core/model/test_windows.py::", 5, 4),
    "norm": ("tests/core/kernels/test_norms.py::test_l1_norm", 6, 1),
    "data_source": ("tests/core/data/test_token_array.py::", 6, 1),
}


def files(name: str) -> list[str]:
    """The files that a patch touches."""
    text = (FOLDER / f"{name}.patch").read_text(encoding="utf-8")
    return re.findall(r"^\+\+\+ b/(.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", TRIALS)
def test_the_files_of_a_trial(name):
    touched = files(name)
    tests = [file for file in touched if file.startswith("tests/")]
    assert (len(touched) - len(tests), len(tests)) == TRIALS[name][1:]


@pytest.mark.campaign
@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_works(name, tmp_path):
    copy = bugs.copy_tree(tmp_path, ())
    patch = FOLDER / f"{name}.patch"
    subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)
    file, _, test = TRIALS[name][0].partition("::")
    result = bugs.run(copy, file, *(["-k", test] if test else []))
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:]
