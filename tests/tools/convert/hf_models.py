"""Small random Hugging Face models of every family that is converted, and checkpoints of ours
written as ranks would."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.arguments import config_from, to_args_text
from megatron.checkpoint import store
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState
from megatron.config.plan.parameters import parameter_table, stage_table
from megatron.config.tree import Config
from megatron.parallel.sharding import is_primary_copy, local_box, parameter
from megatron.training.checkpointing.saved_args import saved_config

VOCAB = 61
POSITIONS = 32
IDS = torch.randint(0, VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(1))
_LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=POSITIONS,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)


def configs(transformers):
    """{name: (class of the model, its configuration)}."""
    t = transformers
    gpt2 = dict(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
    )
    rope = {"rope_type": "default", "rope_theta": 1e6}
    full, windows = "full_attention", "sliding_attention"
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
        "beta_fast": 4.0,
    }
    experts = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40)
    return {
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config(**gpt2)),
        "gpt2 erf": (
            t.GPT2LMHeadModel,
            t.GPT2Config(**gpt2, activation_function="gelu", n_inner=80),
        ),
        "gpt2 untied": (t.GPT2LMHeadModel, t.GPT2Config(**gpt2, tie_word_embeddings=False)),
        "llama": (t.LlamaForCausalLM, t.LlamaConfig(**_LLAMA, rms_norm_eps=1e-5)),
        "llama tied": (t.LlamaForCausalLM, t.LlamaConfig(**_LLAMA, tie_word_embeddings=True)),
        "llama biases": (
            t.LlamaForCausalLM,
            t.LlamaConfig(**_LLAMA, attention_bias=True, mlp_bias=True),
        ),
        "llama linear": (
            t.LlamaForCausalLM,
            t.LlamaConfig(
                **_LLAMA,
                rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            ),
        ),
        "llama 3.1": (
            t.LlamaForCausalLM,
            t.LlamaConfig(
                **_LLAMA,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            ),
        ),
        "llama heads": (
            t.LlamaForCausalLM,
            t.LlamaConfig(**_LLAMA | {"num_key_value_heads": 4}, head_dim=24),
        ),
        "mistral": (
            t.MistralForCausalLM,
            t.MistralConfig(**_LLAMA, sliding_window=None, rope_parameters=rope),
        ),
        "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config(**_LLAMA, rope_parameters=rope)),
        "qwen2 tied": (t.Qwen2ForCausalLM, t.Qwen2Config(**_LLAMA, tie_word_embeddings=True)),
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config(**_LLAMA, head_dim=24, rope_parameters=rope)),
        "llama yarn": (t.LlamaForCausalLM, t.LlamaConfig(**_LLAMA, rope_parameters=dict(yarn))),
        "mistral windows": (t.MistralForCausalLM, t.MistralConfig(**_LLAMA, sliding_window=5)),
        "ministral windows": (
            t.MinistralForCausalLM,
            t.MinistralConfig(
                **_LLAMA,
                head_dim=16,
                sliding_window=6,
                layer_types=[windows, full] * 2,
                rope_parameters=rope,
            ),
        ),
        "qwen2 windows": (
            t.Qwen2ForCausalLM,
            t.Qwen2Config(**_LLAMA, use_sliding_window=True, sliding_window=7, max_window_layers=1),
        ),
        "olmo3 windows": (
            t.Olmo3ForCausalLM,
            t.Olmo3Config(
                **_LLAMA, sliding_window=8, rope_parameters={full: dict(yarn), windows: rope}
            ),
        ),
        "exaone4 windows": (
            t.Exaone4ForCausalLM,
            t.Exaone4Config(**_LLAMA, sliding_window=9, sliding_window_pattern=2),
        ),
        "exaone4 without windows": (
            t.Exaone4ForCausalLM,
            t.Exaone4Config(**_LLAMA, sliding_window=None, layer_types=["full_attention"] * 4),
        ),
        "qwen2_moe dense layers": (
            t.Qwen2MoeForCausalLM,
            t.Qwen2MoeConfig(
                **_LLAMA | experts,
                shared_expert_intermediate_size=48,
                decoder_sparse_step=2,
                norm_topk_prob=True,
            ),
        ),
        "olmoe normalized": (
            t.OlmoeForCausalLM,
            t.OlmoeConfig(**_LLAMA, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True),
        ),
        "qwen3_moe dense layer": (
            t.Qwen3MoeForCausalLM,
            t.Qwen3MoeConfig(
                **_LLAMA | experts, head_dim=24, norm_topk_prob=True, mlp_only_layers=[1]
            ),
        ),
    }


# What the tiny model of a family has instead of or besides _LLAMA; None: not this key.
_SIZES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_key_value_heads": None},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.7,
    },
    "gpt_bigcode": {"num_key_value_heads": None, "intermediate_size": None},
    "helium": {"head_dim": 16},
    "ministral": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mixtral": {"num_local_experts": 6},
    "qwen2_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {"num_experts": 12, "moe_intermediate_size": 40},
    "olmoe": {"num_experts": 12},
    "persimmon": {"num_key_value_heads": None},
}
# Families that transformers has only as remote code.
REMOTE = ("internlm", "internlm2", "internlm3")
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


def default_config(transformers, family: str):
    """(class of the model, transformers' default configuration of the family with tiny sizes)."""
    kind = transformers.AutoConfig.for_model(family).__class__
    changes = _SIZES.get(family, {})
    removed = {key for key, value in changes.items() if value is None}
    config = kind(**{key: v for key, v in (_LLAMA | changes).items() if key not in removed})
    return transformers.AutoModelForCausalLM._model_mapping[kind], config


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


def make(transformers, name: str, folder: Path):
    """The model of this name with weights, norms and biases that all matter, saved in `folder`: one
    of `configs`, or a family's default configuration."""
    known = configs(transformers)
    kind, config = known[name] if name in known else default_config(transformers, name)
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    model.save_pretrained(folder)
    return model


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
    found = store.load(source)
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
        )
        stage = range(at * layers, (at + 1) * layers)
        table = stage_table(
            parameter_table(config.model, padded, VOCAB), stage, at == 0, at == pp - 1
        )
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
