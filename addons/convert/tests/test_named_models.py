"""The flags of `--model NAME` are those that an import of the model's own config.json gives, and
transformers builds as many parameters of it."""

from __future__ import annotations

import pytest
import torch

from megatron.arguments import config_from, parse_typed
from megatron.config import architecture, command_line
from megatron.config.named_models import MODELS, named_model
from megatron.config.tree import Config

from ..config_keys import Keys
from ..families import read_config

pytestmark = pytest.mark.peers

_GPT2 = {"class": "GPT2Config"}
_LLAMA = {"class": "LlamaConfig", "rms_norm_eps": 1e-5}
_PYTHIA = {"class": "GPTNeoXConfig", "vocab_size": 50304, "rotary_pct": 0.25}
_QWEN3 = {"class": "Qwen3Config", "vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6}
_QWEN3_MOE = {**_QWEN3, "class": "Qwen3MoeConfig", "norm_topk_prob": True}
_QWEN25 = {"class": "Qwen2Config", "rms_norm_eps": 1e-6}
# By name: what the model's config.json says beside its shape, its base of rotary positions, and
# whether it ties its embeddings.
CONFIGS = {
    "gpt2": (_GPT2, None, None),
    "gpt2-medium": (_GPT2, None, None),
    "gpt2-large": (_GPT2, None, None),
    "gpt2-xl": (_GPT2, None, None),
    "pythia-160m": (_PYTHIA, 10000.0, None),
    "pythia-1b": (_PYTHIA, 10000.0, None),
    "smollm2-135m": (_LLAMA, 1e5, True),
    "smollm2-360m": (_LLAMA, 1e5, True),
    "smollm2-1.7b": (_LLAMA, 1.3e5, True),
    "llama2-7b": (_LLAMA, 1e4, False),
    "llama2-13b": (_LLAMA, 1e4, False),
    "llama2-70b": (_LLAMA, 1e4, False),
    "llama3-8b": (_LLAMA, 5e5, False),
    "llama3-70b": (_LLAMA, 5e5, False),
    "llama3.1-405b": (_LLAMA, 5e5, False),
    "llama3.2-1b": (_LLAMA, 5e5, True),
    "llama3.2-3b": (_LLAMA, 5e5, True),
    "qwen2.5-0.5b": (_QWEN25, 1e6, True),
    "qwen2.5-7b": (_QWEN25, 1e6, False),
    "qwen3-0.6b": (_QWEN3, 1e6, True),
    "qwen3-1.7b": (_QWEN3, 1e6, True),
    "qwen3-4b": (_QWEN3, 1e6, True),
    "qwen3-8b": (_QWEN3, 1e6, False),
    "qwen3-14b": (_QWEN3, 1e6, False),
    "qwen3-32b": (_QWEN3, 1e6, False),
    "qwen3-30b-a3b": (
        _QWEN3_MOE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        1e6,
        False,
    ),
    "qwen3-next-80b-a3b": (
        {"class": "Qwen3NextConfig", "partial_rotary_factor": 0.25},
        1e7,
        False,
    ),
    "mistral-7b": (_LLAMA | {"class": "MistralConfig", "sliding_window": 4096}, 1e4, False),
    "mixtral-8x7b": (_LLAMA | {"class": "MixtralConfig"}, 1e6, False),
    "olmoe-1b-7b": ({"class": "OlmoeConfig"}, 1e4, False),
    "gemma2-2b": ({"class": "Gemma2Config", "head_dim": 256}, None, None),
    "gpt-oss-20b": ({"class": "GptOssConfig", "num_local_experts": 32}, None, None),
    "gpt-oss-120b": ({"class": "GptOssConfig"}, None, None),
}
_RUN = "--mock-data --micro-batch-size 1 --train-iters 2 --lr 1e-3".split()


def hf_config(name: str):
    """transformers' configuration of the model: its published shape, the rest of its family."""
    transformers = pytest.importorskip("transformers")
    keys, base, tied = CONFIGS[name]
    model = MODELS[name]
    words = model.words
    shape = {
        key: int(words[words.index(flag) + 1])
        for key, flag in {
            "num_hidden_layers": "--num-layers",
            "hidden_size": "--hidden-size",
            "intermediate_size": "--ffn-hidden-size",
            "num_attention_heads": "--num-attention-heads",
            "num_key_value_heads": "--num-query-groups",
            "max_position_embeddings": "--max-position-embeddings",
        }.items()
        if flag in words
    }
    if keys is _GPT2:
        shape = dict(zip(("n_layer", "n_embd", "n_head"), _gpt2_shape(shape), strict=True))
    elif "num_key_value_heads" not in shape and keys is not _PYTHIA:
        shape["num_key_value_heads"] = shape["num_attention_heads"]
    more = {key: value for key, value in keys.items() if key != "class"}
    if base:
        more["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    if keys is _PYTHIA:
        more["rope_parameters"]["partial_rotary_factor"] = more.pop("rotary_pct")
    if tied is not None:
        more["tie_word_embeddings"] = tied
    return getattr(transformers, keys["class"])(**{"vocab_size": model.vocab_size, **shape, **more})


def _gpt2_shape(shape: dict[str, int]) -> tuple[int, int, int]:
    return shape["num_hidden_layers"], shape["hidden_size"], shape["num_attention_heads"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_architecture_is_that_of_its_config_json(name):
    config = hf_config(name).to_dict()
    config.pop("architectures", None)
    _, imported, rows = read_config(Keys(config, "config.json"))
    typed = parse_typed(command_line.parser(), ["--model", name, *_RUN])
    assert architecture.differences(imported, config_from(Config, typed).model) == []
    assert rows == named_model(name).vocab_size


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_builds_as_many_parameters(name):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config(name))
    assert sum(weight.numel() for weight in model.parameters()) == MODELS[name].parameters


def test_every_named_model_is_compared():
    assert CONFIGS.keys() == MODELS.keys()
