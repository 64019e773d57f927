"""Floating-point operations of one pass over tokens, counted in integers from shapes.

Convention: a multiply and an add are 2 operations; only GEMMs count; attention counts the FULL s x
s square (as Megatron's 2024 formula and most papers do), although a causal kernel does about half
of it, and s x w with a sliding window of w tokens; backward is twice forward; recompute is not part
of the model's FLOPs. TFLOP/s printed under another convention cannot be compared. Of a script's own
model only parameters are counted: 2 operations forward of each, for a token.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.config.model import ModelConfig
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config


class FlopCount(NamedTuple):
    """FORWARD operations for a token: of the layers' matrices and attention, and of the output
    layer, as often as it is computed."""

    linear: int
    core: int
    logits: int

    @property
    def forward(self) -> int:
        """All of them."""
        return sum(self)

    @property
    def model(self) -> int:
        """Those of a training step as MFU counts them: forward and backward."""
        return 3 * self.forward


def count_flops(model: ModelConfig, padded_vocab_size: int) -> FlopCount:
    """Exact count, from what each block says of itself."""
    linear = core = 0
    outputs = 1
    for block, layers in model.blocks.items():
        flops = block.flops()
        linear += layers * flops.linear
        core += layers * flops.core
        outputs += layers * flops.outputs
    return FlopCount(linear, core, 2 * model.hidden_size * padded_vocab_size * outputs)


def flops_per_sample(config: Config, plan: Plan) -> int:
    """Model FLOPs of training on one sequence (this suite's throughput figure)."""
    if plan.own_model:
        forward = 2 * sum(spec.size for spec in plan.parameters if spec.trained)
        return 3 * forward * config.model.seq_length
    return count_flops(config.model, plan.padded_vocab_size).model * config.model.seq_length


def teraflops_per_rank(flops: float, seconds: float, world_size: int) -> float:
    """TFLOP/s of each of `world_size` ranks that did `flops` together in `seconds`."""
    return flops / (seconds * world_size * 1e12)
