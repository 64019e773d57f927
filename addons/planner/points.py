"""Tables of measured runs, and what is known or assumed of the published ones' systems."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.small_files import read_text

from . import nanotron
from .machines import load
from .step_time import Runs

# What a row's `gpu` means: a machine file. Rows of others are left out, and counted.
MACHINES = {
    "A100": "a100-80gb",
    "A100-40GB": "a100-40gb",
    "A800": "a800-80gb",
    "H100": "h100",
    "H100-96GB-500W": "h100-500w",
    "H200": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI300X": "mi300x",
}
# Models whose columns do not say all: (first dense layers, ranks of queries and of keys and values,
# widths of query and value heads, window of every second layer).
MODELS = {
    "DeepSeek-V3": {
        "dense_layers": 3,
        "q_rank": 1536,
        "kv_rank": 512,
        "head_dim": 192,
        "value_dim": 128,
    },
    "Kimi-K2": {
        "dense_layers": 1,
        "q_rank": 1536,
        "kv_rank": 512,
        "head_dim": 192,
        "value_dim": 128,
    },
    "GPT-OSS-120B": {"window": 128},
}


@dataclass(frozen=True)
class System:
    """A source's cluster and program. It states the network (bytes a second of a GPU's share) and
    GPUs a node; the rest, as `Runs` has it, was set by hand with its rows in view."""

    pattern: str
    network: float | None = None
    node: int | None = None
    eager: float = 1.0
    flash: float = 1
    hides: float = 0.0
    host: float = 1.0
    grad_bytes: float = 4
    balanced: float = 0
    messages: float = 1.0
    stall: float = 0.0
    behind: tuple[float, float] = (-1.0, -1.0)  # without ZeRO, and with ZeRO 1
    year: float = 2026.0


SYSTEMS = (
    System("llm-foundry", network=25e9, eager=0.8, host=0.5, grad_bytes=2),
    # EFA; DDP's hooks sum its gradients behind backward, with ZeRO 1 they are summed after it
    System(
        "ultrascale",
        network=35e9,
        balanced=2,
        hides=0.4,
        messages=3,
        host=1.3,
        stall=2.4e-3,
        behind=(0.8, 0),
    ),
    System("InternEvo", network=6.25e9, eager=0.8, host=0.5, grad_bytes=2, messages=9),
    System("fms-fsdp", network=6.25e9, eager=0.6, host=0.3, grad_bytes=2),
    System("KempnerForge", node=4, eager=0.6, host=0.3, grad_bytes=2),
    System("torchtitan", eager=1.0, host=0.5),
    System("NVIDIA/NeMo", flash=0, eager=0.6, hides=0.6, host=0.3, balanced=1, messages=0.2),
    *(
        System(
            f"[{edition}]",
            flash=0,
            eager=0.6,
            hides=0.6,
            host=0.2,
            grad_bytes=2,
            balanced=1,
            messages=0.2,
            year=2000 + float(edition[:2]) + (float(edition[3:5]) - 0.5) / 12,
        )
        for edition in (
            "25.09",
            "25.11",
            "26.02",
            "26.02.01",
            "26.04",
            "26.04.01",
            "26.06",
            "26.06.01",
            "26.08",
        )
    ),
    System("Automodel", flash=0, eager=0.6, host=0.3, balanced=1, messages=0.2),
    System(
        "Megatron-MoE",
        flash=0,
        eager=0.6,
        hides=0.3,
        host=0.3,
        balanced=1,
        messages=0.2,
        year=2025.7,
    ),
)
PRECISIONS = (("nvfp4", 2), ("fp8", 1))
NEEDED = ("source", "model", "gpu", "layers", "hidden", "heads", "seq", "gbs_seqs", "step_s")


def read(path: str) -> list[dict[str, str]]:
    """The rows of a table with tabs. Raises ValueError where columns are missing."""
    rows = list(csv.DictReader(read_text(path).splitlines(), delimiter="\t"))
    missing = [name for name in NEEDED if not rows or name not in rows[0]]
    if missing:
        raise ValueError(
            f"--evaluate {path}: no column {', '.join(missing)}; it must be a table with tabs and "
            "a line of titles (addons/planner/planner.md) [points-malformed]"
        )
    return rows


def system_of(row: Mapping[str, str]) -> System:
    """What is known of a row's source."""
    return next((s for s in SYSTEMS if s.pattern in row["source"]), System(""))


