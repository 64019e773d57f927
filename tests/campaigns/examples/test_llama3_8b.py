"""examples/llama3_8b: its job starts a run that the plan accepts, with the memory that its page says."""

import os
import re
import subprocess
import sys

import pytest

from tests.forkrun import ROOT
from tests.runs import plot

FOLDER = ROOT / "examples/llama3_8b"
ROW = re.compile(r"^\| (\d+) \| (\d+) x 2 \| (\d+) \| ([\d.]+ GiB) \|$", re.M)
# srun without a cluster: one task of the command in the container.
SRUN = f"""#!/bin/sh
case "$1 $2" in *--container-image=*) ;; *) exit 9 ;; esac
while [ "$1" != python ]; do shift; done
shift
exec {sys.executable} "$@"
"""


@pytest.mark.parametrize(
    "gpus, data, micro_batches, memory", ROW.findall((FOLDER / "README.md").read_text("utf-8"))
)
def test_the_page_has_the_numbers_of_the_plan(gpus, data, micro_batches, memory, capsys):
    words = [f"@{FOLDER}/llama3_8b.args", "--mock-data", "--vocab-size", "128256"]
    plot().main([*words, "--device", "cuda", "--dry-run", "--world-size", gpus])
    plan = capsys.readouterr().out
    assert f"= data {data} x tensor 2;" in plan and f"x accumulation {micro_batches} x" in plan
    assert re.search(rf"^  0 .* {memory.split()[0]}$", plan, re.M)


def test_check_script_accepts_the_job():
    tool = [sys.executable, "tools/check_script.py", "examples/llama3_8b/train.sbatch"]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and re.match(r"accepted: .* 16 ranks\n", done.stdout), done.stdout


def test_the_job_is_planned(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DATA": str(tmp_path),
        "OUT": str(tmp_path / "out"),
    }
    flags = "--device cuda --device-memory 80 --dry-run --world-size 16".split()
    command = ["sh", str(FOLDER / "train.sbatch"), *flags]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "memory: fits" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "out").is_dir()
