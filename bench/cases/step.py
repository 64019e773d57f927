"""Whole training steps, of one process and of parallel layouts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from harness import Case, Setup, Side, benchmark, each
from sizes import SMALL, TOLERANCE, parse_size

TRAINING = "training:Training"
LAYOUT_SIZE = (
    "peers:layers=4,hidden=256,heads=4,ffn=688,seq=256,micro_batch=4,micro_batches=4,"
    "vocab=50304,family=llama"
)
LAYOUTS = (
    "tp2=2 --tensor-model-parallel-size 2",
    "tp2+sp=2 --tensor-model-parallel-size 2 --sequence-parallel",
    "dp2=2",
    "pp2=2 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1",
)


@benchmark
def step(
    setup: Setup,
    size: str = each("nano", "gpt10m", "llama30m", "gpt124m"),
    dtype: str = each("fp32", "bf16"),
    compiled: int = 0,
    flags: str = "",
    threads: int = 0,
) -> Iterator[Case]:
    """A step of pretrain_gpt.py, data and log line included; peers: a bare torch loop (bare),
    transformers' model in it, on a CPU each with its fastest setting of threads. compiled=1: all by
    torch.compile; flags: of pretrain_gpt.py, for ours; threads: of each side (0: all cores)."""
    shape = parse_size(SMALL if setup.small else size)
    together = setup.device == "cpu"
    common: dict[str, Any] = {"size": asdict(shape), "dtype": dtype, "device": setup.device}
    common |= {"compiled": bool(compiled), "warmup": 2 if together else 5}
    common["start"] = str(setup.folder / f"{shape.name}-{dtype}.pt")
    ours = {"kind": "ours", "flags": shlex.split(flags), **common}
    sides = setup.ours(TRAINING, lambda tree: ours, threads=threads or None)
    settings = setup.settings if threads != 1 else ("",)
    peers = {"bare": "", "transformers": "transformers"}
    if shape.window or shape.family == "deepseek":
        del peers["bare"]  # it has neither
    for name, needs in peers.items():
        peer = {"kind": name, **common}
        more = {"settings": settings, "threads": threads or None}
        sides += setup.peer(name, needs, TRAINING, peer, **more)
    yield Case(f"{shape.name} {dtype}", sides, shape.tokens, "tokens", TOLERANCE[dtype], together)


@benchmark
def layouts(
    setup: Setup,
    layout: str = each(*LAYOUTS),
    size: str = LAYOUT_SIZE,
    dtype: str = "fp32",
    flags: str = "",
) -> Iterator[Case]:
    """A step of two ranks of one thread beside that of one rank; layout='NAME=RANKS FLAGS'."""
    shape = parse_size(SMALL + ",family=llama,micro_batches=2" if setup.small else size)
    name, _, sizes = layout.partition("=")
    ranks, *words = shlex.split(sizes)
    single = {"kind": "ours", "size": asdict(shape), "dtype": dtype, "flags": shlex.split(flags)}
    several = {**single, "flags": [*words, *single["flags"]]}
    sides = setup.ours(TRAINING, lambda tree: several, name, ranks=int(ranks), threads=1)
    sides.append(Side("one rank", TRAINING, single, threads=1, waiting=True))
    yield Case(name, sides, shape.tokens, "tokens", TOLERANCE[dtype])
