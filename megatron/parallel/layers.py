"""Linear layers and the embedding, split over tensor-parallel ranks. Knows no attention, no MLP and no model.

Split layers after Shoeybi et al. 2019 (Megatron-LM) and Korthikanti et al. 2022 (sequence parallelism). With one
tensor-parallel rank every collective here is the identity.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.kernels import reference as kernels
from megatron.parallel.collectives import (
    reduce_from,
    scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.context import ParallelContext


def _linear(x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None = None,
            exchange: kernels.Exchange | None = None) -> torch.Tensor:
    """x W^T + b with W and b as matrix and vector; backward adds to `weight.main_grad` itself where there is one."""
    main_grad = getattr(weight, "main_grad", None)
    if weight.dim() > 2:
        weight, bias = weight.flatten(0, -2), None if bias is None else bias.flatten()
        main_grad = None if main_grad is None else main_grad.flatten(0, -2)
    return kernels.linear(x, weight, bias, accumulate_into=main_grad, exchange=exchange)


def _exchange(ctx: ParallelContext) -> kernels.Exchange | None:
    """From this rank's input of a layer split by output feature to the whole one, and back with its gradient."""
    tp = ctx.tp
    if tp.size == 1:
        return None
    if ctx.sequence_parallel:
        return kernels.Exchange(lambda x: start_all_gather(x, tp), lambda grad: start_reduce_scatter(grad, tp))
    return kernels.Exchange(lambda x: lambda: x, lambda grad: start_all_reduce(grad, tp))


class _Embedding(torch.autograd.Function):
    """Rows by id, whose gradients are summed in fp32: torch sums them in the weight's format, and a frequent token's
    gradient in bf16 stops growing after some hundred occurrences."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype, ctx.main_grad = weight.shape[0], weight.dtype, main_grad
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        ids, = ctx.saved_tensors
        wide = torch.promote_types(ctx.dtype, torch.float32)
        grad, total = grad.to(wide), ctx.main_grad
        if total is not None and total.dtype == wide and total.device.type == "cpu":
            total.index_add_(0, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))     # touches only the rows used
            return None, None, None
        dense = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.rows, -1, False)  # deterministic on CUDA too
        if total is None:
            return None, dense.to(ctx.dtype), None
        total.add_(dense)
        return None, None, None


def embedding(ids: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """Rows of `weight` [v, h] by ids (any shape) -> [..., h]; backward adds to `weight.main_grad` if there is one."""
    return _Embedding.apply(ids, weight, getattr(weight, "main_grad", None))


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with W split by output feature: the input is whole, the output this rank's features.

    weight [out/tp, in] or, gated, [2, out/tp, in] (then the output is [..., 2 * out/tp], gate first).
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ctx: ParallelContext):
        super().__init__()
        self.weight, self.bias, self.exchange = weight, bias, _exchange(ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, in] ([s/tp, b, in] with sequence parallelism) -> [s, b, out/tp]."""
        return _linear(x, self.weight, self.bias, self.exchange)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with W split by input feature: the input is this rank's features, the output the sum over ranks.

    weight [out, in/tp]; bias [out] whole on every rank.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ctx: ParallelContext):
        super().__init__()
        self.weight, self.bias, self.ctx = weight, bias, ctx

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, in/tp] -> [s, b, out] ([s/tp, b, out] with sequence parallelism)."""
        tp = self.ctx.tp
        if tp.size == 1:
            return _linear(x, self.weight, self.bias)
        y = _linear(x, self.weight)
        y = scatter_sequence(y, tp) if self.ctx.sequence_parallel else reduce_from(y, tp)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Rows of a table by token id, the table split by row: weight [v/tp, h]."""

    def __init__(self, weight: nn.Parameter, ctx: ParallelContext):
        super().__init__()
        self.weight, self.ctx = weight, ctx

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [b, s] -> [s, b, h] ([s/tp, b, h] with sequence parallelism)."""
        tp, ids = self.ctx.tp, tokens.t()
        if tp.size == 1:
            return embedding(ids, self.weight)
        rows = self.weight.shape[0]
        ids = ids - tp.rank * rows
        mine = (ids >= 0) & (ids < rows)
        x = embedding(torch.where(mine, ids, 0), self.weight) * mine.unsqueeze(-1)
        return scatter_sequence(x, tp) if self.ctx.sequence_parallel else reduce_from(x, tp)
