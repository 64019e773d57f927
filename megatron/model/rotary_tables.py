"""The tables of rotary angles."""

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.rope import Rope
from megatron.kernels.rotary import rotary_tables


class RotaryTables(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021), computed once for every position
    there can be; LongRoPE has a second pair for long sequences. tokens: how many there may be in
    each sequence of a cache; else the calls say it."""

    tokens: int | None = None
    cos: torch.Tensor
    sin: torch.Tensor
    long_cos: torch.Tensor
    long_sin: torch.Tensor

    def __init__(
        self, config: ModelConfig, rope: Rope, dtype: torch.dtype, device: torch.device | str
    ):
        super().__init__()
        self.rope = rope
        longrope = rope.longrope
        pairs: dict[str, Sequence[float] | None] = {"": None}
        if longrope is not None:
            pairs = {"": longrope.short, "long_": longrope.long}
        for prefix, divisors in pairs.items():
            tables = rotary_tables(
                config.max_position_embeddings or config.seq_length,
                rope.width,
                rope.base,
                device=device,
                interpolation_factor=rope.interpolation,
                scaling_factor=rope.scaling,
                yarn=rope.yarn,
                divisors=divisors,
                length=1.0 if longrope is None else longrope.length,
                dtype=torch.promote_types(dtype, torch.float32),
            )
            for name, table in zip(("cos", "sin"), tables, strict=True):
                self.register_buffer(prefix + name, table, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Of `.to`: the tables move with the model, but are not rounded to 16 bits."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        wide = torch.promote_types(self.cos.dtype, torch.float32)
        if wide != self.cos.dtype:
            for name, table in before.items():
                setattr(self, name, table.to(self.cos.device, wide))
        return self

    def forward(
        self, length: int, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions 0..length-1, each [s, dim/2], or of position_ids [b or 1, s],
        each [s, b or 1, dim/2]."""
        cos, sin = self.cos, self.sin
        longrope = self.rope.longrope
        if longrope is not None and (self.tokens or length) > longrope.context:
            cos, sin = self.long_cos, self.long_sin
        if position_ids is None:
            return cos[:length], sin[:length]
        return F.embedding(position_ids.t(), cos), F.embedding(position_ids.t(), sin)
