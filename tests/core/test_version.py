"""The commit that a checkpoint names is the one that git names."""

import subprocess

import pytest

from megatron.version import commit


def git(folder, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", *identity, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("kind", ["branch", "detached", "packed", "worktree"])
def test_the_commit_is_gits(tmp_path, kind):
    root = tmp_path / "root"
    root.mkdir()
    git(root, "init", "-q")
    git(root, "commit", "-q", "--allow-empty", "-m", "first")
    if kind == "detached":
        git(root, "checkout", "-q", "--detach")
    elif kind == "packed":
        git(root, "pack-refs", "--all")
    elif kind == "worktree":
        git(root, "worktree", "add", "-q", "../other")
        git(tmp_path / "other", "commit", "-q", "--allow-empty", "-m", "second")
        root = tmp_path / "other"
    assert commit(root) == git(root, "rev-parse", "HEAD").strip()


def test_without_a_repository_there_is_none(tmp_path):
    assert commit(tmp_path) is None
