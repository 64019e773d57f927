"""Records the largest attention scores of a step, and scales the weights that make them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.config.tree import Config
from megatron.model.blocks.attention.module import SelfAttention
from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import all_reduce_
from megatron.parallel.context import ParallelContext
from megatron.parallel.sharding import local_box, sharding_of
from megatron.training.step_counter import StepCounter

METRIC = "max_attention_logit"


class AttentionLogits(StepCounter):
    """The largest scores [layers, heads] of all layers in a step, -inf where a rank has none; each
    attention adds to its own row. QK-clip (Kimi Team 2025, Kimi K2): a key head whose scores exceed
    the threshold t gets the factor t / largest, and its weights powers of that."""

    def __init__(
        self,
        config: Config,
        model: Iterable[GPTModel],
        ctx: ParallelContext,
        device: torch.device,
        *,
        threshold: float,
        alpha: float,
    ):
        m = config.model
        self._ctx = ctx
        self._groups = m.query_groups
        self._threshold = threshold
        dtype = torch.promote_types(getattr(torch, config.precision.params_dtype), torch.float32)
        shape = len(list(m.layer_counts().elements())), m.num_attention_heads
        self._largest = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        # by the name of a weight: its layer, and the rows of a key head with their powers
        self._rows: dict[str, tuple[int, tuple[tuple[int, float], ...]]] = {}
        local = m.num_attention_heads // ctx.tp.size
        own = slice(ctx.tp.rank * local, (ctx.tp.rank + 1) * local)
        for chunk in model:
            for layer in chunk.layers():
                for block in layer.blocks():
                    if isinstance(block, SelfAttention):
                        block.maxima = self._largest[layer.number, own]
                        self._add(layer.number, block, alpha)

    def _add(self, number: int, block: SelfAttention, alpha: float) -> None:
        parameters = dict(block.named_parameters())
        for name, rows in block.facts.clipped(alpha).items():
            if name in parameters:
                self._rows[sharding_of(parameters[name]).name] = number, rows

    def close(self, slots: torch.Tensor) -> None:
        """Agree with all ranks on the scores of the step, which `rescale` uses, and start those of
        the next."""
        self._agreed = all_reduce_(self._largest.clone(), self._ctx.world, "max")
        self._largest.fill_(-torch.inf)

    def logged(self) -> dict[str, float]:
        """The largest of all."""
        return {METRIC: self._agreed.max().item()}

    def rescale(self, param: torch.Tensor, main: torch.Tensor) -> None:
        """Scale `main`, the main weight of (a part of) a parameter, if that makes queries or
        keys."""
        sharding = sharding_of(param)
        if sharding.name not in self._rows:
            return
        number, rows = self._rows[sharding.name]
        largest = self._agreed[number].view(self._groups, -1).amax(1)  # of a key head
        factors = (self._threshold / largest).clamp(max=1.0)
        factors = torch.where(largest > 0, factors, 1.0).to(main.dtype)
        powers = [factors.pow(power).unsqueeze(1).expand(-1, count) for count, power in rows]
        (start, stop), *columns = local_box(sharding, self._ctx)
        by_row = torch.cat(powers, 1).flatten()[start:stop]
        width = columns[0][1] - columns[0][0] if columns else 1
        begin, end = getattr(param, "span", (0, by_row.numel() * width))
        main.view(-1).mul_(by_row.repeat_interleave(width)[begin:end])
