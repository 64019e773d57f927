"""Start-up of pretrain_gpt.py as whole processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from harness import COMMAND, Case, Setup, Side, benchmark, each
from sizes import command_line, parse_size

WHAT = ("help", "dry-run", "first-step")


def words_of(tree: Path, what: str) -> list[str]:
    """The command line."""
    program = [sys.executable, str(tree / "pretrain_gpt.py")]
    if what == "help":
        return [*program, "--help"]
    tiny = parse_size("tiny:layers=1,hidden=32,heads=2,seq=16,micro_batch=2,vocab=64")
    words = command_line(tiny, "fp32", "cpu")
    if what == "dry-run":
        return [*program, *words, "--dry-run"]
    words[words.index("--train-iters") + 1] = "1"
    return [*program, *words]


@benchmark
def startup(setup: Setup, what: str = each(*WHAT)) -> Iterator[Case]:
    """pretrain_gpt.py as a whole process: --help, a dry run, a run of one step of a tiny model;
    beside it the interpreter, for first-step with `import torch`."""
    if what not in WHAT:
        raise ValueError(f"what={what}: is none of {', '.join(WHAT)}")
    sides = setup.commands(lambda tree: {"words": words_of(tree, what)})
    code = "import torch" if what == "first-step" else "pass"
    bare = {"words": [sys.executable, "-c", code]}
    sides.append(Side(f"python: {code}", COMMAND, bare, ours=False))
    yield Case(what, sides)
