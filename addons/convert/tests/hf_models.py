"""Small random Hugging Face models of the rows of corners.py, and checkpoints of ours written as
ranks would."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megatron.addons.convert.tests.corners import POSITIONS, ROWS, SIZES, VOCAB, Row
from megatron.arguments import config_from, to_args_text
from megatron.checkpoint import reading, store
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState
from megatron.config.plan.parameters import Chunk, parameter_table, stage_table
from megatron.config.tree import Config
from megatron.parallel.sharding import is_primary_copy, local_box, parameter
from megatron.training.checkpointing.saved_args import saved_config

IDS = torch.randint(0, VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(1))
# Families that transformers has only as remote code.
REMOTE = tuple(name for name, row in ROWS.items() if row.flags)
INTERNLM2 = {
    "tok_embeddings": "embed_tokens",
    "output.": "lm_head.",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wqkv": "self_attn.wqkv",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def config_of(name: str, **changes: Any):
    """transformers' configuration of the tiny model of a family, or of one of its variants ("gpt2
    untied"), as its row in corners.py says."""
    import transformers

    family, _, variant = name.partition(" ")
    row = ROWS.get(family, Row())
    keys = {key: value for key, value in SIZES.items() if key not in row.without}
    keys |= row.sizes | (row.variants[variant] if variant else {}) | changes
    # it changes the dictionaries that it gets
    return transformers.CONFIG_MAPPING[row.like or family](**copy.deepcopy(keys))


def as_llama(config: dict[str, Any], state: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """(config.json, tensors) of the Llama model that a model of a REMOTE family is."""
    bias = config["bias"]
    attention_bias = bias or config.get("qkv_bias", False)
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        for theirs, llama in INTERNLM2.items():
            name = name.replace(theirs, llama)
        if ".wqkv." in name:  # by group of heads: its queries, its key, its value
            width = config["hidden_size"] // config["num_attention_heads"]
            rows = value.unflatten(0, (config["num_key_value_heads"], -1, width))
            for x, part in zip("qkv", rows.split((rows.shape[1] - 2, 1, 1), 1), strict=True):
                found[name.replace("wqkv", f"{x}_proj")] = part.flatten(0, 2).clone()
        else:
            found[name] = value
    for name in list(found):
        if ".self_attn." in name and name.endswith(".weight") and attention_bias:
            rows = found[name].shape[0]
            found.setdefault(name.replace("weight", "bias"), torch.zeros(rows))
    changes = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": attention_bias,
        "mlp_bias": bias and config["model_type"] == "internlm3",
    }
    if "rotary" in config:
        changes["rope_theta"] = config["rotary"]["base"]
    return config | changes, found


