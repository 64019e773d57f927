"""The module of each kind of block."""

from __future__ import annotations

from megatron.model.blocks.attention.facts import Attention
from megatron.model.blocks.attention.module import SelfAttention
from megatron.model.blocks.block import Block, Mixer
from megatron.model.blocks.mlp.facts import DenseMLP
from megatron.model.blocks.mlp.module import MLP
from megatron.model.blocks.module import BlockModule

MODULES: dict[type[Block], type[BlockModule]] = {
    Attention: SelfAttention,
    DenseMLP: MLP,
}


def module_of(kind: type[Block]) -> type[BlockModule]:
    """What computes this kind; experts, latent attention and gated delta nets are loaded for a
    model that has some."""
    if kind not in MODULES and issubclass(kind, Mixer):
        from megatron.model.blocks.gated_delta.facts import GatedDeltaNet
        from megatron.model.blocks.gated_delta.module import GatedDelta
        from megatron.model.blocks.mla.facts import LatentAttention
        from megatron.model.blocks.mla.module import MultiLatentAttention

        MODULES[LatentAttention] = MultiLatentAttention
        MODULES[GatedDeltaNet] = GatedDelta
    elif kind not in MODULES:
        from megatron.model.blocks.moe.facts import MixtureOfExperts
        from megatron.model.blocks.moe.module import MoELayer

        MODULES[MixtureOfExperts] = MoELayer
    return MODULES[kind]
