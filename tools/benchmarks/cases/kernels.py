"""Our kernels for CPUs beside torch's own operations, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cases.subject import Subject
from harness import Case, Setup, Side, benchmark, each
from torch import Tensor
from torch.utils.benchmark import Timer

from megatron.kernels import functional as kernels
from megatron.kernels.attention_spec import AttentionSpec
from megatron.kernels.cpu import bf16_attention, fp32_attention

HIDDEN = 512
FFN = 1376
HEAD = 64
TURN_SECONDS = 0.1
KINDS = ("attention", "bf16 attention", "tanh GELU", "RMSNorm", "swiglu", "rotary")
CPU = torch.device("cpu")


def torch_swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, operation by operation."""
    gate, up = gate_up.unbind(-2)
    return F.silu(gate) * up


def torch_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation of the pairs (i, i + half), operation by operation."""
    first, second = x.chunk(2, -1)
    cos = cos[:, None, None]
    sin = sin[:, None, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def implementation(kind: str, seq: int) -> str:
    """Our attention of that kind at so many positions, or nothing where the C++ is not there."""
    library, dtype, name = (
        (fp32_attention, torch.float32, "cpp_fp32")
        if kind == "attention"
        else (bf16_attention, torch.bfloat16, "cpp_bf16")
    )
    return "" if library.unavailable_reason(CPU, dtype, HEAD, seq) else name


def operation(kind: str, ours: bool, seq: int, tokens: int) -> tuple[Any, tuple[Tensor, ...]]:
    """The function and its inputs."""
    if "attention" in kind:
        name = implementation(kind, seq) or "chunked" if ours else "sdpa"
        dtype = torch.float32 if kind == "attention" else torch.bfloat16
        shape = (seq, max(1, tokens // seq), HIDDEN // HEAD, HEAD)
        q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
        spec = AttentionSpec.of(q, k, v, HEAD**-0.5)
        return partial(kernels.attention, spec=spec, requested=name), (q, k, v)
    if kind == "tanh GELU":
        inputs: tuple[Tensor, ...] = (torch.randn(tokens, 1, FFN),)
        if ours:
            return lambda x: kernels.gelu(x, True), inputs
        return lambda x: F.gelu(x, approximate="tanh"), inputs
    if kind == "RMSNorm":
        inputs = torch.randn(tokens, 1, HIDDEN), torch.rand(HIDDEN)
        if ours:
            return lambda x, w: kernels.rms_norm(x, w, 1e-5), inputs
        return lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), inputs
    if kind == "swiglu":
        return kernels.swiglu if ours else torch_swiglu, (torch.randn(tokens, 1, 2, FFN),)
    cos, sin = kernels.rotary_tables(tokens, HEAD)
    rotate = kernels.apply_rotary if ours else torch_rotary
    return partial(rotate, cos=cos, sin=sin), (torch.randn(tokens, 1, HIDDEN // HEAD, HEAD),)


class Kernel(Subject):
    """Forward and backward of one operation, ours or torch's."""

    def __init__(self, kind: str, ours: bool, seq: int, tokens: int):
        torch.manual_seed(1)
        self._function, inputs = operation(kind, ours, seq, tokens)
        self._leaves = [one.detach().requires_grad_() for one in inputs]
        self._grad = torch.randn_like(self._function(*self._leaves))
        self._timer = Timer(
            "run()", globals={"run": self._both}, num_threads=torch.get_num_threads()
        )
        self._times = 1

    def _both(self) -> tuple[Tensor, ...]:
        out = self._function(*self._leaves)
        return out, *torch.autograd.grad(out, self._leaves, self._grad)

    def warm_up(self) -> list[float]:
        """Numbers of the output and of all gradients."""
        self._times = max(1, int(TURN_SECONDS / self._timer.timeit(2).mean))
        numbers = [one.detach().flatten().float() for one in self._both()]
        return torch.cat([one[:: max(1, len(one) // 500)] for one in numbers]).tolist()

    def turn(self) -> float:
        """Seconds of one call, forward and backward."""
        return self._timer.timeit(self._times).mean


@benchmark
def cpu_kernels(
    setup: Setup, kind: str = each(*KINDS), seq: int = each(512), tokens: int = 4096
) -> Iterator[Case]:
    """Our kernels for CPUs beside torch's operations, forward and backward, of 4096 tokens; seq: of
    attention. Both sides are in one process."""
    if setup.small:
        tokens, seq = 32, 16
    if kind == "bf16 attention" and not implementation(kind, seq):
        return
    given = {"kind": kind, "seq": seq, "tokens": tokens}
    subject = "cases.kernels:Kernel"
    sides = setup.ours("ours", subject, {**given, "ours": True}, here=True)
    sides.append(Side("torch", subject, {**given, "ours": False}, ours=False, here=True))
    name = f"{kind}, {seq} positions" if "attention" in kind else kind
    yield Case(name, sides, tokens, "tokens", 3e-2 if kind == "bf16 attention" else 1e-3)
