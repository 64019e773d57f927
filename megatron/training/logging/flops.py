"""Floating-point operations of one pass over tokens, counted in integers from shapes.

Convention: a multiply and an add are 2 operations; only GEMMs count; attention counts the FULL s x
s square (as Megatron's 2024 formula and most papers do), although a causal kernel does about half
of it, and s x w with a sliding window of w tokens; backward is twice forward, less what frozen
weights save; recompute is not part of the model's FLOPs. TFLOP/s printed under another convention
cannot be compared. Of a script's own model only parameters are counted: 2 operations forward of
each, for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from megatron.config.model import ModelConfig
from megatron.config.plan.buckets import EMBEDDING, HEAD, unit_of
from megatron.config.plan.parameter_spec import ParameterSpec
from megatron.config.plan.parameters import (
    MTP,
    OUTPUT_LAYER,
    active_size,
    head_weight,
    parameter_table,
)
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config


class FlopCount(NamedTuple):
    """Operations for a token: forward of the layers' matrices, of attention, and of the output
    layer, as often as it is computed; of all backward."""

    linear: int
    core: int
    logits: int
    backward: int

    @property
    def forward(self) -> int:
        """All of forward."""
        return self.linear + self.core + self.logits

    @property
    def model(self) -> int:
        """Those of a training step as MFU counts them."""
        return self.forward + self.backward


def count_flops(
    model: ModelConfig, padded_vocab_size: int, table: Sequence[ParameterSpec] = ()
) -> FlopCount:
    """Exact count, from the shapes of the matrices. Of the parameters in `table` (default: all of
    the model, trained) frozen ones have no gradients, and what comes before the first that is
    trained has no backward."""
    table = table or parameter_table(model, padded_vocab_size)
    of_head = 2 * model.hidden_size * padded_vocab_size
    trains_head = any(spec.trained for spec in table if spec.name == head_weight(model))
    linear = core = logits = backward = 0
    flows = False  # does what was computed so far have a gradient?
    for unit, group in groupby(table, lambda spec: unit_of(spec.name)):
        specs = list(group)
        matrices = [spec for spec in specs if len(spec.shape) > 1 and spec.name.endswith("weight")]
        behind: dict[str, int] = {}  # products without weights, by the matrix behind them
        if unit in (EMBEDDING, HEAD):
            matrices = []
        elif mixer := model.layer(unit[1] + model.num_layers * (unit[0] == MTP)).mixer:
            inside = [spec.name for spec in matrices if f".{mixer.scope}." in spec.name]
            behind[inside[-1]] = mixer.core_flops()
        for spec in specs:
            ops = 2 * active_size(model, spec) if spec in matrices else 0
            products = behind.get(spec.name, 0)
            linear += ops
            core += products
            backward += flows * (ops + 2 * products) + spec.trained * ops
            flows = flows or spec.trained and spec.name != OUTPUT_LAYER
        if unit[0] in (HEAD[0], MTP):
            logits += of_head
            backward += of_head * (flows + trains_head)
    return FlopCount(linear, core, logits, backward)


def flops_per_sample(config: Config, plan: Plan) -> int:
    """Model FLOPs of training on one sequence (this suite's throughput figure), with those of
    models that features have beside it."""
    if plan.own_model:
        size = sum(spec.size for spec in plan.parameters if spec.trained)
        return 6 * size * config.model.seq_length
    own = count_flops(config.model, plan.padded_vocab_size, plan.parameters).model
    return own * config.model.seq_length + sum(
        demands.other_flops(plan) for demands in config.demands
    )


def teraflops_per_rank(flops: float, seconds: float, world_size: int) -> float:
    """TFLOP/s of each of `world_size` ranks that did `flops` together in `seconds`."""
    return flops / (seconds * world_size * 1e12)
