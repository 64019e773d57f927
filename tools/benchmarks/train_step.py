#!/usr/bin/env python
"""Race whole training steps: ours against a bare torch loop, transformers, and the ceiling of products and attention.

Contestants take turns step by step in one process, on the same samples and from the same weights; before any clock runs
their losses must agree. On CUDA the default is our step alone over GPT sizes, with its MFU. docs/performance.md says how
to read the table. Needs torch and numpy; transformers takes part if it is installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as pretrain_gpt.py does

import step_profile  # noqa: E402
import torch  # noqa: E402
from bare_model import megatron_to_bare  # noqa: E402
from ceiling import Ceiling, faster_dtype, matmul_rate, peak_of  # noqa: E402
from contestants import Ours, bare, huggingface, transformers  # noqa: E402
from sizes import CPU_SIZES, CUDA_SIZES, Size, parse_size  # noqa: E402

from megatron import device as devices  # noqa: E402
from megatron.kernels.linear import low_precision_is_native  # noqa: E402
from megatron.training import flops  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}       # of losses in the warm-up steps, relative
CEILING_ROUNDS = 3
OURS, COMPILED, BARE, HUGGINGFACE = "ours", "ours, compiled", "bare torch loop", "transformers"


class Disagreement(ValueError):
    """Two contestants do not train the same model."""


@dataclass
class Race:
    """What one size in one number format gave: seconds of every timed step by contestant, and what they are held to."""
    size: Size
    dtype: str
    parameters: int
    flops_per_step: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    ceiling_seconds: tuple[float, float] | None = None      # products, attention
    ceiling_dtype: str = ""
    memory_bytes: float | None = None
    profile: dict[str, float] | None = None                 # seconds by kind of work

    def ratio(self, other: str, mine: str) -> float | None:
        """How many times as fast as `other` is `mine`: the median over the rounds that ran both."""
        if other not in self.seconds or mine not in self.seconds:
            return None
        return statistics.median(a / b for a, b in zip(self.seconds[other], self.seconds[mine], strict=False))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(usage="%(prog)s [OPTION ...]", description=__doc__, allow_abbrev=False)
    parser.add_argument("--size", action="append", type=_size, metavar="SIZE",
                        help="a size by name, with changes (gpt10m:seq=128), or a new one (name:layers=2,hidden=64,...); "
                             "may be repeated (default: the three CPU sizes, on CUDA 125m to 6.7b)")
    parser.add_argument("--dtype", action="append", choices=tuple(DTYPES), help="may be repeated (default: fp32 and "
                                                                                "bf16; on CUDA bf16)")
    parser.add_argument("--contestants", nargs="+", choices=("bare", "transformers", "ceiling"), metavar="NAME",
                        help="besides ours: bare, transformers, ceiling (default: all three; on CUDA none)")
    parser.add_argument("--alone", action="store_true", help="only ours")
    parser.add_argument("--torch-compile", action="store_true", help="our step with --torch-compile takes part too")
    parser.add_argument("--profile", action="store_true", help="on a CPU: where the time of our step goes, by torch's "
                                                               "profiler, in steps after the race")
    parser.add_argument("--rounds", type=_count, help="timed steps of each contestant (default: 7; on CUDA 20; 1 for bf16 "
                                                      "of the others on a CPU that emulates it)")
    parser.add_argument("--warmup", type=_count, help="steps before, whose losses are compared (default: 2; on CUDA 5)")
    parser.add_argument("--minutes", type=float, help="for everything; rounds are left out to keep it (default: no "
                                                      "limit; on CUDA 9)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: processor time of this process, for a machine that others use too; take --threads 1")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if any")
    parser.add_argument("--peak-tflops", type=float, help="peak of the device for MFU (default: by its name)")
    parser.add_argument("--json", metavar="FILE", type=_writable, help="write all figures there")
    return parser


def _size(text: str) -> Size:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps, 1 or more")
    return int(text)


def _writable(text: str) -> Path:
    """That path; noticed before the race and not after it where it cannot be written."""
    try:
        open(text, "a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return Path(text)


def make_clock(kind: str, device: torch.device) -> Callable[[], float]:
    """Seconds now: of the wall once the device is done, or of this process's processor time."""
    if kind == "cpu":
        return time.process_time

    def wall() -> float:
        devices.synchronize(device)
        return time.perf_counter()

    return wall


def field_of(options: argparse.Namespace, size: Size, dtype: str, steps: int) -> tuple[Ours, dict[str, Any]]:
    """Our contestant, and all of them by name, with the same weights and the same samples of so many steps."""
    device = options.torch_device
    ours = Ours(size, dtype, device.type)
    racers: dict[str, Any] = {OURS: ours}
    if "bare" in options.contestants or "transformers" in options.contestants:
        weights, samples = megatron_to_bare(ours.weights(), size.heads), ours.first_samples(steps)
        if "bare" in options.contestants:
            racers[BARE] = bare(size, dtype, device, weights, samples)
        if "transformers" in options.contestants:
            racers[HUGGINGFACE] = huggingface(size, dtype, device, weights, samples)
    if options.torch_compile:
        racers[COMPILED] = Ours(size, dtype, device.type, ["--torch-compile"])
    return ours, racers