def as_glm4_moe(config: dict[str, Any], state: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """(config.json, tensors) of the GLM-4.5 model that a Ling 2 model is."""
    found: dict[str, torch.Tensor] = {}
    head = config["head_dim"]
    keys = config["num_key_value_heads"] * head
    rows = (config["num_attention_heads"] * head, keys, keys)
    for name, value in state.items():
        name = name.replace("word_embeddings", "embed_tokens").replace(".attention.", ".self_attn.")
        name = name.replace("self_attn.dense", "self_attn.o_proj")
        name = name.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm")
        name = name.replace("gate.expert_bias", "gate.e_score_correction_bias")
        if "query_key_value" in name:
            for x, part in zip("qkv", value.split(rows), strict=True):
                found[name.replace("query_key_value", f"{x}_proj")] = part.clone()
        else:
            found[name] = value
    changes = {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": config["use_qkv_bias"],
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": config["num_shared_experts"],
        "norm_topk_prob": config["num_experts_per_tok"] > 1,
    }
    return config | changes, found


def as_known(config: dict[str, Any], state: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """(config.json, tensors) of the model that a model of a REMOTE family is in transformers."""
    if like := ROWS[config["model_type"]].like:
        return config | {"model_type": like}, state
    ling = config["model_type"].startswith("bailing")
    return (as_glm4_moe if ling else as_llama)(config, state)


def make(transformers, name: str, folder: Path):
    """The model of this name (`config_of`) with weights, norms and biases that all matter, saved in
    `folder`."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(name)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in (*model.parameters(), *selection_biases(model)):
            p += 0.1 * torch.randn(p.shape, generator=generator)
    model.save_pretrained(folder)
    return model


class _Wide:
    """torch, in which float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def as_compared(name: str, ours, theirs) -> Iterator[tuple[Any, Any]]:
    """Both models as they are compared: in float32, or copies in float64 where a row is `wide`. There
    transformers' code, too, computes in float64 what it computes in float32 otherwise."""
    if not ROWS.get(name, Row()).wide:
        yield ours, theirs
        return
    theirs = copy.deepcopy(theirs).double()
    theirs.set_experts_implementation("eager")  # the only one with float64
    with (
        patch.object(sys.modules[type(theirs).__module__], "torch", _Wide()),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield ours.double(), theirs


def selection_biases(model) -> list[torch.Tensor]:
    """Biases of the selection of experts that transformers has as buffers."""
    return [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]


def same_model(transformers, model, folder: Path) -> None:
    """The folder holds this model: every tensor bit for bit, and what transformers makes of its
    config.json."""
    back = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(back) is type(model)
    ours = back.state_dict()
    theirs = model.state_dict()
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different
    with torch.no_grad():
        assert torch.equal(back(IDS).logits, model(IDS).logits)


def edit_config(folder: Path, **changes) -> None:
    """Change keys of a folder's config.json; None removes one."""
    path = folder / "config.json"
    table = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def rewrite_on_ranks(
    source: Path, target: Path, tp: int, pp: int, divisor: int = 8, **changes
) -> None:
    """The checkpoint `source` as tp x pp ranks write it (with experts, tp x ep 2 x pp), its
    vocabulary padded with rows that are no zeros; `changes` are flags of its args file."""
    found = reading.load(source)
    with found.reader() as reader:
        weights = {name: reader.read(name) for name in reader.names()}
    config = saved_config(found)
    padded = -(-VOCAB // (divisor * tp)) * divisor * tp
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in weights:
            weights[name] = torch.cat(
                [weights[name], torch.full((padded - VOCAB, weights[name].shape[1]), 7.0)]
            )
    temporary = target / ".iter_0000005.tmp-00000000"
    store.prepare(target, temporary)
    layers = config.model.num_layers // pp
    ep = 2 if config.model.num_experts else 1
    for rank in range(tp * ep * pp):
        at = rank // (tp * ep)
        tensor = SimpleNamespace(rank=rank % tp, size=tp)
        ctx = SimpleNamespace(
            tp=tensor,
            etp=tensor,
            ep=SimpleNamespace(rank=rank // tp % ep, size=ep),
            ends=SimpleNamespace(rank=at),
            shares_weights=False,
        )
        stage = Chunk(range(at * layers, (at + 1) * layers), at == 0, at == pp - 1, at == pp - 1)
        table = stage_table(parameter_table(config.model, padded, VOCAB), stage)
        slices = []
        for spec in table:
            sharding = parameter(spec, ctx, torch.float32, "meta").sharding
            box = local_box(sharding, ctx)
            part = weights[spec.name][tuple(slice(*pair) for pair in box)]
            dense_copy = ctx.ep.rank > 0 and "ep" not in dict(spec.splits)
            if is_primary_copy(sharding, ctx) and not dense_copy:
                slices.append(TensorSlice(spec.name, spec.shape, part.dtype, box, part))
        store.write_rank_files(temporary, rank, slices, 5)
    values = {
        f.name: getattr(group, f.name) for group in vars(config).values() for f in fields(group)
    }
    args = to_args_text(
        config_from(Config, values | {"make_vocab_size_divisible_by": divisor} | changes)
    )
    store.finish(temporary, tp * ep * pp, RunState(iteration=5), args)
    store.publish(target, temporary, 5)
