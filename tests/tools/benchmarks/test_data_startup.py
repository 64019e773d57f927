"""tools/benchmarks/data_startup.py in small: its lines, and that a set is made once."""

from __future__ import annotations

import re

import pytest

from tests.load_tool import load_tool

SMALL = (
    "--files 40 --documents 40000 --tokens 4000000 --pair-documents 3000 --seq-length 256 "
    "--rounds 1 --samples 200 "
)


@pytest.mark.sweep
def test_a_line_for_each_start(tmp_path, capsys):
    tool = load_tool("benchmarks/data_startup")
    words = ["start", "--folder", str(tmp_path), "--no-megatron-core", *SMALL.split()]
    tool.main(words)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.idx")}
    assert len(made) == 2 * 81  # with checksums and without
    capsys.readouterr()
    tool.main(words)
    assert made == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.idx")}
    lines = [
        re.sub(r"[ :]+[-+\d.]+ (s|%).*", "", line) for line in capsys.readouterr().out.splitlines()
    ]
    epoch = "epoch order, 40 files, 4e+06 tokens, 4e+0{} documents, {}"
    megatron = f"megatron, {{}}3e+03 documents, {tool.index_helpers.IMPLEMENTATION}, "
    checksums = "checksums, "
    assert lines == [
        epoch.format(4, "cold"),
        epoch.format(4, checksums + "cold"),
        epoch.format(4, "cached"),
        epoch.format(4, checksums + "cached"),
        epoch.format(3, "cold"),
        epoch.format(3, checksums + "cold"),
        epoch.format(3, "cached"),
        epoch.format(3, checksums + "cached"),
        "ten times the documents, cold",
        "ten times the documents, cached",
        megatron.format("") + "no index cache",
        megatron.format(checksums) + "no index cache",
        megatron.format("") + "index cached",
        megatron.format(checksums) + "index cached",
    ]


@pytest.mark.sweep
def test_a_line_for_each_resume(tmp_path, capsys):
    words = [
        "resume",
        "--folder",
        str(tmp_path),
        "--iteration",
        "30",
        *SMALL.split(),
        "--pair-documents",
        "9000",
    ]
    load_tool("benchmarks/data_startup").main(words)
    lines = [re.sub(r" +[\d.]+ s .*", "", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        f"{order} order, resumed at iteration {at}, {workers} workers"
        for order, at in (("epoch", 30), ("megatron", 30))
        for workers in (0, 2)
    ]


def test_samples_of_both_orders_are_timed(tmp_path, capsys):
    words = [
        "getitem",
        "--folder",
        str(tmp_path),
        "--no-megatron-core",
        "--getitem-tokens",
        "1000000",
        *SMALL.split(),
    ]
    load_tool("benchmarks/data_startup").main(words)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("__getitem__")
    ]
    assert len(lines) == 2
    for line, name in zip(lines, ("epoch order", "Megatron order"), strict=True):
        assert re.match(
            rf"__getitem__ at 256, {name} +[\d.]+ us = +[\d.]+ M tokens/s; median [\d.]+, 99th",
            line,
        )
