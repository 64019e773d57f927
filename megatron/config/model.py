"""The architecture of a model: its flags, and what each of its layers is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.config.model_flags import ModelFlags
from megatron.config.model_flags import TransformerConfig as TransformerConfig
from megatron.config.rope import Rope
from megatron.model.blocks.attention.facts import Attention
from megatron.model.blocks.block import (
    AFTER_MIXER,
    AFTER_MLP,
    BEFORE_MIXER,
    BEFORE_MLP,
    Block,
    LayerSpec,
    Mixer,
    Residual,
)
from megatron.model.blocks.mlp.facts import DenseMLP


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelFlags):
    """The architecture of the model."""

    def _layer(
        self, symbols: str, rope: Rope | None, window: int | None, comm_type: str
    ) -> LayerSpec:
        """One that differs from others in these; `symbols` as of --hybrid-layer-pattern."""
        residual: Residual = "pre"
        if self.use_parallel_residual:
            residual = "parallel"
        elif self.apply_residual_connection_post_layernorm:
            residual = "normed"
        mixer = mlp = None
        if "*" in symbols:
            mixer = replace(self._mixer(rope, window), comm_type=comm_type)
        elif "G" in symbols:
            mixer = self._delta_net()
        if "E" in symbols or "-" in symbols:
            mlp = self._experts() if "E" in symbols else DenseMLP(self)
        norms = (
            (BEFORE_MIXER, mixer and not self.no_pre_layernorm),
            (AFTER_MIXER, mixer and self.post_self_attn_layernorm),
            (BEFORE_MLP, mlp and not self.no_pre_layernorm),
            (AFTER_MLP, mlp and self.post_mlp_layernorm),
        )
        return LayerSpec(
            mixer=mixer,
            mlp=mlp,
            residual=residual,
            norms=tuple(name for name, present in norms if present),
        )

    def _mixer(self, rope: Rope | None, window: int | None) -> Mixer:
        if not self.multi_latent_attention:
            return Attention(self, rope, window)
        from megatron.model.blocks.mla.facts import LatentAttention

        return LatentAttention(self, rope)

    def _delta_net(self) -> Mixer:
        from megatron.model.blocks.gated_delta.facts import GatedDeltaNet

        return GatedDeltaNet(self)

    def _experts(self) -> Block:
        from megatron.model.blocks.moe.facts import MixtureOfExperts

        return MixtureOfExperts(self)

    def layer(self, number: int) -> LayerSpec:
        """What the layer of this (global) number is made of; multi-token prediction's are counted
        on behind the decoder's."""
        return _layers(self)[number]

    def layer_counts(self, numbers: Iterable[int] | None = None) -> Counter[LayerSpec]:
        """How many of these layers (default: all) are alike."""
        return Counter(
            _layers(self) if numbers is None else map(_layers(self).__getitem__, numbers)
        )

    @property
    def blocks(self) -> Counter[Block]:
        """In how many layers each block is, mixers first."""
        specs = self.layer_counts().items()
        counts: Counter[Block] = Counter()
        for mixers in (True, False):
            for spec, count in specs:
                for block in (*spec.blocks, *spec.outer):
                    if isinstance(block, Mixer) is mixers:
                        counts[block] += count
        return counts

    @property
    def blocks_text(self) -> str:
        """The blocks in words, with the number of layers where not all have it."""
        counts: Counter[str] = Counter()
        for block, count in self.blocks.items():
            counts[block.text] += count
        layers = len(_layers(self))
        return ", ".join(
            text + (f" in {count} of {layers} layers" if count < layers else "")
            for text, count in counts.items()
        )


@lru_cache(maxsize=8)
def _layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """All layers; equal ones are the same object."""
    specs: dict[tuple[str, Rope | None, int | None, str], LayerSpec] = {}
    layers: list[LayerSpec] = []
    for number in range(model.num_layers + bool(model.mtp_num_layers)):
        like = min(number, model.num_layers - 1)
        differs = (
            model.symbols(number),
            model.rope(like),
            model.window_of(like),
            model.comm_type_of(like),
        )
        if differs not in specs:
            specs[differs] = model._layer(*differs)
        layers.append(specs[differs])
    if model.mtp_num_layers:
        from megatron.model.blocks.mtp.facts import MTPLayerSpec, Projection

        behind = MTPLayerSpec(**vars(layers.pop()), projection=Projection(model))
        layers += [behind] * len(model.mtp_layers)
    return tuple(layers)
