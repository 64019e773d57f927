"""Linear layers and the embedding, split over tensor-parallel ranks.

Split layers after Shoeybi et al. 2019 (Megatron-LM) and Korthikanti et al. 2022 (sequence
parallelism). With one tensor-parallel rank every collective here is the identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from megatron.kernels.cross_entropy import cross_entropy
from megatron.kernels.implementation import choose
from megatron.kernels.kernels import Kernels
from megatron.kernels.linear import FEW_MULTIPLICATIONS, TpComm
from megatron.kernels.linear_implementations import (
    IMPLEMENTATIONS,
    Gemms,
    LinearSpec,
    ParameterGemms,
)
from megatron.kernels.weight_grads import LOW_PRECISION
from megatron.parallel.collectives import (
    reduce_from,
    scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.sharding import ParameterFactory

if TYPE_CHECKING:
    from megatron.parallel.fp8 import LayerScaling


def _linear(
    gemms: Gemms,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tp_comm: TpComm | None = None,
    *,
    accumulate: bool = True,
) -> torch.Tensor:
    """x W^T + b with W and b as matrix and vector; backward adds to their `main_grad` itself where
    they have one and `accumulate` allows it."""
    main_grad = getattr(weight, "main_grad", None) if accumulate else None
    bias_main_grad = getattr(bias, "main_grad", None) if accumulate else None
    return gemms.linear(
        x,
        *_as_matrices(weight, bias),
        accumulate_into=main_grad,
        accumulate_bias_into=bias_main_grad,
        tp_comm=tp_comm,
    )


def _as_matrices(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """W as a matrix and b as a vector: of gated layers they have a dimension more."""
    if weight.dim() > 2:
        weight = weight.flatten(0, -2)
    if bias is not None and bias.dim() > 1:
        bias = bias.flatten()
    return weight, bias


def _tp_comm(ctx: ParallelContext) -> TpComm | None:
    """From this rank's input of a layer split by output feature to the whole one, and back with its
    gradient."""
    tp = ctx.tp
    if tp.size == 1:
        return None
    if ctx.sequence_parallel:
        return TpComm(
            lambda x: start_all_gather(x, tp), lambda grad: start_reduce_scatter(grad, tp)
        )
    return TpComm(lambda x: lambda: x, lambda grad: start_all_reduce(grad, tp))


class _Embedding(torch.autograd.Function):
    """Rows by id, whose gradients are summed in fp32: torch sums them in the weight's format, and a
    frequent token's gradient in bf16 stops growing after some hundred occurrences."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, main_grad: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        ctx.dtype = weight.dtype
        ctx.main_grad = main_grad
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        (ids,) = ctx.saved_tensors
        wide = torch.promote_types(ctx.dtype, torch.float32)
        grad = grad.to(wide)
        total = ctx.main_grad
        if total is not None and total.dtype == wide:
            add_rows_(total, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))
            return None, None, None
        dense = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.rows, -1, False)
        if total is None:
            return None, dense.to(ctx.dtype), None
        total.add_(dense)
        return None, None, None


