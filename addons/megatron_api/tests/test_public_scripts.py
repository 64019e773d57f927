"""Scripts with the imports and calls of Megatron-LM's of 2023 to 2026 start as they are, train as
pretrain_gpt.py does, or end with one error; tools/check_script.py says which."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron.addons.megatron_api.check_python import check
from megatron.addons.megatron_api.tests.public_scripts import PUBLIC
from tests import warm
from tests.forkrun import ROOT
from tests.runs import NO_DROPOUT, SMALL, train, with_flags, write_text

FLAGS = with_flags(
    [*SMALL, *NO_DROPOUT],
    *"--train-iters 3 --lr-warmup-iters 1 --eval-iters 0 --tokenizer-type NullTokenizer".split(),
    *"--device cpu --num-workers 0".split(),
)
WITH_TORCHRUN = "-m torch.distributed.run --nproc-per-node 2".split()


def started(script: Path, *words: str, world: int = 1) -> subprocess.CompletedProcess[str]:
    python = warm.elsewhere("torch._dynamo", "torch.distributed.run")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [python, *(WITH_TORCHRUN if world > 1 else []), str(script), *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=environ, cwd=script.parent, timeout=200
    )


def losses(script: Path, folder: Path, *words: str, world: int = 1) -> list[float]:
    rows = folder / f"{script.stem}.jsonl"
    done = started(script, *FLAGS, *words, "--metrics-file", str(rows), world=world)
    assert done.returncode == 0, done.stderr
    return [row["lm_loss"] for row in map(json.loads, rows.read_text().splitlines())]


CAMPAIGN = pytest.mark.campaign


@pytest.mark.parametrize(
    "name, world",
    [
        pytest.param("2023", 1, marks=CAMPAIGN),
        pytest.param("2024", 1, marks=CAMPAIGN),
        ("2025", 1),
        pytest.param("2026", 1, marks=CAMPAIGN),
        pytest.param("may 2026", 1, marks=CAMPAIGN),
        pytest.param("2023", 2, marks=pytest.mark.sweep),
        pytest.param("2026", 2, marks=CAMPAIGN),
    ],
)
def test_a_public_script_trains_as_it_is(tmp_path, name, world):
    words = ["--data-path", write_text(tmp_path / "text", 300), "--split", "80,10,10"]
    # scripts before 2025 weigh micro-batches alike, however many tokens of them count
    words += ["--eod-mask-loss"] * (name not in ("2023", "2024"))
    script = tmp_path / "script.py"
    script.write_text(PUBLIC[name])
    wanted = [row["lm_loss"] for row in train(tmp_path / "ours", [*FLAGS, *words], world).rows]
    assert len(wanted) == 3
    assert losses(script, tmp_path, *words, world=world) == pytest.approx(wanted, rel=1e-6)
    assert check(PUBLIC[name], script).problems == []


def broken(old: str, new: str, name: str = "2025") -> str:
    assert old in PUBLIC[name]
    return PUBLIC[name].replace(old, new, 1)


HEAD = "from megatron.core import parallel_state, tensor_parallel\n"
# What breaks a script; each ends a real start, too.
BROKEN = {
    "a package of its own": broken(HEAD, HEAD + "import no_such_package\n"),
    "part of a package of its own": broken(HEAD, HEAD + "from no_such.part import thing\n"),
    "a name that is nowhere": broken(HEAD, HEAD + "from megatron.core import no_such_name\n"),
    "a module that is nowhere": broken(HEAD, HEAD + "import megatron.core.no_such\n"),
    "the loop": broken(HEAD, HEAD + "from megatron.training.training import train_step\n"),
    "another model": broken(HEAD, HEAD + "from megatron.model import T5Model\n"),
    "saving": broken(HEAD, HEAD + "from megatron.checkpointing import save_checkpoint\n"),
    "a relative import": broken(HEAD, HEAD + "from . import helpers\n"),
    "all names": broken(HEAD, "from megatron.core import *\n"),
    "no name": broken("    args = get_args()\n", "    args = no_such_name()\n"),
    "no name in the module": broken("watch = ", "no_such_name\nwatch = "),
    "no argument": broken("args.reset_position_ids", "args.no_such_argument"),
    "no argument, read at once": broken("get_args())", "get_args().no_such)", "2023"),
    "an argument of tensor_parallel": broken("broadcast_data(", "no_such_function("),
    "a group that is not here": broken("mpu.get_data_parallel_group", "mpu.get_no_such", "2023"),
    "another kind of model": broken("encoder_or_decoder", "retro_encoder"),
    "too many arguments": broken("StragglerDetector()", "StragglerDetector(1, 2, 3)"),
    "an argument that is not taken": broken("get_args()\n", "get_args(no_such=1)\n"),
    "what may be imported alone": broken("watch = ", "model = MambaModel()\nwatch = "),
    "no call of pretrain": PUBLIC["2025"].partition("if __name__")[0].replace(", pretrain", ""),
    "no Python": broken("watch = ", "watch = ="),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_script_is_refused(tmp_path, name):
    try:
        assert check(BROKEN[name], tmp_path / "script.py").problems
    except SyntaxError:
        assert name == "no Python"


# One of each moment: as the module is read, as its functions run, as `pretrain` is called.
OFTEN = (
    *("a package of its own", "a relative import", "no name in the module", "no argument"),
    *("an argument of tensor_parallel", "another kind of model", "no call of pretrain"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=CAMPAIGN if name in OFTEN else pytest.mark.sweep) for name in BROKEN],
)
def test_a_broken_script_does_not_train(tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(BROKEN[name])
    rows = tmp_path / "rows.jsonl"
    done = started(script, *FLAGS, "--mock-data", "--metrics-file", str(rows))
    assert not rows.exists() or not rows.read_text()
    assert done.returncode or name == "no call of pretrain"


def test_one_error_has_all_that_a_script_cannot_have(tmp_path):
    script = tmp_path / "script.py"
    more = "import no_such_package\nfrom megatron.core import no_such_name\nimport no_such.part\n"
    script.write_text(PUBLIC["2025"].replace(HEAD, HEAD + more))
    done = started(script)
    assert done.returncode == 1 and done.stdout == ""
    first, *rows = done.stderr.splitlines()
    assert first.startswith(f"error: {script} ") and first.endswith("[names-not-here]")
    assert [row.split()[0] for row in rows] == ["no_such_package", "no_such_name", "no_such"]


def test_an_error_in_a_function_names_its_line(tmp_path):
    script = tmp_path / "script.py"
    text = PUBLIC["2024"].replace(
        "    args = get_args()\n", "    args = get_args()\n    int('x')\n", 1
    )
    script.write_text(text)
    done = started(script, *FLAGS, "--mock-data")
    line = text.partition("int('x')")[0].count("\n") + 1
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and error.startswith(
        f"error: {script}, line {line}: invalid literal"
    )


@pytest.mark.peers
def test_another_program_gets_megatron_core(tmp_path):
    core = pytest.importorskip("megatron.core")
    assert re.search(r"site-packages.megatron.core", core.__file__)
    script = tmp_path / "script.py"
    script.write_text("import megatron.core, megatron.training\nprint(megatron.core.__file__)\n")
    assert started(script).stdout.strip() == core.__file__
    script.write_text(
        "import megatron.core\nfrom megatron.training import pretrain\n"
        "print(getattr(megatron.core, '__file__', None), megatron.core.__version__)\n"
    )
    assert started(script).stdout.startswith("None 0.20.0+")
