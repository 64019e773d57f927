"""The six steps of first_light.sh: each returns its results, or raises Failed with them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import xml.etree.ElementTree as ElementTree
from typing import Any

from session import FOLDER, ROOT, Failed, Session, problems_of
from sizes import TOLERANCE

NEXT_PROCESS = 3  # exit code of one_process.py that leaves the next contestants to another one
LOSS_TOLERANCE = 1e-3  # relative, fp32 on the device and on the CPU
GPT = "tiny:layers=2,hidden=32,heads=2,seq=16,micro_batch=2,vocab=64"
LLAMA = "tiny_llama:layers=2,hidden=32,heads=2,seq=16,micro_batch=2,vocab=64,family=llama,ffn=48"
GPT_124M = "gpt124m:micro_batch=32,micro_batches=4"
LLAMA_1B = (
    "llama1b:layers=16,hidden=2048,heads=16,seq=2048,micro_batch=8,micro_batches=2,vocab=32000,"
    "family=llama,ffn=5632"
)
GPT_1B = "1.3b:seq=1024,micro_batch=8,micro_batches=4"
SIZES = {"cpu": (GPT, LLAMA), "cuda": (GPT_124M, LLAMA_1B, GPT_1B)}
CONTESTANTS = ("ours", "ours-compiled", "bare-compiled")  # the slowest to compile is the last
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
LLAMA_FLAGS = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)


def probe(session: Session) -> dict[str, Any]:
    """Step 1: what the device and its libraries do."""
    file = session.folder / "probe.json"
    problems = problems_of(session.run(probe=[FOLDER / "probe.py", session.device, file]))
    facts = json.loads(file.read_text()) if file.exists() else {}
    if problems:
        raise Failed(problems, facts)
    return facts


def pytest_words(session: Session, name: str, *words: object) -> list[object]:
    """The command of GPU tests; on a CPU their bodies run there."""
    command = ["-m", "pytest", "-q", "--maxfail=20", "-p", "no:cacheprovider", "-m", "gpu", *words]
    command += [f"--junitxml={session.folder / name}.xml"]
    processes = min(4, (os.cpu_count() or 1) // 4)
    if session.small:
        command += ["-p", "gpu_tests_on_cpu"]
    elif processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-p", "xdist.plugin", "-n", processes]
    return command


def tests(session: Session, name: str, *words: object) -> dict[str, Any]:
    """Run tests; how many passed, failed and were skipped, and which failed."""
    processes = session.run(**{name: pytest_words(session, name, *words)})
    problems = problems_of(processes)
    facts: dict[str, Any] = {"passed": 0, "failed": [], "skipped": 0}
    report = session.folder / f"{name}.xml"
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            facts["failed"].append(case.get("name"))
        else:
            facts["skipped" if "skipped" in kinds else "passed"] += 1
    if not facts["passed"] and not problems:
        problems = ["no test ran"]
    if problems:
        raise Failed([*problems, *facts["failed"]], facts)
    return facts


def kernels(session: Session) -> dict[str, Any]:
    """Step 2: every kernel and model, eager, against float64 on the CPU."""
    files = sorted(
        (ROOT / "tests").rglob("test_own_on_gpu*.py" if session.small else "test_*on_gpu*.py")
    )
    return tests(session, "kernels", *files, "-k", "not (test_a_model and True)")


def compiled(session: Session) -> dict[str, Any]:
    """Step 6: models through torch.compile, in bf16, against float64 on the CPU."""
    file = ROOT / "tests" / "core" / "kernels" / "test_own_on_gpu.py"
    return tests(session, "compiled", file, "-k", "test_a_model and True and dtype0")


def pretrain(session: Session, name: str, flags: str, device: str = "") -> list[object]:
    """The command of a tiny run, which writes its losses to NAME.jsonl."""
    layers, width, length, iterations = (2, 64, 32, 4) if session.small else (4, 256, 256, 20)
    words = (
        f"--num-layers {layers} --hidden-size {width} --num-attention-heads 4 --seq-length "
        f"{length} --max-position-embeddings {length} --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size 1000 --micro-batch-size 4 --global-batch-size 8 --train-iters {iterations} "
        f"--eval-iters 0 --lr 1e-3 --log-interval 1 {flags} --device {device or session.device}"
    )
    return ["pretrain_gpt.py", *words.split(), "--metrics-file", session.folder / f"{name}.jsonl"]


def losses(session: Session, name: str) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by iteration of a tiny run."""
    file = session.folder / f"{name}.jsonl"
    if not file.exists():
        return {}
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {row["iteration"]: (row["lm_loss"], row["grad_norm"]) for row in rows}


