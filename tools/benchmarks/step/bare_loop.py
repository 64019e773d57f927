"""The bare training loop of the step benchmark, around bare_model.py's model or any other. Does not
import megatron/."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from bare_model import BareModel, megatron_to_bare
from sizes import BETAS, CLIP, LEARNING_RATE, WEIGHT_DECAY, Size
from torch import Tensor, nn

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]


class BareLoop:
    """A training loop as short scripts have it: fp32 weights, autocast for bf16, clipping, fused
    AdamW.

    `loss_of(model, tokens, labels)` is the mean loss. The micro-batches `samples` [b, s+1] are in
    memory and are used in turn, so that reading data costs this loop nothing. `compiled`: the model
    goes through torch.compile.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: LossOf,
        size: Size,
        dtype: str,
        device: torch.device,
        samples: Sequence[Tensor],
        compiled: bool = False,
    ):
        model.to(device).train()
        self.model: Any = torch.compile(model) if compiled else model
        self.loss_of = loss_of
        self.device = device
        self.micro_batches = size.micro_batches
        self.bf16 = dtype == "bf16"
        self.samples = itertools.cycle([micro_batch.to(device) for micro_batch in samples])
        params = list(model.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._params = params
        self.optimizer = torch.optim.AdamW(
            groups, lr=LEARNING_RATE, betas=BETAS, eps=1e-8, fused=True
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the model."""
        return iter(self._params)

    def step(self) -> float:
        """One training step; its loss."""
        total = torch.zeros((), device=self.device)
        for _ in range(self.micro_batches):
            samples = next(self.samples)
            tokens = samples[:, :-1].contiguous()
            labels = samples[:, 1:].contiguous()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = self.loss_of(self.model, tokens, labels) / self.micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._params, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total.item()


def build(size: Size, weights: dict[str, Tensor]) -> tuple[nn.Module, LossOf]:
    """The bare model with our weights (by Megatron's names), and its loss."""
    model = BareModel(size)
    model.load_state_dict(megatron_to_bare(weights, size.heads), strict=False)
    return model, lambda m, tokens, labels: m(tokens, labels)
