#!/usr/bin/env python
"""A rank of pretrain_gpt.py to which faults come: faults.json in the working folder, shared by all
ranks and all attempts, lists them. Each is due once the one before it has come, which the file
injected.N says. Tests call `install` before the script."""

from __future__ import annotations

import errno
import functools
import gc
import importlib
import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "pretrain_gpt.py")
FOREVER = 1000.0
ANY_TIME = "any time"
# place: module, function, axis of a collective
SITES = {
    "import": ("megatron.config.command_line", "read", ""),
    "meeting": ("megatron.training.launch.initialize", "connect", ""),
    "groups": ("megatron.training.launch.initialize", "initialize", ""),
    "start-up": ("megatron.training.build", "build_run", ""),
    "load": ("megatron.training.checkpointing.start", "load_checkpoint", ""),
    "step": ("megatron.training.loop", "train_step", ""),
    "data": ("megatron.training.step", "make_batch", ""),
    "forward": ("megatron.model.gpt", "GPTModel.forward", ""),
    "backward": ("torch.autograd", "backward", ""),
    "reduction": ("megatron.parallel.ddp", "GradBuffers.reduce", ""),
    "TP collective": ("megatron.parallel.collectives", "start_all_reduce", "tp"),
    "DP collective": ("megatron.parallel.reduction", "start_all_reduce", "instances"),
    "PP receive": ("megatron.parallel.pipeline", "P2PLinks.receive", ""),
    "optimizer": ("megatron.optimizer.optimizer", "MixedPrecisionOptimizer.step", ""),
    "evaluation": ("megatron.training.evaluation", "evaluate", ""),
    "save": ("megatron.training.checkpointing.save", "save_checkpoint", ""),
    "write": ("megatron.checkpoint.filesystem", "Disk.step", ""),
    "upload": ("fsspec.implementations.local", "LocalFileSystem.put_file", ""),
    "end": ("megatron.training.launch.initialize", "finish", ""),
}
ERRORS = {
    "exception": RuntimeError("an injected exception"),
    "disk full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "failing disk": OSError(errno.EIO, os.strerror(errno.EIO)),
    "object store fails": ConnectionError("reset by peer"),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "abort": signal.SIGABRT}


@dataclass(frozen=True)
class Fault:
    """`kind` comes to `rank` in its `at`-th call of the function of `site` since the fault before
    (ANY_TIME: that many seconds after it)."""

    kind: str
    site: str
    rank: int
    at: float = 1


def write(folder: Path, faults: Sequence[Fault]) -> None:
    """The faults of the ranks that start in `folder`."""
    (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))


def injected(folder: Path) -> list[dict[str, Any]]:
    """Process and time of each fault that has come so far."""
    number = len(list(folder.glob("injected.*")))
    return [json.loads((folder / f"injected.{index}").read_text()) for index in range(number)]


class Injector:
    """The faults of a run, as one of its ranks meets them."""

    def __init__(self, faults: Sequence[Fault], rank: int, folder: Path):
        self._faults = faults
        self._rank = rank
        self._folder = folder
        self._number = -1
        self._calls = 0
        self._next()

    def due(self, function: str) -> Fault | None:
        """The fault that comes in this call of the place's function."""
        fault = self._next()
        if fault is None or fault.site != function:
            return None
        self._calls += 1
        if self._calls != fault.at:
            return None
        self._mark()
        return fault

    def _next(self) -> Fault | None:
        """The next fault, if it is one of this rank."""
        number = len(list(self._folder.glob("injected.*")))
        fault = self._faults[number] if number < len(self._faults) else None
        if fault and fault.rank != self._rank:
            fault = None
        if number != self._number:
            self._number = number
            self._calls = 0
            if fault and fault.site == ANY_TIME:
                before = f"injected.{number - 1}" if number else "faults.json"
                begun = (self._folder / before).stat().st_mtime
                timer = threading.Timer(
                    begun + fault.at - time.clock_gettime(time.CLOCK_REALTIME),
                    self._late,
                    [fault.kind],
                )
                timer.daemon = True
                timer.start()
        return fault

    def _late(self, kind: str) -> None:
        self._mark()
        strike(kind)

    def _mark(self) -> None:
        part = self._folder / f".{os.getpid()}"
        moment = time.clock_gettime(time.CLOCK_REALTIME)
        part.write_text(json.dumps({"pid": os.getpid(), "time": moment}))
        part.rename(self._folder / f"injected.{self._number}")


def strike(kind: str) -> None:
    """Do to this process what the fault says. What has been slowed down or shifted stays so."""
    if kind in ERRORS:
        raise ERRORS[kind]
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
        time.sleep(FOREVER)
    match kind:
        case "out of memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
            bytearray(1 << 28)
        case "C code with the lock":
            re.match("(a+)+$", "a" * 60 + "b")
        case "stuck read":
            os.mkfifo(f"fifo.{os.getpid()}")
            Path(f"fifo.{os.getpid()}").read_bytes()
        case "network cut":
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        case "object store is slow":
            time.sleep(3.0)
        case "slow disk":
            disk = importlib.import_module("megatron.checkpoint.filesystem").Disk
            change(disk, "step", lambda right: _delayed(right, 0.02))
        case "clock one hour ahead" | "clock one hour back":
            right = time.time
            shift = 3600 if kind.endswith("ahead") else -3600
            time.time = lambda: right() + shift
        case _:  # "hang", and those that the program that started the ranks kills
            time.sleep(FOREVER)


def _delayed(right: Callable, seconds: float) -> Callable:
    def slow(*args: object) -> object:
        time.sleep(seconds)
        return right(*args)

    return slow


def change(owner: object, name: str, changed: Callable[[Callable], Callable]) -> None:
    """Replace a function, under whose name stacks show it."""
    *outer, name = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function = changed(getattr(owner, name))
    function.__code__ = function.__code__.replace(co_name=name)
    setattr(owner, name, function)


def install(faults: Sequence[Fault], rank: int, folder: Path) -> None:
    """From now on the faults come to this process, which is `rank`; `folder` has the files."""
    injector = Injector(faults, rank, folder)
    sites = {fault.site for fault in faults}
    for function in sites & SITES.keys():
        module, name, axis = SITES[function]
        owner = importlib.import_module(module)
        if function == "upload":
            change(owner, name, _bucket)
        change(owner, name, functools.partial(_around, injector, function, axis))


def _bucket(right: Callable) -> Callable:
    """A bucket has no directories."""

    def put_file(self: object, path: str, target: str, **more: object) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        right(self, path, target, **more)

    return put_file


def _around(injector: Injector, function: str, axis: str, right: Callable) -> Callable:
    def changed(*args: Any, **kwargs: object) -> Any:
        of_axis = not axis or any(getattr(argument, "name", "") == axis for argument in args)
        fault = injector.due(function) if of_axis else None
        kind = fault.kind if fault else ""
        if kind and kind not in ("NaN", "object store lies"):
            strike(kind)
        result = right(*args, **kwargs)
        if kind == "object store lies":
            with open(args[2], "r+b") as file:
                file.write(b"?")
        return result * float("nan") if kind == "NaN" else result

    return changed


def main() -> None:
    """Run the script as a rank."""
    gc.disable()  # as the script does before its imports
    sys.path[0] = str(ROOT)
    from megatron import launcher

    faults = [Fault(**fault) for fault in json.loads(Path("faults.json").read_text())]
    install(faults, launcher.info().rank, Path.cwd())
    sys.argv[0] = SCRIPT
    runpy.run_path(SCRIPT, run_name="__main__")


if __name__ == "__main__":
    main()
