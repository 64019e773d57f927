"""The module of each kind of block."""

from __future__ import annotations

from megatron.model.blocks.attention.facts import Attention
from megatron.model.blocks.attention.module import SelfAttention
from megatron.model.blocks.block import Block
from megatron.model.blocks.mlp.facts import DenseMLP
from megatron.model.blocks.mlp.module import MLP
from megatron.model.blocks.module import BlockModule
from megatron.model.blocks.moe.facts import MixtureOfExperts
from megatron.model.blocks.moe.module import MoELayer

MODULES: dict[type[Block], type[BlockModule]] = {
    Attention: SelfAttention,
    DenseMLP: MLP,
    MixtureOfExperts: MoELayer,
}
