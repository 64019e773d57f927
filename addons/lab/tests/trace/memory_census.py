"""A census of a run's CPU tensors in each training step, taken with the branches that a device
would take. Knows no formula and nothing of the plan or the trace."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Census(TorchDispatchMode):
    """While it is on: bytes of every storage on the CPU that an operation has taken or returned, until
    it is freed (`live`), and the most there were (`peak`). What an operation uses inside and frees
    again is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                self._see(x.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that comes and goes without an operation."""
        if storage._cdata in self._known:
            reference, before = self._known[storage._cdata]
            self._known[storage._cdata] = reference, storage.nbytes()
            self.live += storage.nbytes() - before
            self.peak = max(self.peak, self.live)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes()
        self._known[key] = weakref.ref(storage, partial(self._freed, key)), nbytes
        self.live += nbytes

    def _freed(self, key: int, reference: weakref.ref) -> None:
        self.live -= self._known.pop(key)[1]


def watch() -> None:
    """A hook of tests.runs.train: every rank writes the peak of each step next to its log."""
    from megatron.training import loop

    take_device_branches()
    census = Census()
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        census.resized(storage)

    torch.UntypedStorage.resize_ = resized
    census.__enter__()
    peaks: list[int] = []
    step = loop.train_step
    train = loop.train

    def train_step(*args: Any, **kwargs: Any) -> Any:
        census.peak = census.live
        out = step(*args, **kwargs)
        peaks.append(census.peak)
        return out

    def train_all(run: Any, *args: Any, **kwargs: Any) -> Any:
        found = train(run, *args, **kwargs)
        census.__exit__(None, None, None)
        file = Path(run.config.logging.metrics_file).with_name(f"census.{os.environ['RANK']}")
        file.write_text(json.dumps(peaks))
        return found

    loop.train_step = train_step
    loop.train = train_all


def read(folder: Path, rank: int) -> int:
    """The least peak of the steps of a rank that was watched: they do the same, but gloo's thread
    may keep for a moment what it has sent."""
    return min(json.loads((folder / f"census.{rank}").read_text()))


def take_device_branches() -> None:
    """Tensors of the CPU go through the operations that those of an accelerator go through, in this
    process from now on."""
    from megatron.kernels import block_attention, cross_entropy, dropout, linear
    from megatron.kernels.cpu import blocking, native
    from megatron.kernels.cuda import availability
    from megatron.optimizer import clip_grads
    from megatron.parallel import collectives, layers

    for function in (
        blocking.pays_off,
        block_attention._Plan.head_sets,
        block_attention.read_ids,
        cross_entropy.row_chunks,
        dropout.DropoutBits.__init__,
        linear._by_onednn,
        clip_grads.sum_of_squares,
        layers.add_rows_,
        availability.fused_ops,
    ):
        _without_cpu(function)
    _fuse()
    native.LEVELS.clear()  # no C++
    native.load_built.cache_clear()
    F.rms_norm = rms_norm
    # what has arrived early would be freed early: memory would depend on the network
    collectives.Pending.arrived = False


def _fuse() -> None:
    """SwiGLU, rotary positions, dropout and each way of the loss are one operation, as by Triton on a
    GPU."""
    from megatron.kernels import dropout, rotary
    from megatron.kernels.cuda import availability, fused_ops

    def swiglu(gate_up: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = gate_up.unbind(-2)
        y = F.silu(gate) * up
        return y if weights is None else (y * weights.unsqueeze(-1)).to(y.dtype)

    def swiglu_backward(
        gate_up: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = gate_up.unbind(-2)
        of_weights = (grad * F.silu(gate) * up).sum(-1, dtype=torch.float32)
        if weights is not None:
            grad = (grad * weights.unsqueeze(-1)).to(grad.dtype)
        slope = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.stack((slope, grad * F.silu(gate)), -2), of_weights

    def sum_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x.new_zeros(1, x.shape[1])))[places].sum(1)

    def row_losses(logits: torch.Tensor, columns: torch.Tensor, valid: int, smoothing: float):
        real = logits[:, :valid].float()
        label = real.gather(1, columns[:, None]).squeeze(1)
        largest = real.amax(1)
        logs = (real - largest[:, None]).exp().sum(1).log()
        loss = logs + largest - (1 - smoothing) * label - smoothing * real.mean(1)
        return loss, torch.stack((largest, logs, real.sum(1), label))

    def loss_grad(
        logits, valid, largest, logs, columns, grads, hits, share, uniform
    ) -> torch.Tensor:
        p = (logits.float() - largest[:, None] - logs[:, None]).exp() - uniform
        grad = (p * grads[:, None]).scatter_add_(1, columns[:, None], -share * hits[:, None])
        grad[:, valid:] = 0
        return logits.copy_(grad)

    def rotate(x, cos, sin, sign, interleaved, batch_first) -> torch.Tensor:
        out = rotary._rotate(x, cos, sin, sign, interleaved)
        return fused_ops.empty_heads(x, True).copy_(out) if batch_first else out

    def drop(x, p, seed, residual=None) -> torch.Tensor:
        out = dropout._drop(x, p, int(seed))
        return out if residual is None else residual + out

    for name, function in (
        ("row_losses", row_losses),
        ("loss_grad_", loss_grad),
        ("swiglu", swiglu),
        ("swiglu_backward", swiglu_backward),
        ("sum_rows", sum_rows),
        ("rotate", rotate),
        ("move", lambda x, batch_first: fused_ops.empty_heads(x, batch_first).copy_(x)),
        ("drop", drop),
    ):
        fused_ops.LIBRARY.impl(name, function, "CPU")
    availability.unavailable_reason = lambda device, dtype: (
        None if dtype in availability.DTYPES else "not for this dtype"
    )


def _without_cpu(function: FunctionType) -> None:
    """Let no device be "cpu" in this function."""
    code = function.__code__
    assert "cpu" in code.co_consts, f"{function.__qualname__} has no branch for the CPU"
    constants = ("none" if one == "cpu" else one for one in code.co_consts)
    function.__code__ = code.replace(co_consts=tuple(constants))


class _RmsNorm(torch.autograd.Function):
    """One operation each way, that keeps what a GPU's kernel keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, inverse = torch.ops.census.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, inverse, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return *torch.ops.census.rms_norm_backward(grad, *ctx.saved_tensors), None


def rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As torch.nn.functional.rms_norm."""
    return _RmsNorm.apply(x, weight, eps)


def _operation(schema: str) -> Callable[[Callable], Callable]:
    _LIBRARY.define(schema)
    return torch.library.impl(_LIBRARY, schema.partition("(")[0], "CPU")


_LIBRARY = torch.library.Library("census", "DEF")


@_operation("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple:
    inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x * inverse * weight, inverse


@_operation(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor inverse, Tensor weight) -> (Tensor, Tensor)"
)
def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor
) -> tuple:
    y = x * inverse
    scaled = grad * weight
    shared = (scaled * y).mean(-1, keepdim=True)
    return (scaled - y * shared) * inverse, (grad * y).flatten(0, -2).sum(0)
