"""GPT: embedding, transformer layers, output layer, loss.

Architecture after Radford et al. 2019 (GPT-2) with the options of Megatron-LM and Llama; readable
as if there were one device: what is parallel hides in the layers' names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import (
    WORD_EMBEDDING,
    Chunk,
    ParameterSpec,
    count_parameters,
    stage_table,
)
from megatron.config.precision import PrecisionConfig
from megatron.kernels.cross_entropy import RowOutputs, soft_cap
from megatron.kernels.kernels import Kernels
from megatron.model.blocks.module import LayerInputs, Recompute
from megatron.model.embedding import Embedding
from megatron.model.layer import Decoder, TransformerLayer
from megatron.parallel.collectives import gather_alike
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.parallel.random import DropoutSeeds, Place
from megatron.parallel.sharding import ParameterFactory, sharding_of

if TYPE_CHECKING:
    from megatron.model.blocks.module import RouterStep
    from megatron.model.blocks.mtp.module import Depths

# What a model can tell of each token besides the loss that is trained on.
UNSMOOTHED_LOSS = "token loss"  # without label smoothing
CORRECT = "token correct"  # bool: the label has the largest logit
TOKEN_METRICS = (UNSMOOTHED_LOSS, CORRECT)
LOG_Z = "token log Z"  # the logarithm of the softmax's denominator


@dataclass(frozen=True)
class TokenMetrics:
    """Those of the TOKEN_METRICS and LOG_Z that are asked for, by `names`; the model that computes
    losses fills `values`, [b, s] each, detached."""

    names: Sequence[str]
    values: dict[str, torch.Tensor] = field(default_factory=dict)


def hidden_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the residual stream behind a layer of a model whose parameters are
    `dtype`."""
    wide = config.fp32_residual_connection and not config.apply_residual_connection_post_layernorm
    return torch.promote_types(dtype, torch.float32) if wide else dtype


