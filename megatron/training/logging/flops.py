"""Floating-point operations of one pass over tokens, counted in integers from shapes.

Convention: a multiply and an add are 2 operations; only GEMMs count; attention counts the
FULL s x s square (as Megatron's 2024 formula and most papers do), although a causal kernel does
about half of it; backward is twice forward; recompute is not part of the model's FLOPs. TFLOP/s
printed under another convention cannot be compared. Of a script's own model only parameters are
counted: 2 operations forward of each, for a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.plan.plan import Plan
from megatron.config.tree import Config

CONVENTION = "full s^2 attention, backward = 2 x forward, no recompute"


@dataclass(frozen=True)
class TransformerShape:
    """The sizes that matter: `gated` for swiglu or geglu, `vocab_size` as padded, `kv_channels` per
    head. With experts, over all layers: `active_width` of the MLPs that compute a token,
    `router_outputs`. Of a script's own model there are no layers and no vocabulary, and
    `own_parameters` are those that are trained."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    gated: bool
    vocab_size: int
    seq_length: int
    active_width: int | None = None
    router_outputs: int = 0
    own_parameters: int = 0

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.kv_channels * self.num_attention_heads

    @property
    def key_size(self) -> int:
        """Width of all key heads together (values have the same)."""
        return self.kv_channels * self.num_query_groups


def model_shape(config: Config, plan: Plan) -> TransformerShape:
    """The sizes that floating-point operations depend on."""
    m = config.model
    if plan.own_model:
        trained = sum(spec.size for spec in plan.parameters if spec.trained)
        return TransformerShape(0, 1, 0, 1, 1, 1, False, 0, m.seq_length, own_parameters=trained)
    return TransformerShape(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.query_groups,
        kv_channels=m.head_dim,
        gated=m.gated,
        vocab_size=plan.padded_vocab_size,
        seq_length=m.seq_length,
        active_width=sum(map(m.active_width, range(m.num_layers))),
        router_outputs=len(m.moe_layers) * ((m.num_experts or 0) + m.moe_shared_expert_gate),
    )


@dataclass(frozen=True)
class FlopCount:
    """FORWARD operations per token of `num_layers` layers (first three) and of the output layer, or
    of a script's `own` model."""

    attention_linear: int
    attention_core: int
    mlp: int
    logits: int
    own: int = 0

    @property
    def forward(self) -> int:
        """Operations per token, forward."""
        return self.attention_linear + self.attention_core + self.mlp + self.logits + self.own

    @property
    def model(self) -> int:
        """Operations per token of a training step as MFU counts them: forward and backward."""
        return 3 * self.forward


def count_flops(shape: TransformerShape) -> FlopCount:
    """Exact count per token for any ffn width, grouped-query attention and gated MLPs."""
    h = shape.hidden_size
    layers = shape.num_layers
    width = layers * shape.ffn_hidden_size if shape.active_width is None else shape.active_width
    return FlopCount(
        attention_linear=layers * 2 * h * (2 * shape.query_size + 2 * shape.key_size),
        attention_core=layers * 4 * shape.seq_length * shape.query_size,
        mlp=2 * h * (width * (3 if shape.gated else 2) + shape.router_outputs),
        logits=2 * h * shape.vocab_size,
        own=2 * shape.own_parameters,
    )


def flops_per_iteration(shape: TransformerShape, batch_size: int) -> int:
    """Model FLOPs of one training iteration over `batch_size` sequences (this suite's throughput
    figure)."""
    return count_flops(shape).model * batch_size * shape.seq_length


def teraflops_per_rank(flops: float, seconds: float, world_size: int) -> float:
    """TFLOP/s of each of `world_size` ranks that did `flops` together in `seconds`."""
    return flops / (seconds * world_size * 1e12)
