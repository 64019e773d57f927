"""The layers of multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3), without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.config.model_flags import ModelFlags
from megatron.config.plan.parameter_spec import (
    ONE_MATRIX,
    LayerScheme,
    ParameterSpec,
    Scheme,
    drawn,
    norm,
)
from megatron.config.plan.transfer import Traffic, gathered_input, summed_result
from megatron.model.blocks.block import Block, LayerSpec, Rules, Sizes


@dataclass(frozen=True)
class Projection(Block):
    """eh_proj [h, 2 h] of a later token's embedding and a hidden state, with their norms; it is
    whole on each tensor-parallel rank."""

    scope = recomputed_as = "eh_proj"

    @property
    def text(self) -> str:
        """Its name."""
        return "multi-token prediction"

    def refuses(self, f: Rules) -> Iterator[str]:
        """Nothing beside what the flag declares."""
        return iter(())

    def uneven(self, tp: int, etp: int) -> Iterator[tuple[str, int]]:
        """Nothing is shared."""
        return iter(())

    def gemm_sizes(self, tp: int, etp: int) -> Iterator[tuple[int, str, str]]:
        """Its GEMM is never in FP8."""
        return iter(())

    def parameters(self, prefix: str, draw: LayerScheme) -> list[ParameterSpec]:
        """The two norms and the matrix, by Megatron's names."""
        h = self.model.hidden_size
        weight = ParameterSpec(
            f"{prefix}eh_proj.weight", (h, 2 * h), **drawn(draw("qkv")), matrices=ONE_MATRIX
        )
        return [
            *norm(self.model, f"{prefix}enorm", h),
            *norm(self.model, f"{prefix}hnorm", h),
            weight,
        ]

    def saved(self, sizes: Sizes) -> int:
        """The embedding's rows, the inputs of norms and of the GEMM; the loss keeps the hidden
        states that it norms."""
        normed = 2 * sizes.norm(sizes.rows, sizes.hidden, sizes.itemsize)
        embedded = sizes.tokens * 9 if sizes.tp > 1 else 0  # ids, and which are this rank's
        return normed + sizes.rows * sizes.hidden * sizes.itemsize + embedded

    def backward(self, sizes: Sizes) -> int:
        """Less than the loss behind it."""
        return 0

    def traffic(self, sizes: Sizes) -> Traffic:
        """The embedding's result and its gradient."""
        return Traffic(summed_result(sizes), gathered_input(sizes), [], [])


@dataclass(frozen=True)
class MTPLayerSpec(LayerSpec):
    """A transformer layer behind eh_proj, and a norm."""

    projection: Projection

    @property
    def outer(self) -> list[Block]:
        """eh_proj is not computed again with the layer."""
        return [self.projection]

    def parameters(
        self, model: ModelFlags, prefix: str, number: int, scheme: Scheme
    ) -> list[ParameterSpec]:
        """By Megatron's names."""
        table = [
            *self.projection.parameters(prefix, lambda role: scheme(role, number)),
            *super().parameters(model, f"{prefix}transformer_layer.", number, scheme),
            *norm(model, f"{prefix}final_layernorm", model.hidden_size),
        ]
        return [replace(spec, addition=prefix.removesuffix(".")) for spec in table]

    def saved(self, sizes: Sizes) -> int:
        """Of eh_proj and the layer, of which full recomputation leaves the input alone."""
        full = sizes.config.training.recompute == "full"
        layer = sizes.rows * sizes.hidden * sizes.residual if full else super().saved(sizes)
        return self.projection.saved(sizes) + layer
