"""The name and the version of this suite, written once: pyproject.toml reads them here, and
--version prints them; and the commit of a checkout."""

from pathlib import Path

NAME = "megatron-gpt-pretraining"
VERSION = "0.2.0"
ROOT = Path(__file__).resolve().parents[1]


def version_line(prog: str) -> str:
    """What `--version` of a program prints."""
    return f"{prog} ({NAME}) {VERSION}"


def commit(root: Path = ROOT) -> str | None:
    """The commit that is checked out in the repository `root`; None where there is none, as of an
    installed package."""
    git = root / ".git"
    try:
        if git.is_file():  # a worktree
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        common = git / "commondir"
        shared = git / common.read_text().strip() if common.exists() else git
        if (shared / name).exists():
            return (shared / name).read_text().strip()
        packed = (shared / "packed-refs").read_text().splitlines()
        return next(row.split()[0] for row in packed if row.endswith(f" {name}"))
    except (OSError, StopIteration, UnicodeDecodeError):
        return None