def add_rows_(total: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """total [v, h] += rows [n, h] at ids [n], in a fixed order; touches only the rows used."""
    if total.device.type == "cpu":
        total.index_add_(0, ids, rows)
    else:  # sorts the ids, where index_add_ would add with atomics
        total.index_put_((ids,), rows, accumulate=True)


def embedding(ids: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """Rows of `weight` [v, h] by ids (any shape) -> [..., h]; backward adds to `weight.main_grad`
    if there is one."""
    return _Embedding.apply(ids, weight, getattr(weight, "main_grad", None))


class LinearLayer(nn.Module):
    """A linear layer, computed by one of kernels/linear_implementations.py. `scaling`: its FP8
    GEMMs, None for GEMMs in the parameter dtype. `engine`: Transformer Engine's module in its
    place."""

    gemms: Any = ParameterGemms

    def __init__(
        self,
        weight: nn.Parameter,
        scaling: LayerScaling | None = None,
        kernels: Kernels = Kernels(),
        engine: nn.Module | None = None,
    ):
        super().__init__()
        self.weight = weight
        self.scaling = scaling
        self.engine = engine
        self.accumulate = kernels.accumulation
        spec = LinearSpec(
            weight.device,
            weight.dtype,
            None if scaling is None else scaling.kind,
            engine is not None,
        )
        self.implementation = choose(IMPLEMENTATIONS, spec).implementation

    def forward(self, *inputs: Any) -> torch.Tensor:
        """As `compute`."""
        return self.implementation.forward(self, *inputs)


class _ParallelLinear(LinearLayer):
    """One whose weight tp splits. Transformer Engine's module does the collectives too."""

    mode: str  # what Transformer Engine calls the split

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        ctx: ParallelContext,
        scaling: LayerScaling | None = None,
        kernels: Kernels = Kernels(),
    ):
        engine = None
        if kernels.transformer_engine is not None:
            engine = kernels.transformer_engine.linear(
                self.mode,
                weight,
                bias,
                group=ctx.tp.group,
                size=ctx.tp.size,
                sequence_parallel=ctx.sequence_parallel,
            )
        super().__init__(weight, scaling, kernels, engine)
        self.bias = bias
        self.ctx = ctx
        self.alone = scaling is None and engine is None and ctx.tp.size == 1

    def forward(self, *inputs: Any) -> torch.Tensor:
        """As `compute`, by torch's own layer where that is faster and adds gradients, unrounded, to
        the same memory."""
        x = inputs[0]
        weight, bias = self.weight, self.bias
        if (
            torch.compiler.is_compiling()
            or not self.alone
            or x.dtype in LOW_PRECISION
            or x.numel() * weight.shape[:-1].numel() >= FEW_MULTIPLICATIONS
            or weight.grad is not getattr(weight, "main_grad", None)
            or (bias is not None and bias.grad is not getattr(bias, "main_grad", None))
        ):
            return super().forward(x)
        return F.linear(x, *_as_matrices(weight, bias))

    @classmethod
    def named(
        cls, name: str, params: ParameterFactory, ctx: ParallelContext, kernels: Kernels
    ) -> Self:
        """The layer of this name, with a bias where the table of parameters has one."""
        weight = params(f"{name}.weight")
        return cls(weight, params.optional(f"{name}.bias"), ctx, params.scaling(name), kernels)


class ColumnParallelLinear(_ParallelLinear):
    """y = x W^T + b with W split by output feature: the input is whole, the output this rank's
    features.

    weight [out/tp, in] or, gated, [2, out/tp, in] (then the output is [..., 2 * out/tp], gate
    first).
    """

    mode = "column"

    def compute(self, gemms: Gemms, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, in] ([s/tp, b, in] with sequence parallelism) -> [s, b, out/tp]."""
        comm = _tp_comm(self.ctx)
        return _linear(gemms, x, self.weight, self.bias, comm, accumulate=self.accumulate)


class RowParallelLinear(_ParallelLinear):
    """y = x W^T + b with W split by input feature: the input is this rank's features, the output
    the sum over ranks.

    weight [out, in/tp]; bias [out] whole on every rank.
    """

    mode = "row"

    def compute(self, gemms: Gemms, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, in/tp] -> [s, b, out] ([s/tp, b, out] with sequence parallelism)."""
        tp = self.ctx.tp
        if tp.size == 1:
            return _linear(gemms, x, self.weight, self.bias, accumulate=self.accumulate)
        y = _linear(gemms, x, self.weight, accumulate=self.accumulate)
        y = scatter_sequence(y, tp) if self.ctx.sequence_parallel else reduce_from(y, tp)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Rows of a table by token id, the table split by row: weight [v/tp, h]."""

    def __init__(self, weight: nn.Parameter, ctx: ParallelContext):
        super().__init__()
        self.weight = weight
        self.ctx = ctx

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [b, s] -> [s, b, h] ([s/tp, b, h] with sequence parallelism)."""
        tp = self.ctx.tp
        ids = tokens.t()
        if tp.size == 1:
            return embedding(ids, self.weight)
        rows = self.weight.shape[0]
        ids = ids - tp.rank * rows
        is_local = (ids >= 0) & (ids < rows)
        x = embedding(torch.where(is_local, ids, 0), self.weight) * is_local.unsqueeze(-1)
        return scatter_sequence(x, tp) if self.ctx.sequence_parallel else reduce_from(x, tp)


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, vocab_size: int, tp: Axis, **options: Any
) -> torch.Tensor:
    """Cross entropy of each token: logits [s, b, v/tp], labels [b, s] -> [b, s].

    `vocab_size` is the real one: padded columns are outside the softmax. `options` are those of
    `kernels.cross_entropy`. Backward overwrites the memory of `logits` with their gradient.
    """
    s, b, v = logits.shape
    rows = logits.view(s * b, v)
    ids = labels.t().reshape(s * b)
    if tp.size == 1:
        loss = cross_entropy(rows, ids, vocab_size=vocab_size, **options)
    else:
        from megatron.parallel.cross_entropy import parallel_cross_entropy

        loss = parallel_cross_entropy(rows, ids, vocab_size=vocab_size, tp=tp, **options)
    return loss.view(s, b).t()
