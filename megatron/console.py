"""The commands that `pip install` brings: megatron-pretrain and megatron-tools. They run
pretrain_gpt.py and the programs of tools/ as scripts, from an installation or from a clone, in
any directory."""

import ast
import difflib
import runpy
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from megatron import explain, interrupt
from megatron.version import version_line

ROOT = Path(__file__).resolve().parents[1]
# setup.py puts tools/ here: "tools" alone would be a name that other packages have too.
INSTALLED = ROOT / "megatron_gpt_tools" / "tools"
TOOLS = "megatron-tools"


def pretrain() -> None:
    """megatron-pretrain: pretrain_gpt.py with the words of the command line."""
    _run(ROOT / "pretrain_gpt.py", sys.argv[1:])


def tools() -> None:
    """megatron-tools NAME: the program tools/NAME.py with the words after its name."""
    interrupt.exit_at_once()
    sys.exit(interrupt.run(run_tool, sys.argv[1:]))


def run_tool(argv: Sequence[str]) -> int:
    """Run the tool that the first word names; the exit code, unless the tool leaves with its
    own."""
    folder = INSTALLED if INSTALLED.is_dir() else ROOT / "tools"
    programs = {path.stem: path for path in sorted(folder.glob("*.py"))}
    name = argv[0].replace("-", "_") if argv and argv[0][:1] != "-" else ""
    if name in programs:
        _run(programs[name], argv[1:])
        return 0
    if argv[:1] == ["--version"]:
        print(version_line(TOOLS))
        return 0
    if argv[:1] == ["--explain"]:
        return explain.main(argv[1:])
    if not argv or argv[0] in ("-h", "--help"):
        lines = [
            f"usage: {TOOLS} TOOL ...",
            "",
            f"Tools ({TOOLS} TOOL --help prints the help of each)",
        ]
        width = max(map(len, programs), default=0)
        lines += [f"  {tool:<{width}}  {_summary(path)}" for tool, path in programs.items()]
        print("\n".join(lines), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    close = difflib.get_close_matches(name or argv[0], [*programs, "--help", "--version"], 1, 0.5)
    hint = f"did you mean {close[0]}?" if close else f"the tools are {', '.join(programs)}"
    print(f"error: unknown tool {argv[0]}; {hint} [command-unknown]", file=sys.stderr)
    return 2


def _run(path: Path, words: Sequence[str]) -> None:
    interrupt.exit_at_once()
    sys.argv = [str(path), *words]
    runpy.run_path(str(path), run_name="__main__")


def _summary(path: Path) -> str:
    """The first sentence of a program's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    return textwrap.shorten(
        text.partition(". ")[0].partition(": ")[0].rstrip("."), 90, placeholder=" ..."
    )
