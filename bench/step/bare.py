"""A GPT and a small Llama in bare torch with a bare training loop: the yardstick of the step
benchmark. Does not import megatron/.

Written for this benchmark, in the manner of nanoGPT: one class, fused query-key-value and gate-up
matrices, torch's own kernels, nothing that a short training script would not have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sizes import BETAS, CLIP, LEARNING_RATE, WEIGHT_DECAY, Size
from torch import Tensor, nn

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]
NAMES = {
    "embedding.word_embeddings": "words",
    "embedding.position_embeddings": "positions",
    "output_layer": "head",
    "decoder.final_layernorm": "norm",
    "decoder.layers": "blocks",
    "input_layernorm": "norm1",
    "pre_mlp_layernorm": "norm2",
    "self_attention.linear_": "",
    "mlp.linear_": "",
}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x [b, s, h]."""

    def __init__(self, size: Size):
        super().__init__()
        gpt = size.family == "gpt"
        norm = nn.LayerNorm if gpt else nn.RMSNorm
        self.heads = size.heads
        self.gpt = gpt
        self.norm1 = norm(size.hidden, eps=1e-5)
        self.norm2 = norm(size.hidden, eps=1e-5)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=gpt)
        self.proj = nn.Linear(size.hidden, size.hidden, bias=gpt)
        self.fc1 = nn.Linear(size.hidden, size.ffn_size * (1 if gpt else 2), bias=gpt)
        self.fc2 = nn.Linear(size.ffn_size, size.hidden, bias=gpt)

    def attend(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Causal self-attention."""
        b, s, h = x.shape
        q, k, v = (
            t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(h, dim=2)
        )
        if rotary is not None:
            q = rotate(q, *rotary)
            k = rotate(k, *rotary)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(b, s, h))

    def feed(self, x: Tensor) -> Tensor:
        """The MLP."""
        x = self.fc1(x)
        if self.gpt:
            return self.fc2(F.gelu(x, approximate="tanh"))
        gate, up = x.chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attend(self.norm1(x), rotary)
        return x + self.feed(self.norm2(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the two halves of each head: x [b, n, s, d], cos and sin [s, d / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class BareModel(nn.Module):
    """The whole model: tokens and labels [b, s] -> mean loss."""

    def __init__(self, size: Size):
        super().__init__()
        gpt = size.family == "gpt"
        self.words = nn.Embedding(size.vocab, size.hidden)
        self.positions = nn.Embedding(size.seq, size.hidden) if gpt else None
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = (nn.LayerNorm if gpt else nn.RMSNorm)(size.hidden, eps=1e-5)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        if gpt:
            self.head.weight = self.words.weight
        else:
            width = size.hidden // size.heads
            angles = torch.outer(
                torch.arange(size.seq), 10000.0 ** (-torch.arange(0, width, 2) / width)
            )
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        rotary = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        else:
            rotary = self.cos, self.sin
        for block in self.blocks:
            x = block(x, rotary)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def megatron_to_bare(params: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """State of a BareModel from parameters by Megatron's global names (query-key-value rows by head
    there)."""
    state = {}
    for name, value in params.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if ".qkv." in name:
            value = value.unflatten(0, (heads, 3, -1)).transpose(0, 1)
            value = value.reshape(-1, *value.shape[3:])
        elif ".fc1." in name and value.dim() > (2 if name.endswith("weight") else 1):
            value = value.flatten(0, 1)
        state[name] = value
    return state


def build(size: Size, weights: dict[str, Tensor]) -> tuple[nn.Module, LossOf]:
    """The bare model with our weights (by Megatron's names), and its loss."""
    model = BareModel(size)
    model.load_state_dict(megatron_to_bare(weights, size.heads), strict=False)
    return model, lambda m, tokens, labels: m(tokens, labels)


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
