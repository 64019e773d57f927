"""tools/check_script.py of a script in Python."""

from __future__ import annotations

from megatron.addons.megatron_cli import check_script

PYTHON = """
from megatron.core import mpu
from megatron.training import get_args, pretrain
from megatron.training.checkpointing import save_checkpoint
print(1 / 0)
pretrain()
"""


def test_the_verdict_on_a_python_script(tmp_path, capsys):
    path = tmp_path / "own.py"
    path.write_text(PYTHON)
    assert check_script.main([str(path)]) == 1
    first, *_, last = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("refused: 1 problem") and "line 4: save_checkpoint" in last
    path.write_text(PYTHON.replace("import save_checkpoint", "import load"))
    assert check_script.main([str(path)]) == 0
    for text in ("import (", "import json"):
        path.write_text(text)
        assert check_script.main([str(path)]) == 1
        assert capsys.readouterr().err.startswith("error: ")