class GPTModel(nn.Module):
    """A GPT, or the `chunk` of one.

    `table`: the parameters of the whole GPT, of a plan or of
    `megatron.config.plan.parameters.parameter_table`; exactly these are built, by their names. The
    memory is not filled: `megatron.parallel.sharding.init_parameters` or a checkpoint does that.
    Weights are [out, in]; a tied output layer uses the embedding's very parameter, or in another
    chunk a copy of the same name. `vocab_size`: without padding. `kernels`: what layers compute
    with.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: PrecisionConfig,
        ctx: ParallelContext,
        table: Iterable[ParameterSpec],
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        chunk: Chunk | None = None,
        recompute: Recompute = Recompute(),
        kernels: Kernels = Kernels(),
    ):
        super().__init__()
        chunk = chunk or Chunk(range(config.num_layers), True, True, True)
        layers, first, final, last = chunk
        self.ctx = ctx
        self.vocab_size = vocab_size
        self.loss_dtype = torch.float16 if precision.fp16_lm_cross_entropy else None
        self.max_positions = config.max_position_embeddings or config.seq_length
        self.positions = config.positions
        self.label_smoothing = config.label_smoothing
        self.z_loss_coeff = config.z_loss_coeff
        self.softcap = config.final_logit_softcapping
        table = stage_table(table, chunk)
        scaling = None
        if precision.fp8 is not None:
            from megatron.parallel.fp8 import scaling_factory

            scaling = scaling_factory(
                precision, ctx, device, dense=kernels.transformer_engine is None
            )
        params = ParameterFactory(table, ctx, dtype, device, scaling)
        self.first = first
        self.hidden_dtype = hidden_dtype(config, dtype)
        embeds = first or (final and config.mtp_num_layers)
        self.embedding = Embedding(config, params.scope("embedding"), ctx) if embeds else None
        self.decoder = Decoder(
            config, params.scope("decoder"), ctx, layers, final, kernels, dtype, device, recompute
        )
        self.output_layer = self._build_output_layer(config, params, kernels) if last else None
        self.mtp = None
        if final and config.mtp_num_layers:
            from megatron.model.blocks.mtp.module import MultiTokenPrediction

            self.mtp = MultiTokenPrediction(
                config, params.scope("mtp"), ctx, kernels, dtype, device, recompute
            )
        self.moe_layers = self.decoder.moe_layers + (self.mtp.moe_layers if self.mtp else [])
        self._check(
            count_parameters(table, {"tp": ctx.tp.size, "ep": ctx.ep.size, "etp": ctx.etp.size}),
            {spec.name for spec in table},
        )

    def _build_output_layer(
        self, config: ModelConfig, params: ParameterFactory, kernels: Kernels
    ) -> ColumnParallelLinear:
        """Never by Transformer Engine, which computes the transformer layers alone."""
        if not config.tied:
            weight: nn.Parameter = params("output_layer.weight")
        elif self.embedding is not None:
            weight = self.embedding.word_embeddings.weight
        else:
            weight = params(WORD_EMBEDDING)
        return ColumnParallelLinear(
            weight, None, self.ctx, kernels=kernels.without_transformer_engine()
        )

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
        attention_mask: None = None,
        labels: torch.Tensor | None = None,
        *,
        document_ids: torch.Tensor | None = None,
        dropout_seeds: DropoutSeeds | None = None,
        hidden: torch.Tensor | None = None,
        router_step: RouterStep | None = None,
        token_metrics: TokenMetrics | None = None,
        depths: Depths | None = None,
    ) -> torch.Tensor:
        """Per-token losses [b, s] (fp32) with labels, else logits [b, s, vocab_size] of the real
        vocabulary; of a chunk without output layer hidden states [s, b, h] ([s/tp, b, h] with
        sequence parallelism), behind multi-token prediction [(1 + depths) s, b, h].

        tokens, labels [b, s]. position_ids [b, s], or None for 0..s-1 (cheaper). attention_mask:
        None; attention is causal, and document_ids [b, s] keep it inside documents.
        dropout_seeds: those of this micro-batch, or None for no dropout. hidden: what the chunk
        before returned, for a chunk without the first layer. router_step: with experts, in training
        and its evaluations, what routers exchange with the step; without one no token is dropped.
        token_metrics: with labels, filled. depths: of multi-token prediction, whose losses are
        added in backward. With context parallelism each s but that of document_ids
        is s/cp, and position_ids [b or 1, s/cp] must be given. Raises ValueError for an
        attention_mask, without `hidden` where it is needed, and, without position_ids, for a
        sequence longer than the position table.
        """
        if attention_mask is not None:
            raise ValueError(
                "the model takes no attention_mask: attention is causal; pass None, and "
                "document_ids=, the document of each token, to keep it inside documents "
                "[attention-mask-given]"
            )
        assert position_ids is not None or self.ctx.cp.size == 1, (
            "a rank's chunks of a sequence have no plain positions"
        )
        if not self.first and hidden is None:
            raise ValueError(
                "this part of the model has no embedding: forward_step must pass **batch.extras to "
                "it [extras-missing]"
            )
        s = self._length(tokens, hidden, position_ids)
        # The residual stream, [s, b, h] from here on: it starts as the tokens' embeddings, or comes
        # from the chunk before.
        x = hidden
        if self.first:
            assert self.embedding is not None
            x = self.embedding(tokens, position_ids, dropout_seeds)
        # The layers add to it; the last chunk has the final norm too.
        inputs = LayerInputs(None, document_ids, dropout_seeds, router_step)
        x = self.decoder(x, inputs, s, position_ids)
        states = [x]
        if depths is not None and self.mtp is not None:
            assert self.embedding is not None
            states = self.mtp(x, self.embedding, inputs, depths, s, position_ids)
        if self.output_layer is None:
            x = torch.cat(states) if len(states) > 1 else x
            return x.to(self.hidden_dtype)
        if self.decoder.final_layernorm is None:  # the stage before has it, and self.mtp
            received = x.to(self.output_layer.weight.dtype)
            states = list(received.chunk(1 if depths is None else 1 + len(depths.depths)))
        x = states[0]
        if labels is not None:
            if depths is not None:
                x = depths.add_losses(states, self._told)
            return self.losses(self.output_layer(x), labels, token_metrics)
        all_logits = gather_alike(self.logits(x), self.ctx.tp, dim=-1)
        return all_logits[..., : self.vocab_size].transpose(0, 1)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Capped logits [s, b, padded vocabulary / tp] of hidden states [s, b, h]: each
        tensor-parallel rank has columns of its own."""
        assert self.output_layer is not None, "a chunk with the last layer"
        logits = self.output_layer(x)
        return logits if self.softcap is None else soft_cap(logits, self.softcap)

    def losses(
        self, logits: torch.Tensor, labels: torch.Tensor, metrics: TokenMetrics | None = None
    ) -> torch.Tensor:
        """Losses [b, s] of logits [s, b, padded vocabulary / tp] before their cap, whose memory
        backward overwrites; fills `metrics`."""
        # Label smoothing and z-loss are for training; evaluations are without.
        training = torch.is_grad_enabled()
        smoothing = self.label_smoothing if training else 0.0
        z_loss = self.z_loss_coeff if training else 0.0
        names = () if metrics is None else metrics.names
        correct = unsmoothed = log_z = None
        dtype = self.loss_dtype or torch.promote_types(logits.dtype, torch.float32)
        if CORRECT in names:
            correct = labels.new_empty(labels.numel(), dtype=torch.bool)
        if UNSMOOTHED_LOSS in names and smoothing:
            unsmoothed = logits.new_empty(labels.numel(), dtype=dtype)
        if LOG_Z in names or z_loss:
            log_z = logits.new_empty(labels.numel(), dtype=dtype)
        losses = vocab_parallel_cross_entropy(
            logits,
            labels,
            vocab_size=self.vocab_size,
            tp=self.ctx.tp,
            dtype=self.loss_dtype,
            smoothing=smoothing,
            z_loss=z_loss,
            softcap=self.softcap,
            outputs=RowOutputs(correct, unsmoothed, log_z),
        )
        if metrics is None:
            return losses
        metrics.values[UNSMOOTHED_LOSS] = losses.detach()
        for name, values in (
            (UNSMOOTHED_LOSS, unsmoothed),
            (CORRECT, correct),
            (LOG_Z, log_z),
        ):
            if values is not None:
                metrics.values[name] = values.view(logits.shape[:2]).t()
        return losses

    def _told(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [b, s] of hidden states [s, b, h], and where the label has the largest logit."""
        assert self.output_layer is not None, "a chunk with the last layer"
        metrics = TokenMetrics((CORRECT,))
        return self.losses(self.output_layer(x), labels, metrics), metrics.values[CORRECT]

    def layer(self, number: int) -> nn.Module:
        """The transformer layer of this (global) number."""
        return next(layer for layer in self.layers() if layer.number == number)

    def layers(self) -> list[TransformerLayer]:
        """All transformer layers, in order."""
        behind = [] if self.mtp is None else [each.transformer_layer for each in self.mtp.layers]
        return [*self.decoder.layers.values(), *behind]

    def calls(self) -> list[tuple[Any, ...]]:
        """The modules with weights in the order in which a forward pass of training calls them,
        each with those whose weights it reads beside its own."""
        first = [self.embedding] if self.first else []
        norm = [] if self.decoder.final_layernorm is None else [self.decoder.final_layernorm]
        output = [] if self.output_layer is None else [self.output_layer]
        return [
            *((module,) for module in (*first, *self.decoder.layers.values(), *norm)),
            *((layer, self.embedding) for layer in (self.mtp.layers if self.mtp else ())),
            *((module,) for module in output),
        ]

    def dropout_places(self) -> list[Place]:
        """Where it takes seeds of dropout."""
        places = [self.embedding.place] if self.embedding and self.embedding.dropout else []
        for layer in self.layers():
            places += [(layer.number, *site) for site in layer.dropout_sites.items()]
        return places

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
