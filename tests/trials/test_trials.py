"""What a small extension costs: the files that a person writes, kept as patches with their test.

A patch that no longer applies is made again: apply what is left of it, edit, and
`git diff -U2 > tests/trials/NAME.patch`. docs/flags.md is generated, not part of it; nor are the
page and the table of exports of a family.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.forkrun import ROOT
from tests.planted import bugs

FOLDER = Path(__file__).parent
FORWARD = "tests/core/training/test_forward_step_metrics.py::"
# The patch, the test in it, the files of the program and of the tests that it touches.
TRIALS = {
    "optimizer_flag": ("tests/core/optimizer/test_adam.py::test_nesterovs_momentum_is_ahead", 2, 1),
    "metric": (FORWARD + "test_the_factor_of_clipping", 2, 1),
    "log_format": (FORWARD + "test_lines_of_commas", 2, 1),
    "rope_layers": ("tests/core/model/test_rope_layers.py::", 1, 2),
    "linear_biases": ("tests/core/model/test_linear_biases.py::", 6, 2),
    "mixer": ("tests/core/model/test_moving_average.py::", 5, 1),
    "norm": ("tests/core/kernels/test_norms.py::test_l1_norm", 3, 1),
    "data_source": ("tests/core/data/test_token_array.py::", 4, 1),
    "family": ("addons/convert/tests/test_corners.py::hunyuan_v1_dense", 1, 1),
}
PEERS = {"family": pytest.mark.peers}


def files(name: str) -> list[str]:
    """The files that a patch touches."""
    text = (FOLDER / f"{name}.patch").read_text(encoding="utf-8")
    return re.findall(r"^\+\+\+ b/(.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", TRIALS)
def test_the_files_of_a_trial(name):
    touched = files(name)
    tests = [file for file in touched if "tests/" in file]
    assert (len(touched) - len(tests), len(tests)) == TRIALS[name][1:]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the source for all trials, one at a time."""
    return bugs.copy_tree(tmp_path_factory.mktemp("trials"), ())


@pytest.mark.campaign
@pytest.mark.parametrize("name", [pytest.param(name, marks=PEERS.get(name, ())) for name in TRIALS])
def test_a_trial_works(name, copy):
    if name in PEERS:
        pytest.importorskip("transformers")
    apply = ["git", "apply", str(FOLDER / f"{name}.patch")]
    subprocess.run(apply, cwd=copy, check=True)
    file, _, test = TRIALS[name][0].partition("::")
    result = bugs.run(copy, file, *(["-k", test] if test else []))
    subprocess.run([*apply, "--reverse"], cwd=copy, check=True)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:]


# Deleting InternLM: all that a person removes. addons/tests/test_rooms.py deletes it in a copy and
# runs it.
REMOVED = (
    "addons/internlm/",
    "tools/internlm_config.py",
    "tools/convert_data.py",
)


def test_no_other_file_names_internlm():
    files = [file for top in ("megatron", "tools") for file in (ROOT / top).rglob("*")]
    found = {
        path
        for file in [*files, ROOT / "pretrain_gpt.py"]
        if file.suffix in (".py", ".json", ".cpp")
        and not (path := file.relative_to(ROOT).as_posix()).startswith(REMOVED)
        and "internlm" in file.read_text(encoding="utf-8").lower()
    }
    assert not found
