"""Linear layers whose weights do not change any more: the C++ of few_rows.py for a few rows on a
CPU, torch's otherwise. Their weights may be stored in 16 bits while x and y are fp32. Forward
only."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.cpu import few_rows
from megatron.kernels.grouped_linear import Copies, combine, dispatch
from megatron.model.blocks.moe.module import GroupedLinear
from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import reduce_from
from megatron.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

WIDENED = 2**22  # numbers of a weight of 16 bits that are in fp32 at a time


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] or None -> [..., out] in the dtype of x, in which
    it is computed whatever that of the weight is."""
    if bias is not None:
        bias = bias.to(x.dtype)
    if few_rows.runs(x, weight):
        return few_rows.linear(x, weight, bias)
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    outputs, width = weight.shape
    out = x.new_empty(*x.shape[:-1], outputs)
    step = max(1, WIDENED // max(1, width))
    for start in range(0, outputs, step):
        part = slice(start, start + step)
        widened = weight[part].to(x.dtype)
        out[..., part] = F.linear(x, widened, None if bias is None else bias[part])
    return out


class ParallelLinear(nn.Module):
    """A linear layer split over tensor-parallel ranks as in training, forward only; it has the
    parameters of that one."""

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear):
        super().__init__()
        self.sum_over = layer.ctx.tp if isinstance(layer, RowParallelLinear) else None
        if self.sum_over is not None and self.sum_over.size == 1:
            self.sum_over = None
        self.weight = layer.weight
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, in] -> [s, b, out], of this rank's features as in training."""
        weight = self.weight.flatten(0, -2)
        bias = None if self.bias is None else self.bias.flatten()
        if self.sum_over is None:
            return product(x, weight, bias)
        y = reduce_from(product(x, weight), self.sum_over)
        return y if bias is None else y + bias


class ExpertLinear(nn.Module):
    """A linear layer of every expert, as `GroupedLinear`; it has the
    parameters of that one, and the bias is added by who calls it."""

    in_one_call = False

    def __init__(self, layer: GroupedLinear):
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias

    def forward(
        self, x: Tensor, counts: list[int], of: Copies | None = None, to: Copies | None = None
    ) -> Tensor:
        """As GroupedLinear's `compute`."""
        rows = x if of is None else dispatch(x, of)
        experts = zip(rows.split(counts), self.weight.flatten(1, -2), strict=True)
        y = torch.cat([product(some, weight) for some, weight in experts])
        return y if to is None else combine(y, to)


def replace_linear_layers(model: nn.Module) -> None:
    """Each linear layer by one of the same weight that is faster without gradients."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, ColumnParallelLinear | RowParallelLinear):
                setattr(module, name, ParallelLinear(child))


def store_matrices_as(model: GPTModel, dtype: torch.dtype) -> None:
    """Give the matrices of linear layers and experts, and the word embedding, memory of this dtype,
    which is not filled. The model computes in the dtype that it was built with."""
    replace_linear_layers(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, GroupedLinear):
                setattr(module, name, ExpertLinear(child))
    for module in model.modules():
        if isinstance(module, ParallelLinear | ExpertLinear | VocabParallelEmbedding):
            module.weight.data = torch.empty_like(module.weight, dtype=dtype)
        if isinstance(module, VocabParallelEmbedding):
            module.register_forward_hook(lambda _, __, rows: rows.float())


def hidden_dtype(model: GPTModel) -> torch.dtype:
    """The dtype that the model computes in: that of its norms, whose weights are never stored in
    another one."""
    stored = (ParallelLinear, ExpertLinear, VocabParallelEmbedding)
    others = (module for module in model.modules() if not isinstance(module, stored))
    return next(p.dtype for module in others for p in module.parameters(recurse=False))
