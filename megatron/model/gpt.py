"""GPT: embedding, transformer layers, output layer, loss.

Architecture after Radford et al. 2019 (GPT-2) with the options of Megatron-LM and Llama; readable
as if there were one device: what is parallel hides in the layers' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import (
    WORD_EMBEDDING,
    Scheme,
    count_parameters,
    parameter_table,
    stage_table,
)
from megatron.config.precision import PrecisionConfig
from megatron.kernels.kernels import Kernels
from megatron.model.embedding import Embedding, RotaryTables
from megatron.model.layer import Decoder, LayerInputs, Recompute
from megatron.parallel.collectives import all_gather
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.parallel.random import DropoutSeeds
from megatron.parallel.sharding import ParameterFactory, sharding_of

if TYPE_CHECKING:
    from megatron.model.moe import RouterStep

# What `GPTModel.forward` can return of each token in addition to the loss that is trained on.
UNSMOOTHED_LOSS = "token loss"  # without label smoothing
CORRECT = "token correct"  # bool: the label has the largest logit
TOKEN_METRICS = (UNSMOOTHED_LOSS, CORRECT)


@runtime_checkable
class HasKernels(Protocol):
    """A module that computes with what `Kernels` says."""

    def set_kernels(self, kernels: Kernels) -> None: ...


def hidden_dtype(model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the residual stream behind a layer of a model whose parameters are
    `dtype`."""
    wide = model.fp32_residual_connection and not model.apply_residual_connection_post_layernorm
    return torch.promote_types(dtype, torch.float32) if wide else dtype


