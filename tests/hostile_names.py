"""Names that a store, a file or another machine gives and that become paths, each as hostile as it can
be, and what must hold: nothing outside of the folder is opened or changed, and one error with a code."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.problems import code_of
from tools.shared.program import said

NAMES = {
    "parent": "../outside/x",
    "parent further in": "a/../../outside/x",
    "parent alone": "..",
    "absolute": "/OUTSIDE/x",  # the test's own folder
    "empty": "",
    "dot": ".",
    "empty part": "a//b",
    "trailing slash": "a/",
    "backslashes": "..\\outside\\x",
    "terminal escape": "a\x1b[2Jb",
    "newline": "a\nb",
    "NUL": "a\0b",
    "C1 control": "a\x9bb",
    "line separator": "a\u2028b",
    "300 characters": "n" * 300,
    "not UTF-8": os.fsdecode(b"a\xff"),
    "half a pair": "a\ud800",
}
QUICK = ("parent", "absolute", "empty", "NUL", "not UTF-8")  # the others are campaigns
KINDS = [pytest.param(kind, marks=[pytest.mark.campaign] * (kind not in QUICK)) for kind in NAMES]
SAFE = ("name-not-safe", "link-out-of-folder")
# by each place the codes of its error, and the names that are harmless there
Places = dict[str, tuple[Callable, tuple[str, ...], tuple[str, ...]]]
_opened: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def audit() -> None:
    sys.addaudithook(
        lambda event, args: (
            _opened.append(args[0]) if event == "open" and isinstance(args[0], str) else None
        )
    )


class Store:
    """An object store whose listings have one name as it is; every file has four bytes."""

    async_impl = False

    def __init__(self, folder: str, *names: str):
        self.folder = folder
        self.keys = [f"{folder}/{name}" for name in names]

    def _strip_protocol(self, url: str) -> str:
        return url.partition("://")[2]

    def invalidate_cache(self) -> None:
        """There is none."""

    def find(self, folder: str, detail: bool, prefix: str) -> dict[str, dict]:
        return {key: self.info(key) for key in self.keys}

    def ls(self, path: str, detail: bool) -> list[dict]:
        return [self.info(key) if detail else key for key in self.keys]

    def info(self, path: str) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": 4, "ETag": "1"}

    def cat_file(self, path: str, start: int = 0, end: int = 4) -> bytes:
        return b"evil"[start:end]

    def get_file(self, source: str, target: str) -> None:
        Path(target).write_bytes(b"evil")


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(a folder to read in, one that nobody may touch)."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("x", "x.safetensors"):
        (outside / name).write_text("{}")
    (tmp_path / "root").mkdir()
    before = _tree(tmp_path)
    _opened.clear()
    yield tmp_path / "root", outside
    touched = [path for path in map(os.path.realpath, _opened) if path.startswith(f"{outside}")]
    assert not touched
    assert _tree(tmp_path) == before


def _tree(folder: Path) -> dict[str, bytes | None]:
    """What is in a folder, but for its root/."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not path.is_relative_to(folder / "root")
    }


def one_code(error: Exception) -> str:
    lines = said(error)
    assert len(lines) == 1 and "\n" not in lines[0], lines
    return code_of(lines[0])


def check_name(
    place: tuple[Callable, tuple[str, ...], tuple[str, ...]],
    kind: str,
    folders: tuple[Path, Path],
    patch: pytest.MonkeyPatch,
) -> None:
    """One error with one of the place's codes, unless the name is harmless there."""
    root, outside = folders
    use, codes, harmless = place
    name = NAMES[kind].replace("/OUTSIDE", str(outside))
    try:
        use(root, name, patch)
    except Exception as error:
        _opened[:] = [path for path in _opened if "\0" not in path]
        if kind not in harmless:
            assert one_code(error) in codes, error
    else:
        assert kind in harmless


def check_link(use: Callable[[Path, Path], object], folders: tuple[Path, Path]) -> None:
    """A link to a file outside of the folder is one error."""
    root, outside = folders
    before = (outside / "x").read_bytes()
    try:
        with pytest.raises(Exception) as caught:
            use(root, outside)
    finally:
        (outside / "x").write_bytes(before)
        _opened.clear()
    assert one_code(caught.value) == "link-out-of-folder", caught.value


def linked(root: Path, outside: Path, name: str) -> None:
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(outside / "x")


def link_in_place_of(name: str, use: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    def run(root: Path, outside: Path) -> None:
        linked(root, outside, name)
        use(root)

    return run
