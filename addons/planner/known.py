"""Layouts of published, tuned runs against the best that --search finds for the same model, GPUs
and batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron.config.command_line import CommandLine, planned
from megatron.config.plan.fit import GIB, SPARE, fullest
from megatron.config.plan.plan import make_plan

from . import points
from .machines import load
from .run_sizes import sizes
from .search import Found, flags_of, search, why_slower
from .step_time import step_seconds

TUNED = ("Megatron-Bridge", "NVIDIA/NeMo")  # whose tables show the best layout of a search by hand
MOST = 16
CLOSE = 0.05

Row = Mapping[str, str]


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Of each model and kind of GPU the tuned run on most GPUs, then the fastest. Latent attention
    and windows, of which the columns do not say all, and 4 bits are left out."""
    chosen: dict[tuple[str, str], Row] = {}
    for row in rows:
        if not any(name in row["source"] for name in TUNED) or row["model"] in points.MODELS:
            continue
        if "fp4" in row["precision"]:
            continue
        key = row["model"], row["gpu"]
        if key not in chosen or _rank(row) > _rank(chosen[key]):
            chosen[key] = row
    return sorted(chosen.values(), key=lambda row: -int(row["gpus"]))[:MOST]


def _rank(row: Row) -> tuple[int, float]:
    return int(row["gpus"]), float(row["gbs_seqs"]) * float(row["seq"]) / float(row["step_s"])


def words_of(row: Row) -> list[str]:
    """The run as flags, without its layout."""
    sizes_of = {
        "num-layers": "layers",
        "hidden-size": "hidden",
        "num-attention-heads": "heads",
        "num-query-groups": "kv_heads",
        "kv-channels": "head_dim",
        "ffn-hidden-size": "ffn",
        "vocab-size": "vocab",
        "seq-length": "seq",
        "max-position-embeddings": "seq",
        "global-batch-size": "gbs_seqs",
        "num-experts": "experts",
        "moe-router-topk": "topk",
        "moe-ffn-hidden-size": "moe_ffn",
        "moe-shared-expert-intermediate-size": "shared_ffn",
    }
    words = "--group-query-attention --tokenizer-type NullTokenizer --mock-data --bf16 --lr 1e-4"
    words += " --train-iters 1 --device cuda --disable-bias-linear --normalization RMSNorm"
    words += " --position-embedding-type rope"
    words += " --swiglu" * (row["glu"] == "1") + " --fp8-format hybrid" * (
        "fp8" in row["precision"]
    )
    words += " --untie-embeddings-and-output-weights" * (row.get("tied") != "1")
    for flag, column in sizes_of.items():
        if row.get(column) not in ("", "0", None):
            words += f" --{flag} {row[column]}"
    return words.split()


def _published(row: Row, words: Sequence[str], gpus: int) -> tuple[Found | None, str]:
    """The row's layout as --search would give it, and why this suite cannot run it or does not fit
    it."""
    run = points.runs([row])
    names = ("tp", "pp", "cp", "dp", "micro", "vpp", "ep", "zero", "again")
    layout = {name: int(getattr(run, name)[0]) for name in names}
    chunks, layers = layout["pp"] * layout["vpp"], int(row["layers"])
    layout["balanced"] = 3 if layers % chunks and (layers + 2) % chunks == 0 else 0
    flags = flags_of({**layout, "etp": 1 if row["experts"] else layout["tp"]})
    tried, problems = planned([*words, *flags], gpus)
    if problems:
        return None, f"refused here: {problems[0].splitlines()[0]}"
    machine = load(points.machine_of(row))
    plan = make_plan(tried.config, gpus, int(row["vocab"]))
    seconds = step_seconds(machine.constants, sizes(tried.config, plan, machine))
    memory = fullest(tried.config, plan)
    reason = ""
    if memory.total > machine.facts["memory_gib"] * GIB * (1 - SPARE):
        reason = f"{memory.total / GIB:.0f} GiB do not fit here, "
    return Found(tuple(flags), {kind: float(s) for kind, s in seconds.items()}, memory), reason


def table(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each published layout, then how many are close."""
    close = count = 0
    yield "published layouts against the best that --search finds (this suite's predicted steps):"
    for row in best_rows(rows):
        gpus, words = int(row["gpus"]), words_of(row)
        name = f"{row['model']} on {gpus} {row['gpu']}, {row['precision']}"
        line: CommandLine = planned([*words, "--micro-batch-size", "1"], gpus)[0]
        count += 1
        published, reason = _published(row, words, gpus)
        try:
            machine = load(points.machine_of(row))
            best = search(line, words, machine, int(row["vocab"]), 1)[0][0]
        except ValueError as error:
            yield f"  {name}: {reason}{error}"
            continue
        text = f"best {best.step:.3f} s ({' '.join(best.flags)})"
        if published is None:
            yield f"  {name}: {text}; published {reason}"
            continue
        loss = published.step / best.step - 1
        close += loss <= CLOSE
        why = f"{reason}{why_slower(best, published)}" if loss > CLOSE or reason else "close"
        yield f"  {name}: published {loss:+.1%} ({' '.join(published.flags)}); {text}: {why}"
    yield f"{close} of {count} published layouts are within {CLOSE:.0%} of the best"
