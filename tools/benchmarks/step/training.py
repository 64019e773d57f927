"""A contestant of the step benchmarks: warm-up steps, whose losses are compared, then turns of
timed steps."""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from rates import make_clock, peak_of
from sizes import Size

from megatron import device as devices

TURN_SECONDS = 0.5
MOST_STEPS = 100  # of one turn
MOST_COMPILING_STEPS = 10  # that a contestant may run until one compiles nothing


def compilations() -> int:
    """How many graphs torch.compile has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    return sum(utils.counters["frames"].values()) + utils.counters["stats"]["unique_graphs"]


def make_bare_loop(
    kind: str, size: Size, dtype: str, device: torch.device, start: str, compiled: bool
) -> Any:
    """The bare loop around the bare model or one of transformers' (`liger`: with Liger's kernels),
    from our weights and over our samples, the file `start`. `olmoe`: transformers' mixture of
    experts in bf16 alone, with weights and samples of its own."""
    loop = importlib.import_module("bare_loop")
    module = loop if kind == "bare" else importlib.import_module("transformers_model")
    if kind == "olmoe":
        model, loss_of = module.build_olmoe(size, device)
        samples = [torch.randint(size.vocab, (size.micro_batch, size.seq + 1))]
        return loop.BareLoop(model, loss_of, size, "fp32", device, samples, compiled)
    saved = torch.load(start, weights_only=True)
    with device:
        model, loss_of = module.build(size, saved["weights"])
    if kind == "liger":
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(
            model=model
        )
    return loop.BareLoop(model, loss_of, size, dtype, device, saved["samples"], compiled)


class Training:
    """A subject (see harness.py) that trains `size`, the fields of a Size.

    kind: `ours`, `megatron-core`, or `bare`, `transformers`, `liger` or `olmoe` in the bare loop;
    ours with `flags` of pretrain_gpt.py. `launcher`: torchrun's variables of this rank. `agrees`:
    its losses are those of the other sides.
    """

    def __init__(  # noqa: PLR0913
        self,
        kind: str,
        size: Mapping[str, Any],
        dtype: str = "fp32",
        device: str = "cpu",
        *,
        start: str = "",
        compiled: bool = False,
        flags: Sequence[str] = (),
        launcher: Mapping[str, str] | None = None,
        warmup: int = 2,
        agrees: bool = True,
    ):
        known = {field.name for field in fields(Size)}  # of another checkout it may have fewer
        self.size = Size(**{name: value for name, value in size.items() if name in known})
        self.device = devices.choose_device(device, 0)
        self._clock = make_clock(self.device)
        self._warmup = warmup
        self._steps = 1  # of a turn
        self._seconds: list[float] = []
        self._facts: dict[str, float] = {}
        self.flops = 0
        if kind == "ours":
            contestant = importlib.import_module("contestants").Ours
            words = [*flags, "--torch-compile"] if compiled else flags
            self.runner: Any = contestant(self.size, dtype, self.device.type, words, launcher)
            samples = self.size.micro_batch * self.size.micro_batches
            self.flops = samples * self.runner.flops_per_sample
        elif kind == "megatron-core":
            self.runner = importlib.import_module("peer").MegatronCore(self.size, launcher)
        else:
            self.runner = make_bare_loop(kind, self.size, dtype, self.device, start, compiled)
        self._agrees = agrees

    def save_start(self, path: str, steps: int = 20) -> None:
        """Write our weights and the samples of the next `steps` steps to a file."""
        start = {"weights": self.runner.weights(), "samples": self.runner.first_samples(steps)}
        torch.save(start, path)

    def _timed_step(self) -> tuple[float, float, bool]:
        """(seconds, loss, whether torch.compile compiled something) of one step."""
        before = compilations()
        start = self._clock()
        loss = self.runner.step()
        return self._clock() - start, loss, compilations() > before

    def warm_up(self) -> list[float] | None:
        """Steps until one compiles nothing; the losses of the first ones."""
        timed_steps = [self._timed_step() for _ in range(self._warmup)]
        while all(compiled for _, _, compiled in timed_steps):
            if len(timed_steps) == self._warmup + MOST_COMPILING_STEPS:
                raise RuntimeError(f"torch.compile still compiles in step {len(timed_steps)}")
            timed_steps.append(self._timed_step())
        fastest = min(seconds for seconds, _, compiled in timed_steps if not compiled)
        self._steps = max(1, min(MOST_STEPS, round(TURN_SECONDS / fastest)))
        compiling = [seconds - fastest for seconds, _, compiled in timed_steps if compiled]
        self._facts = {"compile s": sum(compiling)} if compiling else {}
        losses = [loss for _, loss, _ in timed_steps[: self._warmup]]
        return losses if self._agrees else None

    def turn(self) -> float:
        """Seconds of a step, the median of some; the first is not timed, as caches and threads are
        cold."""
        self.runner.step()
        timed: list[float] = []
        for _ in range(self._steps + MOST_COMPILING_STEPS):
            seconds, _, compiled = self._timed_step()
            timed += [] if compiled else [seconds]
            if len(timed) == self._steps:
                self._seconds.append(statistics.median(timed))
                return self._seconds[-1]
        raise RuntimeError("torch.compile compiles again and again")

    def facts(self) -> dict[str, float]:
        """Parameters, compile time, peak memory of a device; of ours FLOPs and their share of the
        device's peak."""
        report = devices.memory_report(self.device)
        facts = {"M parameters": sum(p.numel() for p in self.runner.parameters()) / 1e6}
        facts |= self._facts
        if "max allocated" in report:
            facts["peak GB"] = report["max allocated"] / 1e9
        if self.flops:
            facts["TFLOP/s"] = self.flops / statistics.median(self._seconds) / 1e12
            if peak := peak_of(devices.name(self.device)):
                facts["MFU %"] = 100 * facts["TFLOP/s"] / peak
        return facts
