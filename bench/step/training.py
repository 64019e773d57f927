"""A subject that trains: warm-up steps, whose losses are compared, then turns of timed steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import bare
import torch
from bare import BareLoop
from sizes import Size
from subject import Subject
from torch.utils import benchmark

from megatron import device as devices

TURN_SECONDS = 0.5
START_STEPS = 20  # whose samples peers get
# Dense bf16 peaks in TFLOP/s by a word of the device's name, the more special name first.
PEAKS = {
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def peak_of(device: torch.device) -> float | None:
    """Dense bf16 peak of the device, TFLOP/s, or None where it is not known."""
    name = devices.name(device)
    return next((peak for word, peak in PEAKS.items() if word in name), None)


def make_bare_loop(
    kind: str, size: Size, dtype: str, device: torch.device, start: str, compiled: bool
) -> BareLoop:
    """The bare loop around the bare model or one of transformers' (`liger`: with Liger's kernels),
    from our weights and over our samples, the file `start`. `olmoe`: transformers' mixture of
    experts in bf16 alone, with weights and samples of its own."""
    build = bare.build
    if kind != "bare":
        from transformers_model import build, build_olmoe
    if kind == "olmoe":
        model, loss_of = build_olmoe(size, device)
        samples = [torch.randint(size.vocab, (size.micro_batch, size.seq + 1))]
        return BareLoop(model, loss_of, size, "fp32", device, samples, compiled)
    saved = torch.load(start, weights_only=True)
    with device:
        model, loss_of = build(size, saved["weights"])
    if kind == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    return BareLoop(model, loss_of, size, dtype, device, saved["samples"], compiled)


class Training(Subject):
    """Trains `size`, the fields of a Size.

    kind: `ours`, or `bare`, `transformers`, `liger` or `olmoe` in the bare loop; ours with `flags`
    of pretrain_gpt.py. `start`: a file that ours writes unless it exists, with its weights and
    samples, for the others. `launcher`: torchrun's variables of this rank.
    """

    def __init__(
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
    ):
        known = {field.name for field in fields(Size)}  # of another checkout it may have fewer
        self.size = Size(**{name: value for name, value in size.items() if name in known})
        self.device = devices.choose_device(device, 0)
        self.flops = 0
        self._agrees = kind != "olmoe"
        self._warmup = warmup
        self._seconds = 0.0  # of the last turn's steps
        self._compiled = compiled
        self._facts: dict[str, float] = {}
        if kind != "ours":
            self.runner: Any = make_bare_loop(kind, self.size, dtype, self.device, start, compiled)
            return
        from contestants import Ours

        words = [*flags, "--torch-compile"] if compiled else flags
        self.runner = Ours(self.size, dtype, self.device.type, words, launcher)
        samples = self.size.micro_batch * self.size.micro_batches
        # A checkout of before 2026-11-28 has none.
        self.flops = samples * getattr(self.runner, "flops_per_sample", 0)
        if start and not Path(start).exists():
            first = self.runner.first_samples(START_STEPS)
            torch.save({"weights": self.runner.weights(), "samples": first}, start)

    def work(self) -> float:
        """A step; its loss."""
        return self.runner.step()

    def warm_up(self) -> list[float] | None:
        """The losses of the first steps, unless it has weights of its own."""
        losses = []
        seconds = []
        for _ in range(self._warmup):
            start = time.perf_counter()
            losses.append(self.work())
            devices.synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        if self._compiled:
            self._facts["compile s"] = sum(seconds) - len(seconds) * min(seconds)
        return losses if self._agrees else None

    def turn(self) -> float:
        """Seconds of a step, the median of some; the first is not timed, as caches and threads are
        cold."""
        steps = benchmark.Timer(
            "step()", globals={"step": self.work}, num_threads=torch.get_num_threads()
        )
        self._seconds = steps.blocked_autorange(min_run_time=TURN_SECONDS).median
        return self._seconds

    def facts(self) -> dict[str, float]:
        """Parameters, compile time, peak memory; of ours FLOPs and their share of the device's
        peak."""
        facts = {"M parameters": sum(p.numel() for p in self.runner.parameters()) / 1e6}
        facts |= super().facts() | self._facts
        report = devices.memory_report(self.device)
        facts["peak GB"] = report.get("max allocated", 1e9 * facts["peak GB"]) / 1e9
        if self.flops:
            facts["TFLOP/s"] = self.flops / self._seconds / 1e12
            if peak := peak_of(self.device):
                facts["MFU %"] = 100 * facts["TFLOP/s"] / peak
        return facts
