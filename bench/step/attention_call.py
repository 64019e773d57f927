"""A subject that computes attention alone."""

from __future__ import annotations

import torch
from subject import Subject
from torch.utils import benchmark

from megatron.kernels.attention import attention
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec

TURN_SECONDS = 0.5


class Attention(Subject):
    """Forward and backward of one layer's attention, heads of 64 channels."""

    def __init__(self, s: int, heads: int, window: int, kernel: str, dtype: str):
        random = torch.Generator().manual_seed(1)
        shape = (s, 1, heads, 3, 64)
        fused = torch.randn(shape, generator=random, dtype=getattr(torch, dtype))
        self._qkv = [t.detach().requires_grad_() for t in fused.unbind(3)]
        self._grad = torch.ones_like(self._qkv[0])
        q, k, v = self._qkv
        spec = AttentionSpec.of(q, k, v, 0.125, window=window or None)
        self._call = AttentionCall(spec)
        self._kernel = kernel

    def work(self) -> None:
        """Forward and backward."""
        q, k, v = self._qkv
        out = attention(q, k, v, self._call, self._kernel)
        torch.autograd.grad(out, self._qkv, self._grad)

    def turn(self) -> float:
        """Seconds, the median of some."""
        calls = benchmark.Timer(
            "work()", globals={"work": self.work}, num_threads=torch.get_num_threads()
        )
        return calls.blocked_autorange(min_run_time=TURN_SECONDS).median
