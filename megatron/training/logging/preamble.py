"""What is printed before the first iteration. With --log-format short: what is trained, on which
devices, with which kernels and data."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron import device as devices
from megatron import launcher, log
from megatron.config.command_line import CommandLine
from megatron.config.plan import report
from megatron.config.plan.plan import Plan
from megatron.config.plan.report import entry
from megatron.config.tree import Config
from megatron.kernels.cpu import native
from megatron.kernels.select import KernelRow, kernel_table
from megatron.training.launch.initialize import Runtime
from megatron.training.run import Progress
from megatron.version import NAME, VERSION

if TYPE_CHECKING:
    from megatron.data.plan_table import Row

# Implementations that any torch loop uses; the preamble omits them.
_PLAIN = {
    "torch",
    "accumulated in backward",
    "accumulated in fp32 by the GEMM",
    "product, then added",
    "autograd, then added",
    "seeded mask",
}
_NAMES = {
    "torch's fused attention": "torch SDPA",
    "fp32 GEMM, rounded once": "fp32 GEMM (no native support for the parameter dtype)",
}
_FILLS_GPU = 4096  # tokens of a micro-batch; with fewer a GPU waits for Python


def print_arguments(line: CommandLine, backend: str) -> None:
    """What Megatron prints first, up to its table of arguments; not with --log-format short.
    `backend` is that of the process groups."""
    if not line.config.logging.is_short:
        from megatron.training.logging.printed_arguments import start_lines

        for text in start_lines(line, backend):
            log.print_rank_0(text)


def print_opening(line: CommandLine, plan: Plan, runtime: Runtime, backend: str) -> None:
    """With --log-format short what is known before data and checkpoint are there, otherwise the
    kernels."""
    is_short = line.config.logging.is_short
    known = opening(line, plan, runtime, backend) if is_short else kernel_lines(line.config)
    for text in known:
        log.print_rank_0(text)


def opening(line: CommandLine, plan: Plan, runtime: Runtime, backend: str) -> list[str]:
    """Everything that is known before data and checkpoint are there; `backend` is that of the
    process groups."""
    config = line.config
    lines = [
        _run_line(config, runtime),
        *(
            entry(*each)
            for each in report.entries(config, plan, bool(line.script.model_provider)).items()
        ),
    ]
    lines += [entry("script", " ".join(line.extra_flags))] * bool(line.extra_flags)
    kernels = kernels_text(
        kernel_table(runtime.device, getattr(torch, config.precision.params_dtype), config)
    )
    lines += [entry("kernels", kernels)] * bool(kernels)
    if config.logging.printed_arguments == "changed":
        lines.append(" arguments that differ from their defaults")
        lines += report.changed_arguments(config)
    elif config.logging.printed_arguments == "all":
        from megatron.training.logging.printed_arguments import printed_arguments

        lines += printed_arguments(line, plan, backend)
    return [*lines, *report.noted([*line.notes, *hints(config, runtime.device)])]


def hints(config: Config, device: torch.device) -> list[str]:
    """What makes a step on this device slower than it has to be, one line each."""
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        built = native.load(capability)
        missing = capability in native.LEVELS and isinstance(built, str)
        return [f"slower than necessary: {built}"] if missing else []
    if device.type != "cuda":
        return []
    m = config.model
    p = config.precision
    t = config.training
    tokens = t.micro_batch_size * m.seq_length // config.parallel.context_parallel_size
    compiles = not (
        m.num_experts
        or config.kernels.transformer_impl == "transformer_engine"
        or (p.fp8 and p.fp8_recipe == "delayed")
    )
    dropouts = {"attention": m.attention_dropout, "hidden": m.hidden_dropout}
    rates = [f"--{name}-dropout {rate:g}" for name, rate in dropouts.items() if rate]
    applies = {
        "float32 GEMMs use no tensor cores: --bf16, or --tf32": (
            p.params_dtype == "float32" and not p.tf32
        ),
        f"{' and '.join(rates)}: dropout takes time in every layer": bool(rates),
        f"a micro-batch has {tokens:,} tokens per rank; {_FILLS_GPU:,} fill a GPU: raise "
        "--micro-batch-size": tokens < _FILLS_GPU,
        "--torch-compile fuses element-wise operations": compiles and not t.torch_compile,
    }
    return [f"faster: {text}" for text, holds in applies.items() if holds]


def _run_line(config: Config, runtime: Runtime) -> str:
    p = config.precision
    device = runtime.device
    name = (
        f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
        if device.type == "cpu"
        else f"{device.type}, {devices.name(device)}"
    )
    if runtime.world_size > 1:
        name = f"{runtime.world_size} ranks, each on {name}"
    numbers = (
        p.params_dtype
        if p.params_dtype == p.grad_dtype
        else f"{p.params_dtype}, gradients {p.grad_dtype}"
    )
    return entry("run", f"{NAME} {VERSION}, torch {torch.__version__}; {name}; {numbers}")


def kernel_lines(config: Config) -> list[str]:
    """Which kernels a run uses on this machine. Raises ValueError if the device of --device is not
    available."""
    device = devices.choose_device(config.training.device, launcher.info().local_rank)
    rows = kernel_table(device, getattr(torch, config.precision.params_dtype), config)
    lines = describe_kernels(rows, config.training.verbose)
    return [f"kernels on this {device.type}", *(f"  {text}" for text in lines)]


def describe_kernels(rows: Sequence[KernelRow], verbose: bool) -> list[str]:
    """One line per operation, then, if `verbose`, the kernels that are not used, one line per
    reason."""
    lines = [f"{row.operation}: {row.implementation} ({row.reason})" for row in rows if row.on]
    if not verbose:
        return lines
    off: dict[str, list[str]] = {}
    for row in rows:
        if not row.on:
            off.setdefault(row.reason, []).append(f"{row.operation} by {row.implementation}")
    return [
        *lines,
        "not used:",
        *(f"  {', '.join(names)} ({reason})" for reason, names in off.items()),
    ]


def kernels_text(rows: Sequence[KernelRow]) -> str:
    """The implementations that are not plain torch, each with its operations."""
    operations_by_name: dict[str, list[str]] = {}
    for row in rows:
        if row.on and row.implementation not in _PLAIN and row.implementation != "float32 GEMM":
            name = _NAMES.get(row.implementation, row.implementation)
            operations_by_name.setdefault(name, []).append(row.operation)
    return "; ".join(
        f"{name} for {', '.join(operations)}" for name, operations in operations_by_name.items()
    )


def data_lines(config: Config, rows: Sequence[Row]) -> list[str]:
    """What each split reads."""
    if not rows:
        return [
            entry(
                "data",
                "mock data (--mock-data)"
                if config.data.mock_data
                else "mock samples (--dummy-data)",
            )
        ]
    from megatron.data.plan_table import summary

    return summary(rows)


def checkpoint_line(config: Config, loaded: str | None, progress: Progress) -> str:
    """Where the run starts and where it saves; `loaded`: the checkpoint it was loaded from, if
    there is one."""
    c = config.checkpoint
    if loaded and progress.iteration:
        note = "; so is every start with --ckpt-step" * (
            c.save == c.load and c.ckpt_step is not None
        )
        start = (
            f"resumed from iteration {progress.iteration} ({loaded}{note}), "
            f"{progress.consumed_train_samples:,} samples consumed"
        )
    elif loaded:
        start = f"weights of {loaded}, from iteration 0"
    else:
        start = f"no checkpoint in {c.load}, " * bool(c.load) + "starting from initial values"
    return entry("checkpoints", f"{start}; {report.checkpoint_text(config)}")


def print_loaded(
    config: Config, rows: Sequence[Row], loaded: str | None, progress: Progress
) -> None:
    """The end of what is printed before the first iteration."""
    log.detail("done with setup ...")
    if not config.logging.is_short:
        return
    for text in [
        *data_lines(config, rows),
        checkpoint_line(config, loaded, progress),
        "",
    ]:
        log.print_rank_0(text)