def warm_up(racers: dict[str, Any], steps: int, dtype: str, tell: Callable[[str], None]) -> None:
    """The first steps of every contestant. Raises Disagreement where a loss is not ours."""
    for step in range(1, steps + 1):
        losses = {}
        for name, racer in racers.items():
            tell(f"warm-up step {step}/{steps}: {name}")
            losses[name] = racer.step()
        for name, loss in losses.items():
            if not abs(loss - losses[OURS]) <= TOLERANCE[dtype] * abs(losses[OURS]):
                raise Disagreement(f"step {step}: the loss of {name} is {loss:.6f}, ours is {losses[OURS]:.6f}: they do "
                                   f"not train the same model, so their times say nothing")


def rounds_of(options: argparse.Namespace, racers: dict[str, Any], dtype: str) -> dict[str, int]:
    """Rounds of each contestant: of those that a CPU without bf16 makes slow fewer, unless --rounds says it; ours is not."""
    if options.typed_rounds or low_precision_is_native(options.torch_device.type, DTYPES[dtype]):
        return dict.fromkeys(racers, options.rounds)
    slow = [name for name in racers if name in (BARE, HUGGINGFACE)]
    if slow:
        print(f"\nthis CPU emulates {dtype}, a step may take minutes: 1 round of {' and '.join(slow)} "
              f"(--rounds N: N of all)", flush=True)
    return dict.fromkeys(racers, options.rounds) | dict.fromkeys(slow, 1)


def race(options: argparse.Namespace, size: Size, dtype: str, deadline: float, tell: Callable[[str], None]) -> Race:
    """Build, warm up, then let the contestants take turns; the order moves on by one every round."""
    device = options.torch_device
    clock = make_clock(options.clock, device)
    devices.release_memory(device)
    ours, racers = field_of(options, size, dtype, options.warmup + options.rounds)
    result = Race(size, dtype, ours.run.plan.num_parameters,
                  flops.flops_per_iteration(ours.shape, size.micro_batch * size.micro_batches))
    names, rounds = list(racers), rounds_of(options, racers, dtype)
    warm_up(racers, options.warmup, dtype, tell)
    ceiling = Ceiling(size, DTYPES[dtype], device, clock) if "ceiling" in options.contestants else None
    for done in range(options.rounds):
        if done and time.monotonic() > deadline:
            break
        tell(f"round {done + 1}/{options.rounds}")
        for name in names[done % len(names):] + names[:done % len(names)]:
            if done >= rounds[name]:
                continue
            start = clock()
            loss = racers[name].step()
            result.seconds.setdefault(name, []).append(clock() - start)
            result.losses.setdefault(name, []).append(loss)
        if ceiling is not None and done < CEILING_ROUNDS:
            ceiling.measure()
    if ceiling is not None:
        result.ceiling_seconds, result.ceiling_dtype = ceiling.seconds(), str(ceiling.dtype).removeprefix("torch.")
    if options.profile:
        tell("profile")
        result.profile = step_profile.profiled(ours.step, ours.run.optimizer)
    if len(names) == 1:
        result.memory_bytes = devices.memory_report(device).get("max allocated")
    return result


def heading(result: Race) -> str:
    """What was raced."""
    s = result.size
    rounds = len(result.seconds[OURS])
    fewer = ", ".join(f"{name} {len(values)}" for name, values in result.seconds.items() if len(values) < rounds)
    return (f"{s.name} {result.dtype}: {s.family}, {s.layers} layers, hidden {s.hidden}, ffn {s.ffn_size}, {s.heads} "
            f"heads, sequence {s.seq}, vocabulary {s.vocab}, {result.parameters / 1e6:.1f}M parameters; "
            f"{s.micro_batches} x {s.micro_batch} samples = {s.tokens} tokens a step; {rounds} rounds"
            + f" ({fewer})" * bool(fewer))


