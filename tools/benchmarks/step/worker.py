"""The program of a contestant's process: builds the contestant, then executes the commands that
arrive over a pipe.

processes.py starts it with the number of the pipe and of the parent process; the first message is
the job (a dict, see processes.py). The contestant's modules come from the job's `tree`, which may
be another checkout of this repository (86e72bf or later). So this file imports nothing of its own
tree, and torch only after the environment is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import resource
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DIE_WITH_PARENT = 1  # Linux: prctl's PR_SET_PDEATHSIG
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
MOST_COMPILING_STEPS = 10  # that a contestant may run until one compiles nothing


def set_threads_as_pretrain_gpt() -> None:
    """Set what pretrain_gpt.py sets for CPU threads before torch loads."""
    try:
        threads = importlib.import_module("megatron.threads")
    except ImportError:  # an older tree
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    else:
        threads.set_waiting()


def make_clock(kind: str, device: Any) -> Callable[[], float]:
    """Seconds: wall clock once the device is done, or (`cpu`) processor time of this process."""
    if kind == "cpu":
        return time.process_time
    devices = importlib.import_module("megatron.device")

    def wall() -> float:
        devices.synchronize(device)
        return time.perf_counter()

    return wall


def size_of(job: dict[str, Any]) -> Any:
    """The job's size as the tree's own Size."""
    kind = importlib.import_module("sizes").Size
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in job["size"].items() if name in known})


def device_of(job: dict[str, Any]) -> Any:
    """The job's torch.device. Raises SystemExit, with a message on stderr, where there is none of
    that kind."""
    try:
        return importlib.import_module("megatron.device").choose_device(job["device"], 0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def compilations() -> int:
    """How many graphs torch.compile has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    return sum(utils.counters["frames"].values()) + utils.counters["stats"]["unique_graphs"]


class Machine:
    """What the device is and how fast its GEMMs are; it trains nothing."""

    def __init__(self, job: dict[str, Any]):
        torch = importlib.import_module("torch")
        ceiling = importlib.import_module("ceiling")
        devices = importlib.import_module("megatron.device")
        flops = importlib.import_module("megatron.training.logging.flops")
        linear = importlib.import_module("megatron.kernels.linear")
        device = device_of(job)
        clock = make_clock(job["clock"], device)
        self.facts = {
            "device_type": device.type,
            "device_name": devices.name(device),
            "peak_tflops": ceiling.peak_of(devices.name(device)) if device.type == "cuda" else None,
            "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "flops_convention": flops.CONVENTION,
            "native": {},
            "fast_dtype": {},
            "matmul_tflops": {},
        }
        for name in job["dtypes"]:
            dtype = getattr(torch, DTYPES[name])
            fast = ceiling.faster_dtype(dtype, device, clock)
            self.facts["native"][name] = linear.low_precision_is_native(device.type, dtype)
            self.facts["fast_dtype"][name] = str(fast).removeprefix("torch.")
            self.facts["matmul_tflops"][name] = ceiling.matmul_rate(device, fast, clock)


class CeilingPieces:
    """The GEMMs and the attention of a step by themselves; a turn times each piece once
    more."""

    def __init__(self, job: dict[str, Any]):
        dtype = getattr(importlib.import_module("torch"), DTYPES[job["dtype"]])
        device = device_of(job)
        clock = make_clock(job["clock"], device)
        self._ceiling = importlib.import_module("ceiling").Ceiling(
            size_of(job), dtype, device, clock
        )
        self.facts = {"dtype": str(self._ceiling.dtype).removeprefix("torch.")}

    def turn(self) -> tuple[float, float]:
        """Seconds of all GEMMs and of all attention of one step, each piece at its best
        so far."""
        self._ceiling.measure()
        return self._ceiling.seconds()


