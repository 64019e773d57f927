#!/usr/bin/env python
"""Conversions by tools/convert_checkpoint.py, compared with plain copying of safetensors files:
time and peak memory.

A Llama-style model of --gb gigabytes with random bf16 weights goes through hf-import, hf-export,
megatron-export and megatron-import of torch_dist. Copying reads each tensor and writes it to a new
file, with fsync. Each conversion is one process; its peak memory is allowed to be three times the
largest tensor + 500 MB (exit code 1 where it is more). Needs five times --gb of disk in --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.checkpoint.safetensors_file import Entry, SafetensorsFile, write_file  # noqa: E402

ALLOWED = 500e6  # bytes, and three times the largest tensor
VOCAB = 32000
# ru_maxrss begins with what the parent had when it forked, so a process reads its own status; of
# its children, which it has waited for, there is nothing else
_MEASURED = """
import resource, runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
own = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(max(int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""


@dataclass(frozen=True)
class Step:
    """One conversion: seconds and bytes of memory at its peak."""

    name: str
    seconds: float
    peak: int


def make_model(folder: Path, size: float, width: int = 2048, vocab: int = VOCAB) -> int:
    """Write a Hugging Face folder of a Llama-style model of about `size` bytes, one file for each
    layer; bytes of its largest tensor."""
    ffn = 11 * width // 4
    ends = {
        "model.embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    layer = {
        **{f"self_attn.{one}_proj.weight": (width, width) for one in "qkvo"},
        **{f"mlp.{one}_proj.weight": (ffn, width) for one in ("gate", "up")},
        "mlp.down_proj.weight": (width, ffn),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    numbers = {name: torch.Size(shape).numel() for name, shape in (ends | layer).items()}
    per_layer = sum(numbers[name] for name in layer)
    layers = max(1, round((size / 2 - sum(numbers[name] for name in ends)) / per_layer))
    folder.mkdir()
    weight_map = {}
    groups = [ends]
    for number in range(layers):
        groups.append({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    for number, group in enumerate(groups):
        file = f"model-{number:05d}.safetensors"
        write_file(
            folder / file,
            [
                Entry(name, torch.bfloat16, shape, lambda shape=shape: _random(shape))
                for name, shape in group.items()
            ],
        )
        weight_map |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map}), encoding="utf-8"
    )
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "max_position_embeddings": 128,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return 2 * max(*numbers.values(), 2 * ffn * width, 3 * width * width)


def _random(shape: Sequence[int]) -> torch.Tensor:
    """Random bf16 numbers between -1 and 1, made fast."""
    bits = torch.randint(0, 1 << 16, tuple(shape), dtype=torch.int32).to(torch.int16)
    return (bits & -0x4081).view(torch.bfloat16)


def converted(name: str, *words: object) -> Step:
    """Run the converter; raises RuntimeError where it fails."""
    tool = ROOT / "tools" / "convert_checkpoint.py"
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(tool), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return Step(name, time.perf_counter() - start, int(done.stdout.split()[-1]) * 1024)


def copied(source: Path, target: Path) -> float:
    """Seconds of copying a folder's safetensors tensor by tensor."""
    start = time.perf_counter()
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        with SafetensorsFile(path) as file:
            headers = {name: file.read(name) for name in file.places}
            write_file(
                target / path.name,
                [Entry(name, one.dtype, tuple(one.shape), one) for name, one in headers.items()],
            )
    return time.perf_counter() - start


def conversions(folder: Path) -> Iterator[Step]:
    """All conversions of the model in folder/hf, each in turn; what is not needed is removed."""
    at = {name: folder / name for name in ("hf", "ours", "back", "megatron", "again")}
    yield converted("hf-import", "hf-import", at["hf"], at["ours"], "--no-verify")
    yield converted("hf-export", "hf-export", at["ours"], at["back"], "--no-verify")
    shutil.rmtree(at["back"])
    words = ("--ckpt-format", "torch_dist")
    name = "megatron-export torch_dist"
    yield converted(name, "megatron-export", at["ours"], at["megatron"], *words)
    yield converted("megatron-import torch_dist", "megatron-import", at["megatron"], at["again"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2.0, help="size of the model (default: 2)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to write")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        largest = make_model(folder / "hf", args.gb * 1e9)
        size = sum(path.stat().st_size for path in (folder / "hf").glob("*.safetensors"))
        limit = 3 * largest + ALLOWED
        copied(folder / "hf", folder / "warm")  # the files are in the page cache from here on
        shutil.rmtree(folder / "warm")
        plain = copied(folder / "hf", folder / "copy")
        shutil.rmtree(folder / "copy")
        print(
            f"{size / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, peak allowed "
            f"{limit / 1e6:.0f} MB; copying {plain:.1f} s"
        )
        over = False
        for step in conversions(folder):
            over |= step.peak > limit
            print(
                f"{step.name:28s}{step.seconds:7.1f} s = {step.seconds / plain:5.2f} x copying; "
                f"peak {step.peak / 1e6:5.0f} MB",
                flush=True,
            )
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
