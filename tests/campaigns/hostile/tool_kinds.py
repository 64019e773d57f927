"""More kinds of files: of the converter's other formats, of generate.py and serve.py, and flags with a small language of their own. Judges nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron.args_file import read_words
from megatron.arguments import Problems
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.safetensors_file import Entry, write_file
from megatron.config import command_line
from tests.campaigns.hostile.campaign import Kind, Refused
from tests.load_tool import load_tool
from tests.tools.chat.conversations import CONVERSATIONS
from tests.tools.in_process import use_it
from tools.convert import torch_dist
from tools.convert.inspect_checkpoint import inspect
from tools.convert.links import ConversionError

GENERATE = load_tool("generate")
WEIGHTS = "decoder.layers.mlp.linear_fc2.weight"


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


def make_prompts(folder: Path) -> None:
    (folder / "p.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "\\u00fc", "n": 1}\n')
    (folder / "p.txt").write_text("one\ntwo\n")


def make_bodies(folder: Path) -> None:
    more = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["x", "y"], "seed": 3}
    completion = {"model": None, "prompt": ["a", "b"], "logprobs": 2, **more}
    chat = {"messages": next(iter(CONVERSATIONS.values())), "top_k": 5, "n": 2, **more}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    (folder / "completion").write_text(json.dumps(completion))
    (folder / "chat").write_text(json.dumps({**chat, "tools": tools, "stream": True}))


def read_bodies(folder: Path) -> Any:
    from megatron.data.chat.encode import ChatEncoder
    from megatron.data.chat.templates import BUILT_IN, ChatTemplate
    from megatron.data.tokenizers.build import build_tokenizer
    from megatron.inference.chat import Chat
    from tools.serving import schemas

    tokenizer = build_tokenizer("ByteTokenizer")
    template = ChatTemplate("x", "{{ tools | tojson }}" + BUILT_IN["chatml"])
    encoder = ChatEncoder(tokenizer, template)
    try:
        completion, chat = (
            schemas.parse(kind, schemas.read_json((folder / name).read_bytes()))
            for kind, name in ((schemas.CompletionBody, "completion"), (schemas.ChatBody, "chat"))
        )
        prompts = completion.prompts, completion.stop_strings, completion.alternatives
        ids = [
            Chat(tokenizer, encoder, (), ()).prompt(chat.messages, chat.tools),
            Chat(tokenizer, None, (), ()).prompt(chat.messages),
        ]
    except schemas.ApiError as error:
        raise Refused(
            json.dumps(error.body, ensure_ascii=False).encode()
        ) from None  # as it is sent
    return prompts, ids, chat.alternatives, chat.stop_strings


LAYOUT_FLAGS = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 10\n"
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3\n"
    "--mock-data --vocab-size 100 --tokenizer-type NullTokenizer\n"
)


def make_layouts(folder: Path) -> None:
    (folder / "pipeline").write_text(
        f"{LAYOUT_FLAGS}--pipeline-model-parallel-size 2\n"
        "--pipeline-model-parallel-layout Et*2|(t)*2|t*2|L\n"
    )
    (folder / "experts").write_text(
        f"{LAYOUT_FLAGS}--num-experts 4 --moe-layer-freq ([0]*1+[1]*2)*2\n"
    )


def read_layouts(folder: Path) -> Any:
    return [command_line.judge([*read_words(folder / name)], 2) for name in ("pipeline", "experts")]


KINDS = [
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
    Kind(
        "prompt file",
        make_prompts,
        lambda folder: [
            GENERATE.read_prompts(str(folder / f"p.{end}")) for end in ("jsonl", "txt")
        ],
        ("p.jsonl", "p.txt"),
        cost=2,
    ),
    Kind(
        "HTTP body",
        make_bodies,
        read_bodies,
        ("completion", "chat"),
        needs=("pydantic", "jinja2"),
        message=True,
        cost=2,
    ),
    Kind(
        "pipeline layout, expert layers",
        make_layouts,
        read_layouts,
        ("pipeline", "experts"),
        (Problems, OSError, Refused),
        cost=4,
    ),
]
