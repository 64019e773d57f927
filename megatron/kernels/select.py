"""Which implementation of each kernel runs on a device and why each other one is off; knows no model and no rank."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from megatron.config.tree import Config
from megatron.kernels.attention import select_attention
from megatron.kernels.block_attention import flash
from megatron.kernels.blocks import pays_off
from megatron.kernels.linear import compute_dtype

LIBRARIES = {
    "transformer_engine": "Transformer Engine",
    "apex": "NVIDIA's apex",
    "flash_attn": "flash-attn",
}


@dataclass(frozen=True)
class KernelRow:
    """One line of the table: an implementation of an operation, whether it is on, and why or why not."""

    operation: str
    implementation: str
    on: bool
    reason: str


def kernel_table(device: torch.device, dtype: torch.dtype, config: Config) -> list[KernelRow]:
    """The implementations of every operation that this configuration can use on `device` with weights of `dtype`.

    One row of each operation is on; the rows of optional libraries, which have no path here yet, are all off. Nothing
    is run or timed: the choice follows from the kind of device, the capabilities of torch and the configuration, so
    that a resumed run chooses alike.
    """
    return [
        *_linear_rows(device, dtype),
        *_attention_rows(device, dtype, config),
        *_elementwise_rows(device, config),
        *_library_rows(),
    ]


def _pair(operation: str, names: tuple[str, str], first: bool, reasons: tuple[str, str]) -> list[KernelRow]:
    """Two rivals of which one is on: `reasons` if the first is on, why the first is and why the second is not."""
    chosen = 0 if first else 1
    why, why_not = reasons
    return [KernelRow(operation, names[chosen], True, why), KernelRow(operation, names[1 - chosen], False, why_not)]


def _linear_rows(device: torch.device, dtype: torch.dtype) -> list[KernelRow]:
    compute = compute_dtype(torch.empty(0, dtype=dtype, device=device))
    name = str(dtype).removeprefix("torch.")
    if dtype not in (torch.bfloat16, torch.float16):
        return [KernelRow("linear", f"{name} products", True, "the weights' own format")]
    native = compute == dtype
    reasons = ((f"this {device.type} has instructions for {name}", "not needed") if native else
               (f"{name} is emulated on this {device.type}; fp32 is several times faster and rounds once",
                f"no instructions for {name}"))
    return _pair("linear", (f"{name} products", "fp32 products, rounded once"), native, reasons)


def _attention_rows(device: torch.device, dtype: torch.dtype, config: Config) -> list[KernelRow]:
    rows = []
    dropout, documents = config.model.attention_dropout, config.data.reset_attention_mask or config.data.packed_samples
    uses = {"attention (training)": dropout, "attention (evaluation)": 0.0} if dropout else {"attention": 0.0}
    for operation, p in uses.items():
        if config.parallel.context_parallel_size > 1:
            on = flash(device.type, dtype, config.model.head_dim, p, documents)
            rows += _pair(operation, ("torch's flash kernel, block by block", "rows of queries, block by block"), on,
                          ("blocks of keys come round the ring", "rows of queries need more passes over memory" if on else
                           "needs CUDA, fp16 or bf16, no attention dropout and no document masks"))
            continue
        length = {} if config.model.seq_length is None else {"seq_length": config.model.seq_length}
        chosen, *reasons = select_attention(device, dtype, p, documents, **length)
        rows += _pair(operation, ("torch's fused attention", "blocks of query rows"), chosen == "sdpa", tuple(reasons))
    return rows


def _elementwise_rows(device: torch.device, config: Config) -> list[KernelRow]:
    model = config.model
    in_rows = pays_off(torch.empty(0, device=device))
    reasons = (("passes over runs of rows stay in the cache", "a trip to memory for every operation") if in_rows else
               ("torch's own kernels are fused on this device", "every operation is a launch"))
    norm = model.normalization
    rows = []
    for operation in (norm, model.activation):
        if operation not in ("RMSNorm", "swiglu", "gelu (tanh)"):
            rows.append(KernelRow(operation, "torch", True, "there is no other one here"))
        else:
            rows += _pair(operation, ("runs of rows", "torch"), in_rows, reasons)
    rows.append(KernelRow("cross entropy", "runs of rows", True, "never holds a second copy of the logits"))
    rows.append(KernelRow("cross entropy", "torch", False, "holds two more copies of the logits"))
    if model.hidden_dropout or model.attention_dropout:
        rows.append(KernelRow("dropout", "mask from a seed", True, "recompute and resume repeat it without state"))
        rows.append(KernelRow("dropout", "torch", False, "takes no generator: its mask depends on what ran before"))
    return rows


def _library_rows() -> list[KernelRow]:
    rows = []
    for module, name in LIBRARIES.items():
        there = find_spec(module) is not None
        reason = "installed, but this version has no path for it" if there else f"{name} is not installed"
        rows.append(KernelRow("fused kernels", module, False, reason))
    return rows
