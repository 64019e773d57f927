"""tools/benchmarks/checkpoint.py in small: a line for each ratio, and nothing is left behind."""

from __future__ import annotations

import json
import re

import pytest

from tests.load_tool import load_tool


@pytest.mark.campaign
def test_a_line_for_each_ratio(tmp_path, capsys):
    words = [
        "--gb",
        "0.01",
        "--rounds",
        "1",
        "--folder",
        str(tmp_path),
        "--json",
        str(tmp_path / "seconds.json"),
    ]
    load_tool("benchmarks/checkpoint").main(words)
    lines = capsys.readouterr().out.splitlines()
    names = ["save", "stall", "GEMMs in a save", "load, cached", "load, cold"]
    assert [line[:16].strip() for line in lines[1:-1]] == names and len(lines) == 7
    for line in lines[1:-1]:
        assert re.fullmatch(
            r".{16} +[\d.]+ s(?: = +[\d.]+ GB/s)?; .{16} +[\d.]+ s(?: = +[\d.]+ GB/s)?: [\d.]+ "
            r"(of the rate of|times) [A-Za-z, ]+(?: \(goal: at (least|most) [\d.]+\))?",
            line,
        ), line
    seconds = json.loads((tmp_path / "seconds.json").read_text())
    assert seconds.pop("bytes") > 1e7 and all(value > 0 for value in seconds.values())
    assert [path.name for path in tmp_path.iterdir()] == ["seconds.json"]
