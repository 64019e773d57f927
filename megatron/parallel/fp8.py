"""FP8 scales of linear layers, equal on all ranks that share a layer.

A scale belongs to a whole tensor: maxima are taken over the ranks that share it, so that every
layout casts to the same numbers. tensorwise: from the tensor itself. delayed: from its maxima in
the steps before; all micro-batches of a step have the same scales, whatever their order, and what
recompute sees again changes no maximum.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatron.config.precision import PrecisionConfig
from megatron.kernels.fp8 import (
    FORMATS,
    Cast,
    TensorScale,
    cast_weight,
    fitting_scale,
    grouped_linear_fp8,
    linear_fp8,
    scale_of,
)
from megatron.kernels.grouped_linear import Copies, combine, dispatch
from megatron.kernels.linear import TpComm
from megatron.parallel.collectives import all_reduce, all_reduce_
from megatron.parallel.context import ParallelContext
from megatron.parallel.sharding import Sharding

# of the names in a checkpoint: state that goes with the optimizer's
PREFIX = "optimizer.fp8_scaling."
_TENSORS = 3  # of a layer: input, weight, gradient of the output


class LayerScaling:
    """The scales of one linear layer's input, weight and output gradient, in this order.

    state [3, 1 + history]: the delayed scales, then each tensor's maxima of the last steps, the
    newest first (no history if tensorwise); zeros without `has_scales`, when a tensor is scaled by
    itself. step_amax [3]: the maxima of the step under way. weight_cast: the weight's while `keeps`
    (`weights_cast_once`).
    `experts`: the layer is that of all experts, which other ranks share.
    """

    def __init__(
        self,
        name: str,
        precision: PrecisionConfig,
        ctx: ParallelContext,
        device: torch.device | str,
        experts: bool = False,
    ):
        self.name = name
        self.kind = precision.fp8
        assert precision.fp8 is not None, "no scales without FP8 GEMMs"
        self.formats = FORMATS[precision.fp8]
        self.delayed = precision.fp8_recipe == "delayed"
        self.has_scales = False
        sharing = (ctx.etp, ctx.ep) if experts else (ctx.tp, ctx.cp)
        self.axes = [axis for axis in sharing if axis.size > 1]
        self.largest = [torch.finfo(self.formats[i // 2]).max for i in range(_TENSORS)]
        history = precision.fp8_amax_history_len if self.delayed else 0
        self.state = torch.zeros(_TENSORS, 1 + history, device=device)
        self.step_amax = torch.zeros(_TENSORS, device=device)
        self.keeps = False
        self.weight_cast: Cast | None = None

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        accumulate_into: torch.Tensor | None,
        accumulate_bias_into: torch.Tensor | None,
        tp_comm: TpComm | None,
    ) -> torch.Tensor:
        """The layer itself, as `kernels.fp8.linear_fp8`; autograd has the bias's gradient."""
        return linear_fp8(
            x,
            weight,
            bias,
            scaling=self,
            weight_cast=self._cast(weight),
            accumulate_into=accumulate_into,
            tp_comm=tp_comm,
        )

    def grouped_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        counts: Sequence[int],
        accumulate_into: torch.Tensor | None,
        is_first: Callable[[], bool],
        *,
        of: Copies | None,
        to: Copies | None,
    ) -> torch.Tensor:
        """The layer of experts itself, as `kernels.fp8.grouped_linear_fp8`, of copies as
        `grouped_linear`; weight gradients are always added."""
        y = grouped_linear_fp8(
            x if of is None else dispatch(x, of),
            weight,
            counts,
            scaling=self,
            weight_cast=self._cast(weight),
            accumulate_into=accumulate_into,
        )
        return y if to is None else combine(y, to)

    def _cast(self, weight: torch.Tensor) -> Cast:
        if self.weight_cast is not None:
            return self.weight_cast
        cast = cast_weight(weight, self, self.keeps or torch.is_grad_enabled())
        if self.keeps:
            self.weight_cast = cast
        return cast

    def scale(self, operand: int, amax: torch.Tensor, training: bool) -> TensorScale:
        """`scale_of` the input (0), the weight (1) or the output's gradient (2)."""
        if self.delayed and training:
            largest_amax = self.step_amax[operand]
            torch.maximum(largest_amax, amax, out=largest_amax)
        fixed = None
        if self.has_scales:
            fixed = self.state[operand, 0]
        else:
            for axis in self.axes:
                amax = all_reduce(amax, axis, "max")
        return scale_of(amax, fixed, self.largest[operand])