class TrainingSteps:
    """A contestant that trains: warm-up steps, whose losses are compared, then turns of timed
    steps."""

    def __init__(self, job: dict[str, Any]):
        self._size = size_of(job)
        self._device = device_of(job)
        self._runner = BUILDERS[job["kind"]](job, self._size, self._device)
        self._clock = make_clock(job["clock"], self._device)
        self.facts = {"parameters": sum(p.numel() for p in self._runner.parameters())}
        if job["kind"] == "ours":
            flops = importlib.import_module("megatron.training.logging.flops")
            samples = self._size.micro_batch * self._size.micro_batches
            self.facts["flops_per_step"] = flops.flops_per_iteration(self._runner.shape, samples)

    def save_start(self, path: str, steps: int) -> None:
        """Write our weights, by the bare model's names, and the samples of the next `steps` steps
        to a file."""
        bare_model = importlib.import_module("bare_model")
        start = {
            "weights": bare_model.megatron_to_bare(self._runner.weights(), self._size.heads),
            "samples": self._runner.first_samples(steps),
        }
        importlib.import_module("torch").save(start, path)

    def save_run(self, path: str, steps: int) -> None:
        """Write our weights, by Megatron's names, and the samples of the next `steps` steps to a
        file."""
        start = {"weights": self._runner.weights(), "samples": self._runner.first_samples(steps)}
        importlib.import_module("torch").save(start, path)

    def _timed_step(self) -> tuple[float, float, bool]:
        """(seconds, loss, whether torch.compile compiled something) of one step."""
        before = compilations()
        start = self._clock()
        loss = self._runner.step()
        return self._clock() - start, loss, compilations() > before

    def warm_up(self, steps: int) -> dict[str, Any]:
        """Run `steps` steps, and more until one compiles nothing; their losses, the seconds of a
        step that compiles nothing, and those that the others took beyond it."""
        taken = [self._timed_step() for _ in range(steps)]
        while all(compiled for _, _, compiled in taken):
            if len(taken) == steps + MOST_COMPILING_STEPS:
                raise RuntimeError(f"torch.compile still compiles in step {len(taken)}")
            taken.append(self._timed_step())
        step_seconds = min(seconds for seconds, _, compiled in taken if not compiled)
        compiling = [seconds - step_seconds for seconds, _, compiled in taken if compiled]
        return {
            "losses": [loss for _, loss, _ in taken[:steps]],
            "step_seconds": step_seconds,
            "compile_seconds": sum(compiling) if compiling else None,
        }

    def turn(self, uncounted: int, counted: int) -> dict[str, Any]:
        """Run `uncounted` steps, then time `counted` ones; a step that compiles something is
        repeated."""
        for _ in range(uncounted):
            self._runner.step()
        timed: list[float] = []
        for _ in range(counted + MOST_COMPILING_STEPS):
            seconds, _, compiled = self._timed_step()
            if not compiled:
                timed.append(seconds)
            if len(timed) == counted:
                return {"seconds": statistics.median(timed), "peak_bytes": self._peak_bytes()}
        raise RuntimeError("torch.compile compiles again and again")

    def _peak_bytes(self) -> int:
        """The most memory so far: of the device, or on a CPU of the process."""
        report = importlib.import_module("megatron.device").memory_report(self._device)
        unit = 1 if sys.platform == "darwin" else 1024
        return (
            report.get("max allocated") or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )

    def step(self) -> tuple[float, float]:
        """(seconds, loss) of one step."""
        seconds, loss, _ = self._timed_step()
        return seconds, loss

    def profile(self) -> dict[str, float]:
        """Seconds by kind of work of a step, on another device than a CPU by kernel."""
        step_profile = importlib.import_module("step_profile")
        if self._device.type == "cpu":
            return step_profile.profiled(self._runner.step, self._runner.run.optimizer)
        found = step_profile.kernels(self._runner.step)
        return step_profile.by_kernel(found, self._timed_step()[0])


def build_ours(job: dict[str, Any], size: Any, device: Any) -> Any:
    """The iteration of pretrain_gpt.py."""
    ours = importlib.import_module("contestants").Ours
    return ours(size, job["dtype"], device.type, job["flags"], job["launcher"])


def build_loop(job: dict[str, Any], size: Any, device: Any) -> Any:
    """The bare loop around the bare model or transformers', from our weights and over our
    samples."""
    bare_loop = importlib.import_module("bare_loop")
    start = importlib.import_module("torch").load(job["start"], weights_only=True)
    if job["kind"] == "bare":
        model, loss_of = bare_loop.build_bare(size, start["weights"])
    else:
        build = importlib.import_module("transformers_model").build_transformers
        model, loss_of = build(size, start["weights"])
    samples = start["samples"]
    return bare_loop.BareLoop(model, loss_of, size, job["dtype"], device, samples, job["compiled"])


def build_qwen3_moe(job: dict[str, Any], size: Any, device: Any) -> Any:
    """The bare loop around transformers' Qwen3-MoE, from our weights and over our samples."""
    start = importlib.import_module("torch").load(job["start"], weights_only=True)
    loop = importlib.import_module("qwen3_moe").Qwen3Moe
    return loop(size, start["weights"], start["samples"], job["dtype"], device, job["flags"])


def build_megatron_core(job: dict[str, Any], size: Any, device: Any) -> Any:
    """megatron-core's model in a bare loop."""
    return importlib.import_module("peer").MegatronCore(size, job["launcher"])


BUILDERS = {
    "ours": build_ours,
    "bare": build_loop,
    "transformers": build_loop,
    "qwen3-moe": build_qwen3_moe,
    "megatron-core": build_megatron_core,
}


def prepare(job: dict[str, Any]) -> Any:
    """The contestant of the job, in the environment that it has where it runs by itself."""
    benchmarks = Path(job["tree"]) / "tools" / "benchmarks"
    sys.path[:1] = [job["tree"], str(benchmarks / "step"), str(benchmarks)]
    os.environ.update(job["launcher"])
    if job["kind"] == "ours":
        set_threads_as_pretrain_gpt()
    classes = {"machine": Machine, "ceiling": CeilingPieces}
    return classes.get(job["kind"], TrainingSteps)(job)


def serve(pipe: Connection) -> None:
    """Answer the job and each command after it with (kind of answer, value), until the parent
    closes the pipe."""
    job = pipe.recv()
    if job["kind"] == "busy":
        while True:
            pass
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            contestant = prepare(job)
        pipe.send(("ok", contestant.facts))
        while True:
            command, *arguments = pipe.recv()
            pipe.send(("ok", getattr(contestant, command)(*arguments)))
    except EOFError:
        return
    except SystemExit:
        pipe.send(("refused", said.getvalue()))
    except BaseException as error:
        kind = "out of memory" if type(error).__name__ == "OutOfMemoryError" else "failed"
        pipe.send((kind, f"{said.getvalue()}{traceback.format_exc()}"))
    pipe.poll(None)  # another rank may still communicate with this one


def main(argv: Sequence[str]) -> None:
    """Serve the pipe of that number until the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    pipe, parent = map(int, argv)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl:  # a stopped process does not notice that the pipe is closed
        prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() == parent:
        serve(Connection(pipe))


if __name__ == "__main__":
    main(sys.argv[1:])
