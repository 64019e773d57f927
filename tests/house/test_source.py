"""What linters do not know: files are read whole through megatron/small_files.py alone, and launchers'
variables are named in megatron/launcher.py and cluster.py alone."""

import ast
import re
from collections.abc import Iterator

from tests.forkrun import ROOT

# They read whole what the kernel, or they themselves, have written, or what is part of the suite.
READ_WHOLE = {
    "megatron/threads.py",
    "megatron/console.py",
    "megatron/version.py",
    "megatron/training/launch/hang.py",
    "megatron/training/launch/network.py",
    "addons/convert/families.py",
}
LAUNCHER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|(SLURM|OMPI|PMIX?|PALS|TORCHELASTIC)_\w+"
)


def nodes(words: str, *patterns: str) -> Iterator[tuple[str, ast.AST]]:
    """(file, node of its syntax tree) of our files that have one of these words."""
    for file in sorted(file for pattern in patterns for file in ROOT.glob(pattern)):
        path = file.relative_to(ROOT).as_posix()
        if path.startswith("megatron/core/") or "/tests/" in path:
            continue
        if re.search(words, text := file.read_text("utf-8")):
            yield from ((path, node) for node in ast.walk(ast.parse(text)))


def reads_whole(node: ast.AST) -> bool:
    """Whether this is a call of read_text or read_bytes, but not of small_files or of a file of
    the kernel."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    source = ast.unparse(node.func.value)
    if source in ("small_files", "log_reader") or re.search(r"/(proc|sys)/", source):
        return False
    return node.func.attr in ("read_text", "read_bytes")


def names_launcher(node: ast.AST) -> bool:
    """Whether this is the name of a launcher's variable."""
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and LAUNCHER.fullmatch(value) is not None


def test_files_are_read_whole_through_small_files() -> None:
    """It limits their size: a file of 100 GB is one error, not the end of the machine's memory."""
    found = {
        path
        for path, node in nodes(
            "read_(text|bytes)", "megatron/**/*.py", "addons/**/*.py", "tools/**/*.py"
        )
        if reads_whole(node)
    }
    assert found <= READ_WHOLE


def test_the_place_of_a_process_is_read_in_one_way() -> None:
    """Two readings of RANK or SLURM_PROCID would differ under some launcher."""
    found = {
        path
        for path, node in nodes(LAUNCHER.pattern, "megatron/**/*.py", "*.py")
        if names_launcher(node)
    }
    assert found == {"megatron/launcher.py", "megatron/cluster.py"}


def test_violations_are_seen() -> None:
    text = "Path('a').read_bytes()\nos.environ['SLURM_PROCID']\nsmall_files.read_text('a')\n"
    found = [
        check(node) for node in ast.walk(ast.parse(text)) for check in (reads_whole, names_launcher)
    ]
    assert sum(found) == 2