def table(result: Race, rate: float, peak: float | None) -> list[str]:
    """The rows of one race. `rate`: of a large matrix product, `peak`: of the device, TFLOP/s."""
    columns = ("", "step ms", "best ms", "tok/s", "best tok/s", "x bare", "x transf.", "of ceiling", "TFLOP/s",
               "of matmul", "MFU")
    rows = [columns]
    for name, seconds in result.seconds.items():
        middle, best = statistics.median(seconds), min(seconds)
        speed = result.flops_per_step / middle / 1e12
        ceiling = None if result.ceiling_seconds is None else sum(result.ceiling_seconds) / best
        tokens = result.size.tokens
        rows.append((name, f"{1e3 * middle:.1f}", f"{1e3 * best:.1f}", f"{tokens / middle:.0f}", f"{tokens / best:.0f}",
                     _times(result.ratio(BARE, name)), _times(result.ratio(HUGGINGFACE, name)), _percent(ceiling),
                     f"{speed:.3f}", _percent(speed / rate), _percent(speed / peak if peak else None)))
    if result.ceiling_seconds is not None:
        gemm, attention = result.ceiling_seconds
        both = gemm + attention
        tokens = f"{result.size.tokens / both:.0f}"
        note = f"products {1e3 * gemm:.1f} ms and attention {1e3 * attention:.1f} ms in {result.ceiling_dtype}"
        rows.append(("ceiling", "", f"{1e3 * both:.1f}", "", tokens, "", "", note, "", "", ""))
    used = [i for i in range(len(columns)) if any(row[i] for row in rows[1:])]
    width = {i: max(len(row[i]) for row in rows if row[0] != "ceiling" or i < 7) for i in used}
    return ["  " + "  ".join(row[i].ljust(width[i]) if i == 0 else row[i].rjust(width[i]) for i in used).rstrip()
            for row in rows]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Where, when and how the figures were measured."""
    device = options.torch_device
    where = devices.name(device) if device.type == "cuda" else f"{cpu_name()}, {os.cpu_count()} cores"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"date": time.strftime("%Y-%m-%d %H:%M"), "device": where, "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads(),
            "clock": options.clock, "load_average": load, "transformers": getattr(transformers, "__version__", None)}


def settle(options: argparse.Namespace) -> None:
    """Fill in what was not typed; it depends on the device."""
    options.torch_device = devices.choose_device(options.device, 0)
    cuda = options.torch_device.type == "cuda"
    if options.threads:
        torch.set_num_threads(options.threads)
    options.size = options.size or list(CUDA_SIZES if cuda else CPU_SIZES)
    options.dtype = options.dtype or (["bf16"] if cuda else ["fp32", "bf16"])
    options.typed_rounds, options.rounds = options.rounds, options.rounds or (20 if cuda else 7)
    options.warmup = options.warmup or (5 if cuda else 2)
    options.minutes = options.minutes or (9.0 if cuda else None)
    if options.contestants is None:
        options.contestants = [] if cuda else ["bare", "transformers", "ceiling"]
    if options.alone:
        options.contestants = []
    if options.profile and cuda:
        raise SystemExit("error: --profile: counts the operations of a CPU; give --device cpu, or use nsys on CUDA")
    if "transformers" in options.contestants and transformers is None:
        print("transformers is not installed: it does not take part")
        options.contestants = [name for name in options.contestants if name != "transformers"]


def _teller() -> Callable[[str], None]:
    """Says on a terminal what is running now; the last words are wiped by the next ones."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run every size in every number format; 1 if contestants disagree."""
    options = build_parser().parse_args(argv)
    settle(options)
    device, tell = options.torch_device, _teller()
    place = machine(options)
    print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in place.items() if value is not None), flush=True)
    pairs = [(size, dtype) for size in options.size for dtype in options.dtype]
    end = time.monotonic() + 60.0 * options.minutes if options.minutes else float("inf")
    clock = make_clock(options.clock, device)
    fast = {dtype: faster_dtype(DTYPES[dtype], device, clock) for dtype in options.dtype}
    rates = {dtype: matmul_rate(device, kind, clock) for dtype, kind in fast.items()}
    peak = options.peak_tflops or (peak_of(place["device"]) if device.type == "cuda" else None)
    print("large matrix product: " + ", ".join(f"{dtype} {rate:.3f} TFLOP/s" + " (in fp32)" * (fast[dtype] != DTYPES[dtype])
                                               for dtype, rate in rates.items()) +
          f"; peak {peak or 'not known (--peak-tflops): no MFU'}; TFLOP/s of a step count {flops.CONVENTION}", flush=True)
    results: list[dict[str, Any]] = []
    for number, (size, dtype) in enumerate(pairs):
        now = time.monotonic()
        try:
            result = race(options, size, dtype, now + (end - now) / (len(pairs) - number), tell)
        except torch.OutOfMemoryError:
            print(f"\n{size.name} {dtype}: out of memory, skipped", flush=True)
            results.append({"size": asdict(size), "dtype": dtype, "out_of_memory": True})
            continue
        except Disagreement as error:
            print(f"error: {size.name} {dtype}: {error}", file=sys.stderr)
            return 1
        finally:
            tell("")
            gc.collect()
            devices.release_memory(device)
        memory = f"; {result.memory_bytes / 1e9:.1f} GB" if result.memory_bytes else ""
        print("\n".join(["", heading(result) + memory, *table(result, rates[dtype], peak)]), flush=True)
        if result.profile:
            print("\n".join(["", *step_profile.lines(result.profile, result.ceiling_seconds)]), flush=True)
        results.append({**asdict(result), "x_bare": result.ratio(BARE, OURS), "x_transformers":
                        result.ratio(HUGGINGFACE, OURS), "tokens_per_step": size.tokens})
    if options.json:
        report = {"machine": place, "matmul_tflops": rates, "peak_tflops": peak, "races": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
