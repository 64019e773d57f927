"""docs/flags.md says what the declarations say, about every flag."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron.arguments import flags_of
from megatron.config.megatron_flags import FOREIGN
from megatron.config.tree import Config

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "make_flag_docs.py"


def run(*argv: str, tool: Path = TOOL) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(tool), *argv], capture_output=True, text=True, cwd="/")


def test_the_page_is_up_to_date():
    done = run("--check")
    assert done.returncode == 0, done.stderr


def test_the_page_has_every_flag_and_whole_tables():
    text = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    for flag in [*flags_of(Config).values(), *FOREIGN.values()]:
        assert f"`{flag.spelling}`" in text
    columns = 0
    for line in text.splitlines():
        if not line.startswith("|"):
            columns = 0
            continue
        cells = line.replace("\\|", "").count("|") - 1
        assert cells == (columns or cells)
        columns = cells


def test_a_page_that_differs_is_noticed_and_written_again(tmp_path):
    (tmp_path / "megatron").symlink_to(ROOT / "megatron")
    (tmp_path / "tools").mkdir()
    tool = tmp_path / "tools" / TOOL.name
    tool.write_text(TOOL.read_text(encoding="utf-8"), encoding="utf-8")
    page = tmp_path / "docs" / "flags.md"
    assert run("--check", tool=tool).returncode == 1
    assert run(tool=tool).returncode == 0 and run("--check", tool=tool).returncode == 0
    page.write_text(page.read_text(encoding="utf-8").replace("--num-layers", "--layers"), encoding="utf-8")
    done = run("--check", tool=tool)
    assert done.returncode == 1 and "run python tools/make_flag_docs.py" in done.stderr
    assert run("--chekc", tool=tool).returncode == 2
