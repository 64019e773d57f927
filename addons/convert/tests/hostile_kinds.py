"""Damaged and hostile checkpoints of other programs, for tests/campaigns/hostile. Judges nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron.addons.convert import torch_dist
from megatron.addons.convert.hf_files import side_files
from megatron.addons.convert.inspect_checkpoint import inspect
from megatron.addons.convert.links import ConversionError
from megatron.addons.convert.tests.in_process import use_it
from megatron.addons.convert.torch_files import read_file
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.safetensors_file import Entry, write_file
from tests.campaigns.hostile.campaign import Kind

WEIGHTS = "decoder.layers.mlp.linear_fc2.weight"


def make_torch_file(folder: Path) -> None:
    torch.save(
        {
            "model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)},
            "args": {"num_layers": 2, "names": ["x", "y"], "nested": {"lr": 1e-4}},
            "iteration": 20,
        },
        folder / "m.pt",
    )


def read_torch_file(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        use_it(patch)
        file = read_file(folder / "m.pt", ("model",))
    return {name: part.read().tolist() for name, part in file.tensors.items()}, file.values


def make_hugging_face(folder: Path) -> None:
    weight = torch.arange(12.0).view(3, 4)
    write_file(folder / "model.safetensors", [Entry("w", torch.float32, (3, 4), weight)])
    config = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 3}
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1e4}))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')


def make_torch_dist(folder: Path) -> None:
    tensors = {WEIGHTS: torch.arange(24.0).view(2, 3, 4), "extra": [None]}
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    args = argparse.Namespace(num_layers=2)
    torch.save({"args": args, "iteration": 7}, folder / torch_dist.COMMON)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / torch_dist.METADATA).write_text(json.dumps(backend))


def read_torch_dist(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        use_it(patch)
        found = torch_dist.TorchDistCheckpoint(folder)
        tensors = {
            name: {part: piece.read().tolist() for part, piece in parts.items()}
            for name, parts in found.slices.items()
        }
    return tensors, found.args


def make_experts(folder: Path) -> None:
    """Two shards with an index."""
    layer = "model.layers.0.block_sparse_moe"
    shards = {
        "model-00001-of-00002.safetensors": [f"{layer}.gate.weight"],
        "model-00002-of-00002.safetensors": [f"{layer}.experts.{n}.w1.weight" for n in range(2)],
    }
    for file, names in shards.items():
        write_file(
            folder / file,
            [Entry(name, torch.float32, (2, 4), torch.arange(8.0).view(2, 4)) for name in names],
        )
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": 96}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "mixtral",
        "hidden_size": 4,
        "intermediate_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 32,
        "vocab_size": 8,
        "tie_word_embeddings": False,
        "router_aux_loss_coef": 0.02,
    }
    (folder / "config.json").write_text(json.dumps(config))


KINDS = [
    Kind("PyTorch .pt", make_torch_file, read_torch_file, ("m.pt",)),
    Kind(
        "Hugging Face folder",
        make_hugging_face,
        lambda folder: (inspect(folder, None, True), len(side_files(folder))),
        ("config.json", "model.safetensors", "tokenizer_config.json", "special_tokens_map.json"),
        (CheckpointError, ConversionError, ValueError, OSError),
    ),
    Kind(
        "torch_dist folder",
        make_torch_dist,
        read_torch_dist,
        (".metadata", torch_dist.COMMON, torch_dist.METADATA, "*.distcp"),
        (CheckpointError, ConversionError, ValueError, OSError),
        cost=4,
    ),
    Kind(
        "Hugging Face shards, experts",
        make_experts,
        lambda folder: inspect(folder, None, True),
        ("*.json", "*.safetensors"),
        (CheckpointError, ConversionError, ValueError, OSError),
        cost=2,
    ),
]
