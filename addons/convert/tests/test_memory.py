"""Peak memory of conversions: a few tensors, never the model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.addons.convert.tests.llama_files import make_model
from tests.forkrun import ROOT

ALLOWED = 500e6  # bytes, and three times the largest tensor
# a process's peak begins with what its parent held, so a small one starts the conversion
MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
CONVERSIONS = (
    "hf-import hf ours --no-verify",
    "hf-export ours back --no-verify",
    "megatron-export ours megatron --ckpt-format torch_dist",
    "megatron-import megatron again",
)


def peak_of(folder, words: str) -> int:
    """Bytes of the largest process of a conversion."""
    tool = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py"), *words.split()]
    done = subprocess.run(
        [sys.executable, "-S", "-c", MEASURED, *tool],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("size", "shape"),
    [
        pytest.param(4e8, {"width": 512, "vocab": 4096}, id="0.4GB"),
        pytest.param(2e9, {}, id="2GB", marks=pytest.mark.sweep),
    ],
)
def test_three_of_the_largest_tensor_and_500_mb(size, shape, tmp_path):
    """What torch alone takes and the whole of the smaller model would be more."""
    limit = 3 * make_model(tmp_path / "hf", size, **shape) + ALLOWED
    conversions = CONVERSIONS if size > 1e9 else CONVERSIONS[:2]
    peaks = {words: peak_of(tmp_path, words) for words in conversions}
    assert {words: peak for words, peak in peaks.items() if peak > limit} == {}
    assert min(peaks.values()) + size > limit + 1e8, "the limit does not show a whole model"