def _number(row: Mapping[str, str], name: str, default: float = 0) -> float:
    text = row.get(name) or ""
    return float(text) if re.fullmatch(r"[0-9]+[.]?[0-9]*", text) else default


def unusable(row: Mapping[str, str]) -> str | None:
    """Why a row cannot be compared."""
    if row["gpu"] not in MACHINES:
        return f"no machine file for {row['gpu']}"
    absent = [name for name in ("step_s", "gbs_seqs") if not _number(row, name)]
    return f"no {' and '.join(absent)}" if absent else None


def machine_of(row: Mapping[str, str]) -> str:
    """The name of its machine's file."""
    return MACHINES[row["gpu"]]


def _zero(text: str) -> int:
    if "zero2" in text:
        return 2
    if "fsdp" in text or "hsdp" in text or "zero3" in text:
        return 3
    return int("zero1" in text)


def _one(row: Mapping[str, str]) -> dict[str, float]:
    """The fields of `Runs` of a row."""

    def n(name: str, default: float = 0.0) -> float:
        return _number(row, name, default)

    system = system_of(row)
    machine = load(machine_of(row)).facts
    known = dict(MODELS.get(row["model"], {}))
    keys = n("seq") / 2
    if window := known.pop("window", 0):
        keys = (keys + min(window, keys)) / 2
    node = system.node or machine["node"]
    sharing, notes = row["zero_fsdp"], row["notes"]
    shard = n("dp", 1) * n("cp", 1)
    if match := re.search(r"in node \((\d+)\)", sharing):
        shard = float(match[1])
    elif "hsdp" in sharing:
        shard = node
    again = {"full": 1.0, "sele": 0.25}.get(row["recompute"][:4], 0.0)
    micro = n("mbs", 1)
    if "torchtitan" in row["source"] and n("pp", 1) > 1:
        micro = 1  # the source's batch of a rank, which is cut for the pipeline
    network = machine["network_bytes"] if system.network is None else system.network
    if "llm-foundry" in row["source"] and row["gpu"] == "H100":
        network = machine["network_bytes"]
    if match := re.search(r"(\d+) Gb/s", notes):  # of a node
        network = float(match[1]) * 1e9 / 8 / node
    ep = n("ep", 1)
    if n("experts") and ep == 1 and _zero(sharing) >= 3:
        ep = float(np.gcd(int(n("experts")), int(n("dp", 1))))  # not stated: no rank has all
    compiled = "ompile" in notes and "off" not in notes
    return {
        "layers": n("layers"),
        "hidden": n("hidden"),
        "heads": n("heads"),
        "groups": n("kv_heads", n("heads")),
        "head_dim": n("head_dim", 128),
        "value_dim": n("head_dim", 128),
        "ffn": n("ffn"),
        "gated": n("glu"),
        "vocab": n("vocab"),
        "tied": n("tied"),
        "experts": n("experts"),
        "topk": n("topk"),
        "moe_ffn": n("moe_ffn"),
        "shared_ffn": n("shared_ffn"),
        "dense_layers": 0,
        "q_rank": 0,
        "kv_rank": 0,
        "seq": n("seq"),
        "keys": keys,
        "batch": n("gbs_seqs"),
        "micro": micro,
        "tp": n("tp", 1),
        "pp": n("pp", 1),
        "vpp": n("vpp", 1),
        "cp": n("cp", 1),
        "ep": ep,
        "dp": n("dp", 1),
        "zero": _zero(sharing),
        "shard": shard,
        "again": again,
        "precision": next((bits for name, bits in PRECISIONS if name in row["precision"]), 0),
        "node": node,
        "network": network,
        "hides": 0.6 if "async TP" in notes else system.hides,
        "behind": system.behind[min(_zero(sharing), 1)],
        "eager": min(0.6, system.eager) if compiled else system.eager,
        **{
            name: getattr(system, name)
            for name in ("flash", "host", "grad_bytes", "balanced", "messages", "stall", "year")
        },
        **known,
    }


def runs(rows: Sequence[Mapping[str, str]]) -> Runs:
    """The rows as arrays."""
    each = [_one(row) for row in rows]
    columns = {name: np.array([row[name] for row in each], float) for name in each[0]}
    columns["precision"] = columns["precision"].astype(int)
    found = Runs(**columns)
    known = np.array(["nanotron" in row["source"] for row in rows])
    return replace(found, polls=nanotron.POLL * (known & nanotron.later(found)))