def _scalings(model: nn.Module) -> list[LayerScaling]:
    """The scales of all linear layers that have some."""
    of_modules = [getattr(module, "scaling", None) for module in model.modules()]
    return [scaling for scaling in of_modules if scaling is not None]


@contextmanager
def weights_cast_once(model: nn.Module) -> Iterator[None]:
    """Inside, every layer casts its weight the first time and keeps the cast: for the micro-batches
    of a step, which changes no weight before its end."""
    layers = _scalings(model)
    for layer in layers:
        layer.keeps = True
    try:
        yield
    finally:
        for layer in layers:
            layer.keeps = False
            layer.weight_cast = None


def scaling_factory(
    precision: PrecisionConfig, ctx: ParallelContext, device: torch.device | str, *, dense: bool
) -> Callable[..., LayerScaling | None]:
    """From a linear layer's name to its scales; without `dense` only for layers of experts."""

    def make(name: str, experts: bool = False) -> LayerScaling | None:
        return LayerScaling(name, precision, ctx, device, experts) if dense or experts else None

    return make


class DelayedScaling:
    """The delayed scales of all linear layers of this rank: updated once per step, saved and
    loaded."""

    def __init__(
        self, layers: Iterable[LayerScaling], precision: PrecisionConfig, ctx: ParallelContext
    ):
        self.layers = list(layers)
        self.ctx = ctx
        self.margin = precision.fp8_margin
        self.most_recent = precision.fp8_amax_compute_algo == "most_recent"
        first = self.layers[0]
        self.state = torch.stack([layer.state for layer in self.layers])
        self.step_amax = torch.stack([layer.step_amax for layer in self.layers])
        self.largest = torch.tensor(first.largest, device=first.state.device)
        for layer, state, step_amax in zip(self.layers, self.state, self.step_amax, strict=True):
            layer.state = state
            layer.step_amax = step_amax

    def tensors(self) -> dict[str, tuple[Sharding, torch.Tensor]]:
        """The state of every layer by its name in a checkpoint, live; all tensor- and data-parallel
        ranks hold the same."""
        tensors = {}
        for layer in self.layers:
            name = PREFIX + layer.name
            tensors[name] = Sharding(name, tuple(layer.state.shape)), layer.state
        return tensors

    def step(self, updated: bool) -> None:
        """The step's maxima become the newest of the history, and the scales follow; all ranks call
        this. A step without an update (`updated`) changes nothing.

        scale = largest number of the format / (newest or largest maximum of the history *
        2^margin). A maximum that is not finite counts as none, and a tensor without one keeps its
        scale, as in Transformer Engine.
        """
        if not updated:
            self.forget_step(self.layers[0].has_scales)
            return
        for axis in (self.ctx.tp, self.ctx.dp_cp):
            all_reduce_(self.step_amax, axis, "max")
        scales = self.state[..., 0]
        history = self.state[..., 1:]
        history[..., 1:] = history[..., :-1].clone()
        history[..., 0] = torch.where(self.step_amax.isfinite(), self.step_amax, 0.0)
        amax = history[..., 0] if self.most_recent else history.amax(-1)
        fitting = fitting_scale(amax, self.largest * 2.0**-self.margin)
        previous = torch.where(scales > 0, scales, 1.0)
        scales.copy_(torch.where(amax > 0, fitting, previous))
        self.forget_step(has_scales=True)

    def loaded(self) -> None:
        """Call it after a load into the state; a step in progress, if any, is discarded."""
        self.forget_step(has_scales=bool(self.state[..., 0].gt(0).all()))

    def forget_step(self, has_scales: bool) -> None:
        """Start an iteration. `has_scales`: are there any to use?"""
        self.step_amax.zero_()
        for layer in self.layers:
            layer.has_scales = has_scales


def delayed_scaling(
    model: nn.Module, precision: PrecisionConfig, ctx: ParallelContext
) -> DelayedScaling | None:
    """The delayed scales of a model's linear layers; None where no scale depends on the steps
    before."""
    layers = _scalings(model)
    if not layers or precision.fp8_recipe != "delayed":
        return None
    return DelayedScaling(layers, precision, ctx)