class GPTModel(nn.Module):
    """A GPT, or the chunk of one that has the (global) `layers`.

    The chunk with the first layer has the embedding, the one with the last layer final norm, output
    layer and loss. Parameters are named as in `megatron.config.plan.parameters.parameter_table` and
    their memory is not filled: `megatron.parallel.sharding.init_parameters` or a checkpoint does
    that. Weights are [out, in]; a tied output layer uses the embedding's very parameter, or in
    another chunk a copy of the same name. `first`, `last`: does it hold the embedding, the output
    layer? By default where its layers are the first or last ones; a chunk of an end alone has no
    layers, and its neighbour must not have that end too. `kernels`: what layers compute with.
    `scheme`: initial values, if not Megatron's.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: ModelConfig,
        precision: PrecisionConfig,
        ctx: ParallelContext,
        padded_vocab_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        layers: range | None = None,
        first: bool | None = None,
        last: bool | None = None,
        recompute: Recompute | None = None,
        kernels: Kernels | None = None,
        scheme: Scheme | None = None,
    ):
        super().__init__()
        layers = range(model.num_layers) if layers is None else layers
        first = layers.start == 0 if first is None else first
        last = layers.stop == model.num_layers if last is None else last
        self.ctx = ctx
        self.vocab_size = vocab_size
        self.loss_dtype = torch.float16 if precision.fp16_lm_cross_entropy else None
        self.max_positions = model.max_position_embeddings or model.seq_length
        self.positions = model.positions
        self.label_smoothing = model.label_smoothing
        table = stage_table(
            parameter_table(model, padded_vocab_size, vocab_size, scheme), layers, first, last
        )
        kernels = kernels or Kernels()
        scaling = None
        if precision.fp8 is not None:
            from megatron.parallel.fp8 import scaling_factory

            scaling = scaling_factory(
                precision, ctx, device, dense=kernels.transformer_engine is None
            )
        params = ParameterFactory(table, ctx, dtype, device, scaling)
        self.embedding = Embedding(model, params.scope("embedding"), ctx) if first else None
        self.rotary = RotaryTables(model, dtype, device) if model.positions == "rope" else None
        self.decoder = Decoder(
            model, params.scope("decoder"), ctx, layers, last, recompute=recompute or Recompute()
        )
        self.output_layer = self._build_output_layer(model, params) if last else None
        self._use(kernels)
        self._check(
            count_parameters(table, {"tp": ctx.tp.size, "ep": ctx.ep.size, "etp": ctx.etp.size}),
            {spec.name for spec in table},
        )

    def _build_output_layer(
        self, model: ModelConfig, params: ParameterFactory
    ) -> ColumnParallelLinear:
        if not model.tied:
            weight: nn.Parameter = params("output_layer.weight")
        elif self.embedding is not None:
            weight = self.embedding.word_embeddings.weight
        else:
            weight = params(WORD_EMBEDDING)
        return ColumnParallelLinear(weight, None, self.ctx)

    def _use(self, kernels: Kernels) -> None:
        """Set the kernels of every layer; Transformer Engine is used in the transformer layers
        alone."""
        for module in list(self.decoder.modules()):
            if isinstance(module, HasKernels):
                module.set_kernels(kernels)
        if self.output_layer is not None:
            self.output_layer.set_kernels(kernels.without_transformer_engine())

    def _check(self, size: int, names: set[str]) -> None:
        """Check that the parameters of the table were built, each once."""
        built = {sharding_of(p).name for p in self.parameters()}
        assert built == names, (
            f"built but not in the table, or the reverse: {sorted(built ^ names)}"
        )
        count = sum(p.numel() for p in self.parameters())
        assert count == size, f"{count} parameters were built, {size} planned"

    def forward(
        self,
        tokens: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        dropout_seeds: DropoutSeeds | None = None,
        *,
        hidden: torch.Tensor | None = None,
        token_metrics: Sequence[str] | None = None,
        router_step: RouterStep | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Per-token losses [b, s] (fp32) with labels, else logits [b, s, vocab_size] of the real
        vocabulary. With labels and `token_metrics`, names of `TOKEN_METRICS` (there may be none):
        (losses, {name: its values [b, s], detached}).

        tokens, labels [b, s]. position_ids [b, s], or None for 0..s-1 (cheaper). document_ids [b,
        s] keeps attention inside documents. dropout_seeds: those of this micro-batch, or None for
        no dropout. router_step: with experts, in training and its evaluations, what routers
        exchange with the step; without one no token is dropped. A chunk without the first layer
        needs `hidden` [s, b, h] ([s/tp, b, h] with sequence parallelism), the output of the one
        before; a chunk without the last layer returns such a tensor. Raises ValueError where
        `hidden` is missing and, without position_ids, on a sequence longer than the position
        table. With context parallelism each s but that of document_ids is s/cp, and position_ids
        [b or 1, s/cp] must be given.
        """
        assert position_ids is not None or self.ctx.cp.size == 1, (
            "a rank's chunks of a sequence have no plain positions"
        )
        if self.embedding is None and hidden is None:
            raise ValueError(
                "this part of the model has no embedding: forward_step must pass "
                "hidden=batch.hidden to it"
            )
        s = self._length(tokens, hidden, position_ids)
        # The residual stream, [s, b, h] from here on: it starts as the tokens' embeddings, or comes
        # from the chunk before.
        x = hidden
        if self.embedding is not None:
            x = self.embedding(tokens, position_ids, dropout_seeds)
        # The layers add to it; the last chunk has the final norm too.
        rotary = None if self.rotary is None else self.rotary(s, position_ids)
        x = self.decoder(x, LayerInputs(rotary, document_ids, dropout_seeds, router_step))
        if self.output_layer is None:
            return x
        # Logits [s, b, padded vocabulary / tp]: each tensor-parallel rank has columns of its own.
        logits = self.output_layer(x)
        if labels is None:
            whole = all_gather(logits, self.ctx.tp, dim=-1)
            return whole[..., : self.vocab_size].transpose(0, 1)
        if token_metrics is None:
            return self._losses(logits, labels)
        return self._losses_and_metrics(logits, labels, token_metrics)

    def _losses(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        correct: torch.Tensor | None = None,
        unsmoothed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Losses [b, s], in training with label smoothing; fills `correct` and `unsmoothed`
        [s b]."""
        return vocab_parallel_cross_entropy(
            logits,
            labels,
            vocab_size=self.vocab_size,
            tp=self.ctx.tp,
            dtype=self.loss_dtype,
            smoothing=self._smoothing(),
            right=correct,
            plain=unsmoothed,
        )

    def _losses_and_metrics(
        self, logits: torch.Tensor, labels: torch.Tensor, names: Sequence[str]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Losses [b, s], and the values [b, s] of these `TOKEN_METRICS`."""
        correct = unsmoothed = None
        if CORRECT in names:
            correct = labels.new_empty(labels.numel(), dtype=torch.bool)
        if UNSMOOTHED_LOSS in names and self._smoothing():
            dtype = self.loss_dtype or torch.promote_types(logits.dtype, torch.float32)
            unsmoothed = logits.new_empty(labels.numel(), dtype=dtype)
        losses = self._losses(logits, labels, correct, unsmoothed)
        metrics = {}
        for name, values in ((UNSMOOTHED_LOSS, unsmoothed), (CORRECT, correct)):
            if values is not None:
                metrics[name] = values.view(logits.shape[:2]).t()
            elif name in names:  # without label smoothing
                metrics[name] = losses.detach()
        return losses, metrics

    def _smoothing(self) -> float:
        """Label smoothing is for training; evaluations are without."""
        return self.label_smoothing if torch.is_grad_enabled() else 0.0

    def _length(
        self,
        tokens: torch.Tensor | None,
        hidden: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> int:
        """Tokens of one sample, before any split over ranks."""
        if tokens is not None:
            s = tokens.shape[1] * self.ctx.cp.size
        else:
            assert hidden is not None, "a model with an embedding takes tokens"
            s = hidden.shape[0] * self.ctx.cp.size
            if self.ctx.sequence_parallel:
                s *= self.ctx.tp.size
        if self.positions != "none" and position_ids is None and s > self.max_positions:
            raise ValueError(
                f"a sequence of {s} tokens is longer than the {self.max_positions} positions of "
                f"--max-position-embeddings; shorten it or train with a larger table"
            )
        return s
