"""tools/benchmarks/data.py: it measures what it says, and sees runs that do not write the same
bytes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.vocabularies import write_bpe

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tool() -> object:
    spec = importlib.util.spec_from_file_location(
        "data_benchmark", ROOT / "tools" / "benchmarks" / "data.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    vocab, merges = write_bpe(tmp_path)
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": f"the theory {n}"}) + "\n" for n in range(300))
    )
    return [
        "tokenize",
        "--input",
        f"{tmp_path}/x.jsonl",
        "--vocab-file",
        vocab,
        "--merge-file",
        merges,
        "--rounds",
        "1",
        "--workers",
        "2",
    ]


@pytest.mark.campaign
def test_all_runs_write_the_same(tool: object, flags: list[str], tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    assert tool.main([*flags, "--json", f"{tmp_path}/figures.json"]) == 0
    report = json.loads((tmp_path / "figures.json").read_text())
    fast = (
        [tool.FAST]
        if all(map(importlib.util.find_spec, ("awkward", "gigatoken", "megatron.core")))
        else []
    )
    assert list(report) == [
        "with the extra, 2 workers",
        "without it, 2 workers",
        "tokenizers as in Megatron, 2 workers",
        *fast,
        "with the extra, on the slower ones' input",
    ]
    assert all(
        row["seconds"] > 0 and row["cpu"] > 0 and 20 < row["peak_mb"] < 2000
        for row in report.values()
    )


def test_the_peak_is_the_runs_own(tool: object, tmp_path: Path) -> None:
    held = bytearray(b"x") * 400_000_000  # what this process holds is not what the run took
    write = (
        "import sys; [open(sys.argv[1] + '_text_document.' + end, 'w') for end in ('bin', 'idx')]; "
    )
    write += "held = bytearray(b'x') * 100_000_000"
    found = tool.measure([sys.executable, "-S", "-c", write, f"{tmp_path}/x"], tmp_path / "x")
    assert (
        len(held) == 400_000_000
        and 90 < found.peak_mb < 200
        and 0 < found.cpu
        and 0 < found.seconds
    )
    with pytest.raises(subprocess.CalledProcessError) as failed:
        tool.measure(
            [sys.executable, "-S", "-c", "raise SystemExit('no such thing')"], tmp_path / "x"
        )
    assert failed.value.returncode == 1 and failed.value.stderr == b"no such thing\n"


def test_other_bytes_are_an_error(
    tool: object,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    digests = iter("abc")
    monkeypatch.setattr(
        tool, "measure", lambda command, prefix: tool.Measured(1.0, 1.0, 50.0, next(digests))
    )
    assert tool.main([*flags, "--only", "with the extra"]) == 1
    assert "runs on the same input wrote different bytes" in capsys.readouterr().err


def test_the_head_is_whole_lines(tool: object, flags: list[str], tmp_path: Path) -> None:
    source = flags[2]
    head = Path(tool.head_of(source, 1000, str(tmp_path))).read_bytes()
    assert (
        Path(source).read_bytes().startswith(head)
        and head.endswith(b"\n")
        and 950 < len(head) <= 1000
    )
    assert tool.head_of(source, 10**9, str(tmp_path)) == source


def test_help_and_wrong_words(tool: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--help"]) == 0 and "data.py tokenize" in capsys.readouterr().out
    assert tool.main(["tokenise"]) == 2 and "data.py tokenize" in capsys.readouterr().err
