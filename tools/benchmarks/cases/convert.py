"""Conversions by tools/convert_checkpoint.py, beside plain copying of safetensors files."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases.llama_files import make_model
from cases.subject import Command, Subject
from harness import Case, Setup, Side, benchmark, each
from processes import ROOT

from megatron.checkpoint.safetensors_file import Entry, SafetensorsFile, write_file

# by name: the command, and what it reads and writes
CONVERSIONS = {
    "hf-import": ("hf-import {hf} {ours} --no-verify", "ours"),
    "hf-export": ("hf-export {ours} {back} --no-verify", "back"),
    "megatron-export": ("megatron-export {ours} {megatron} --ckpt-format torch_dist", "megatron"),
    "megatron-import": ("megatron-import {megatron} {again}", "again"),
}


class Copy(Subject):
    """Copies a folder's safetensors, tensor by tensor, with fsync."""

    def __init__(self, source: str, target: str):
        self._source = Path(source)
        self._target = Path(target)

    def warm_up(self) -> None:
        self.turn()

    def turn(self) -> float:
        """Seconds of one copy."""
        shutil.rmtree(self._target, ignore_errors=True)
        start = time.perf_counter()
        self._target.mkdir()
        for path in sorted(self._source.glob("*.safetensors")):
            with SafetensorsFile(path) as file:
                tensors = {name: file.read(name) for name in file.places}
                entries = [
                    Entry(name, one.dtype, tuple(one.shape), one) for name, one in tensors.items()
                ]
                write_file(self._target / path.name, entries)
        return time.perf_counter() - start


def command(tree: Path, name: str, folder: Path) -> dict[str, Any]:
    """The arguments of the Command that does this conversion."""
    words, writes = CONVERSIONS[name]
    places = {one: folder / one for one in ("hf", "ours", "back", "megatron", "again")}
    tool = tree / "tools" / "convert_checkpoint.py"
    return {
        "words": [sys.executable, str(tool), *words.format(**places).split()],
        "writes": str(places[writes]),
    }


@benchmark
def convert(setup: Setup, what: str = each(*CONVERSIONS), gb: float = 2.0) -> Iterator[Case]:
    """A conversion of a Llama-style model of gb GB in bf16 by tools/convert_checkpoint.py, its
    start-up included, beside copying its safetensors. Needs 5 x gb GB of disk."""
    folder = setup.folder
    if not (folder / "hf").exists():
        shape = {"width": 64, "vocab": 64} if setup.small else {}
        make_model(folder / "hf", 1e6 if setup.small else gb * 1e9, **shape)
    for name in CONVERSIONS:  # those that make its input
        given = command(ROOT, name, folder)
        if name == what:
            break
        if name != "hf-export" and not Path(given["writes"]).exists():
            Command(**given).turn()
    sides = setup.commands(lambda tree: command(tree, what, folder))
    copying = {"source": str(folder / "hf"), "target": str(folder / "copy")}
    sides.append(Side("copying", "cases.convert:Copy", copying, ours=False))
    yield Case(what, sides, 0.001 if setup.small else gb, "GB")
