"""Whole training steps, of one process and of parallel layouts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from harness import Case, Setup, Side, benchmark, each
from sizes import TOLERANCE, parse_size

TRAINING = "training:Training"
SMALL = "tiny:layers=1,hidden=32,heads=2,seq=16,micro_batch=2,vocab=64"
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
) -> Iterator[Case]:
    """A step of pretrain_gpt.py, data and log line included; peers: a bare torch loop (bare),
    transformers' model in it, on a CPU each with its fastest setting of threads. compiled=1: all by
    torch.compile; flags: of pretrain_gpt.py, for ours."""
    shape = parse_size(SMALL if setup.small else size)
    start = str(setup.folder / f"{shape.name}-{dtype}.pt")
    common: dict[str, Any] = {"size": asdict(shape), "dtype": dtype, "device": setup.device}
    common |= {"compiled": bool(compiled), "warmup": 2 if setup.device == "cpu" else 5}
    suite = {"kind": "ours", "flags": shlex.split(flags), **common}
    sides = setup.ours("ours", TRAINING, suite, prepare=("save_start", start))
    for name, needs in (("bare", ""), ("transformers", "transformers")):
        peer = {"kind": name, "start": start, **common}
        sides += setup.peer(name, needs, TRAINING, peer, settings=setup.settings)
    together = setup.device == "cpu"
    yield Case(f"{shape.name} {dtype}", sides, shape.tokens, "tokens", TOLERANCE[dtype], together)


@benchmark
def layouts(
    setup: Setup,
    layout: str = each(*LAYOUTS),
    size: str = LAYOUT_SIZE,
    dtype: str = "fp32",
    flags: str = "",
) -> Iterator[Case]:
    """A step of two ranks of one thread beside that of one rank and of two independent runs (two
    apart: what two cores can give); layout='NAME=RANKS FLAGS'. Peer: megatron-core's model, tensor
    parallel (sizes with family=llama, fp32)."""
    shape = parse_size(SMALL + ",family=llama,micro_batches=2" if setup.small else size)
    name, _, sizes = layout.partition("=")
    ranks, *words = shlex.split(sizes)
    common = {"size": asdict(shape), "dtype": dtype}
    suite = {"kind": "ours", **common}
    side = {**suite, "flags": [*words, *shlex.split(flags)]}
    single = {**suite, "flags": shlex.split(flags)}
    sides = setup.ours(name, TRAINING, side, ranks=int(ranks), threads=1)
    sides.append(Side("one rank", TRAINING, single, threads=1))
    sides.append(Side("two apart", TRAINING, single, threads=1, ranks=2, apart=True))
    if name == "tp2" and shape.family == "llama" and dtype == "fp32":
        peer = {"kind": "megatron-core", "agrees": False, **common}  # its own first weights
        for title, count in (("megatron-core tp2", 2), ("megatron-core one rank", 1)):
            more = {"ranks": count, "threads": 1}
            sides += setup.peer(title, "megatron.core", TRAINING, peer, **more)
    yield Case(name, sides, shape.tokens, "tokens", TOLERANCE[dtype])
