"""A GPT and a small Llama in bare torch, the yardstick of the step benchmark.

Written for this benchmark, in the manner of nanoGPT: one class, fused query-key-value and gate-up
matrices, torch's own kernels, nothing that a short training script would not have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sizes import Size
from torch import Tensor, nn


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
    names = {
        "input_layernorm": "norm1",
        "pre_mlp_layernorm": "norm2",
        "linear_qkv": "qkv",
        "linear_proj": "proj",
        "linear_fc1": "fc1",
        "linear_fc2": "fc2",
    }
    tops = {
        "embedding.word_embeddings.weight": "words.weight",
        "output_layer.weight": "head.weight",
        "embedding.position_embeddings.weight": "positions.weight",
        "decoder.final_layernorm.weight": "norm.weight",
        "decoder.final_layernorm.bias": "norm.bias",
    }
    for name, value in params.items():
        if name in tops:
            state[tops[name]] = value
            continue
        _, _, layer, *_, module, kind = name.split(".")
        if module == "linear_qkv":
            value = value.unflatten(0, (heads, 3, -1)).transpose(0, 1)
            value = value.reshape(-1, *value.shape[3:])
        elif module == "linear_fc1" and value.dim() > (2 if kind == "weight" else 1):
            value = value.flatten(0, 1)
        state[f"blocks.{layer}.{names[module]}.{kind}"] = value
    state.setdefault("head.weight", state["words.weight"])
    return state
