"""Files of --deepspeed_config and of tools/check_script.py that are none, too large or nested too
deeply are refused at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.addons.megatron_cli import check_script
from megatron.addons.megatron_cli.deepspeed import read_deepspeed


def _script(path: Path) -> None:
    if check_script.main([str(path)]):
        raise ValueError("refused")


@pytest.mark.parametrize("read", [lambda path: read_deepspeed(str(path)), _script])
def test_pipes_devices_and_directories_are_refused(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 8 << 30)
    (tmp_path / "directory").mkdir()
    for path in (*sorted(tmp_path.iterdir()), Path("/dev/zero"), tmp_path / "missing"):
        with pytest.raises((ValueError, OSError)):
            read(path)


def test_deep_brackets_are_an_error(tmp_path, capsys):
    (tmp_path / "x").write_text("[" * 200_000 + "]" * 200_000)
    words, [problem] = read_deepspeed(str(tmp_path / "x"))
    assert words == [] and "\n" not in problem
    assert check_script.main([str(tmp_path / "x")]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_script_whose_variables_grow_without_end_is_refused(tmp_path, capsys):
    (tmp_path / "x.sh").write_text("A=aaaaaaaa\n" + 'A="$A$A"\n' * 60)
    assert check_script.main([str(tmp_path / "x.sh")]) == 1
    assert "the variable A" in capsys.readouterr().err