def program(session: Session) -> dict[str, Any]:
    """Step 3: a tiny GPT and Llama on the CPU and on the device in fp32, losses compared; then what
    a user would type, bf16 with default dropouts and document masks."""
    flags = {"gpt": NO_DROPOUT, "llama": f"{NO_DROPOUT} {LLAMA_FLAGS}"}
    runs = {
        f"{family}_{where}": (words, device)
        for family, words in flags.items()
        for where, device in (("cpu", "cpu"), ("device", session.device))
    }
    runs["bf16"] = f"{LLAMA_FLAGS} --bf16 --reset-attention-mask", session.device
    done = session.run(**{name: pretrain(session, name, *run) for name, run in runs.items()})
    problems = problems_of(done)
    facts: dict[str, Any] = {}
    for family in flags:
        on_device, on_cpu = (losses(session, f"{family}_{where}") for where in ("device", "cpu"))
        both = sorted(on_device.keys() & on_cpu.keys())
        apart = max((abs(on_device[i][0] / on_cpu[i][0] - 1) for i in both), default=None)
        facts[family] = {"iterations": len(both), "largest difference": apart}
        if apart is None or not apart <= LOSS_TOLERANCE:
            problems.append(f"{family}: the losses of CPU and device differ by {apart}")
    values = [loss for loss, _ in losses(session, "bf16").values()]
    facts["bf16"] = {"losses": values}
    if not values or not all(map(math.isfinite, values)):
        problems.append("bf16: no losses, or not all are finite")
    if problems:
        raise Failed(problems, facts)
    return facts


def resume(session: Session) -> dict[str, Any]:
    """Step 5: save in the middle, resume, and compare every bit with the run that did not stop."""
    flags = "--bf16 --deterministic-mode"  # with the default dropouts
    half = 2 if session.small else 10
    saved = f"{flags} --save {session.folder / 'saved'} --load {session.folder / 'saved'}"
    saved += f" --save-interval {half}"
    done = session.run(
        straight=pretrain(session, "straight", flags),
        first=pretrain(session, "first", f"{saved} --exit-interval {half}"),
    )
    done |= session.run(second=pretrain(session, "second", saved))
    problems = problems_of(done)
    straight, first, second = (losses(session, name) for name in ("straight", "first", "second"))
    different = [i for i, value in straight.items() if (first | second).get(i) != value]
    if min(second, default=0) != half + 1 or not straight:
        problems.append(f"the second run did not resume at iteration {half + 1}")
    if different:
        problems.append(f"iteration {different[0]} is another one after the resume")
    facts = {"iterations": len(straight), "different": different}
    if problems:
        raise Failed(problems, facts)
    return facts


def bench(session: Session) -> dict[str, Any]:
    """Step 4: the training step of each contestant, in one process while that goes well."""
    file = session.folder / "cells.jsonl"
    rows: list[dict[str, Any]] = []
    remaining = [f"{who}@{size}" for who in CONTESTANTS for size in SIZES[session.device]]
    steps = 2 if session.small else 6
    attempt = 0
    read = 0  # lines of the file
    while remaining:
        attempt += 1
        words = [FOLDER / "one_process.py", session.device, session.folder, steps, *remaining]
        process = session.run(**{f"bench{attempt}": words})[f"bench{attempt}"]
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        new = [json.loads(line) for line in lines[read:]]
        read = len(lines)
        after = remaining[len(new) :]
        if process.code is None:
            new += [{"cell": cell, "error": "not measured: out of time"} for cell in after]
        elif after and (process.code != NEXT_PROCESS or not new):
            new.append({"cell": after[0], "error": f"its process died: {process.ending}"})
        rows += new
        remaining = remaining[len(new) :]
    compare_losses(rows)
    problems = [f"{short(row['cell'])}: {row['error']}" for row in rows if "error" in row]
    if problems:
        raise Failed(problems, {"rows": rows})
    return {"rows": rows}


def compare_losses(rows: list[dict[str, Any]]) -> None:
    """An error for each row whose losses are not those of ours, of the same size."""
    expected = {}
    for row in rows:
        name, _, size = row["cell"].partition("@")
        if "losses" not in row:
            continue
        if name == "ours":
            expected[size] = row["losses"]
        for loss, right in zip(row["losses"], expected.get(size, ()), strict=False):
            if not abs(loss - right) <= TOLERANCE["bf16"] * abs(right):
                row["error"] = f"loss {loss:.4f} where that of ours is {right:.4f}"


def short(cell: str) -> str:
    """The name of a contestant and of its size."""
    name, _, size = cell.partition("@")
    return f"{size.partition(':')[0]} {name}"
