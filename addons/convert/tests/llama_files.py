"""A Llama-style model with random weights as Hugging Face files, of any size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint.safetensors_file import Entry, write_file


def make_model(folder: Path, size: float, width: int = 2048, vocab: int = 32000) -> int:
    """Write a Hugging Face folder of a Llama-style model of about `size` bytes, one file for each
    layer; bytes of its largest tensor."""
    ffn = 11 * width // 4
    ends = {
        "model.embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    layer = {
        **{f"self_attn.{one}_proj.weight": (width, width) for one in "qkvo"},
        **{f"mlp.{one}_proj.weight": (ffn, width) for one in ("gate", "up")},
        "mlp.down_proj.weight": (width, ffn),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    numbers = {name: torch.Size(shape).numel() for name, shape in (ends | layer).items()}
    per_layer = sum(numbers[name] for name in layer)
    layers = max(1, round((size / 2 - sum(numbers[name] for name in ends)) / per_layer))
    folder.mkdir()
    weight_map: dict[str, str] = {}
    groups = [ends]
    for number in range(layers):
        groups.append({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    for number, group in enumerate(groups):
        file = f"model-{number:05d}.safetensors"
        write_file(
            folder / file,
            [
                Entry(name, torch.bfloat16, shape, partial(_random, shape))
                for name, shape in group.items()
            ],
        )
        weight_map |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map}), encoding="utf-8"
    )
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "max_position_embeddings": 128,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return 2 * max(*numbers.values(), 2 * ffn * width, 3 * width * width)


def _random(shape: Sequence[int]) -> torch.Tensor:
    """Random bf16 numbers between -1 and 1, made fast."""
    bits = torch.randint(0, 1 << 16, tuple(shape), dtype=torch.int32).to(torch.int16)
    return (bits & -0x4081).view(torch.bfloat16)
