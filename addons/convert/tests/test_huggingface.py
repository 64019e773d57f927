"""tools/convert_checkpoint.py hf-import and hf-export against transformers: bits, logits, and
everything that is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.addons.convert.dialect import LLAMA3
from megatron.addons.convert.tests.hf_models import (
    IDS,
    VOCAB,
    edit_config,
    make,
    rewrite_on_ranks,
    same_model,
)
from megatron.inference.load_model import open_trained_model
from tests.problems import assert_problem, numbers

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.peers


# --- what is refused


def edit_tensors(folder, change) -> None:
    path = folder / "model.safetensors"
    state = safetensors.load_file(path)
    change(state)
    safetensors.save_file(state, path, {"format": "pt"})


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
Q = "model.layers.1.self_attn.q_proj.weight"
GATE = "model.layers.2.mlp.gate_proj.weight"
BROKEN = {
    "deleted": (lambda s: s.pop(Q), f"{Q} is missing"),
    "renamed": (lambda s: s.update(other=s.pop(GATE)), f"{GATE} is missing"),
    "renamed, the new name": (
        lambda s: s.update(other=s.pop(GATE)),
        "other is not a part of this model",
    ),
    "extra": (lambda s: s.update(extra=torch.zeros(3)), "extra is not a part of this model"),
    "extra layer": (
        lambda s: s.update({Q.replace("1", "4"): s[Q].clone()}),
        "layers.4.self_attn.q_proj.weight is not",
    ),
    "shape": (
        lambda s: s.update({Q: torch.zeros(64, 32)}),
        f"{Q} has shape [64, 32], should have [64, 64]",
    ),
    "quantized": (
        lambda s: s.update({Q: torch.zeros(64, 64, dtype=torch.int8)}),
        f"{Q} is torch.int8",
    ),
    "two formats": (lambda s: s.update({Q: s[Q].half()}), "become one tensor, but are"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_tensor_is_used_exactly_once(case, tmp_path, convert):
    change, said = BROKEN[case]
    make(transformers, "llama", tmp_path / "hf")
    edit_tensors(tmp_path / "hf", change)
    assert said in convert("hf-import", tmp_path / "hf", tmp_path / "ours", fails=True)
    assert not (tmp_path / "ours").exists()


def test_a_tied_model_may_hold_its_embedding_twice_but_not_something_else(tmp_path, convert):
    model = make(transformers, "llama tied", tmp_path / "hf")
    edit_tensors(
        tmp_path / "hf",
        lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].clone()}),
    )
    convert("hf-import", tmp_path / "hf", tmp_path / "ours")
    convert("hf-export", tmp_path / "ours", tmp_path / "back")
    same_model(transformers, model, tmp_path / "back")
    edit_tensors(tmp_path / "hf", lambda s: s["lm_head.weight"].__setitem__((3, 3), 9.0))
    errors = convert("hf-import", tmp_path / "hf", tmp_path / "no", fails=True)
    assert "lm_head.weight is not model.embed_tokens.weight" in errors


def test_old_gpt2_files_without_prefix_and_with_masks(tmp_path, convert):
    model = make(transformers, "gpt2", tmp_path / "hf")

    def old(state):
        for name in list(state):
            state[name.removeprefix("transformer.")] = state.pop(name)
        state["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()

    edit_tensors(tmp_path / "hf", old)
    convert("hf-import", tmp_path / "hf", tmp_path / "ours")
    convert("hf-export", tmp_path / "ours", tmp_path / "back")
    same_model(transformers, model, tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "original_max_position_embeddings",
        ),
        ("llama", {"rope_parameters": YARN | {"attention_factor": -1.0}}, "rope_parameters"),
        ("llama", {"rope_parameters": YARN | {"beta_medium": 3.0}}, "rope_parameters.beta_medium"),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.5}},
            "rope_scaling",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}},
            "rope_theta 10000.5",
        ),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"model_type": "gemma3"}, "model_type 'gemma3'"),
        ("llama", {"num_local_experts": 8}, "num_local_experts 8: "),
        ("llama", {"num_hidden_layers": "four"}, "num_hidden_layers is 'four'"),
        ("llama", {"num_hidden_layers": 5}, "model.layers.4"),
        ("llama", {"num_attention_heads": 8}, "model.layers.0.self_attn.q_proj.weight has shape"),
        (
            "llama",
            {"num_attention_heads": 3},
            "num_attention_heads 3 ",
        ),
        ("llama", {"hidden_size": -64}, "hidden_size is -64"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("olmoe", {"sliding_window": 8}, "sliding_window 8"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            "layer_types",
        ),
        ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual true"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm true"),
        ("phi3", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "--longrope-short-factor"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers [1, 0]"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
        ("olmo3", {"rope_scaling": YARN | {"truncate": False}}, "rope_parameters"),
        ("olmo3", {"rope_parameters": {"sliding_attention": YARN}}, "rope_parameters"),
        ("exaone4", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("apertus", {"hidden_act": "silu"}, 'hidden_act "silu"'),
        ("gpt_bigcode", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
        # transformers' Phi-3 and StarCoder2 have the window in every layer, whatever this key says
        ("phi3", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, "layer_types"),
        ("starcoder2", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, "layer_types"),
        (
            "qwen3_moe",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention"] * 4,
            },
            "layer_types",
        ),
        ("qwen2_moe", {"mlp_only_layers": ["a"]}, 'mlp_only_layers ["a"]'),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen2", {"layer_types": [[], {}, "full_attention", 3]}, "layer_types"),
        ("exaone4", {"layer_types": [1, 2, 3, 4]}, "layer_types"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": math.inf}},
            "rope_parameters",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": None, **LLAMA3}},
            "rope_parameters",
        ),
        (
            "llama",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}},
            'rope_parameters.sliding_attention {"rope_theta": 1.0}: ',
        ),
        ("llama", {"rope_parameters": {"rope_theta": 1e300}}, "rope_theta 1e+300"),
        ("llama", {"max_position_embeddings": 10**18}, f"{10**18} positions"),
        ("gpt2", {"activation_function": "relu"}, 'activation_function "relu"'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(name, changes, said, tmp_path, convert):
    make(transformers, name, tmp_path / "hf")
    edit_config(tmp_path / "hf", **changes)
    errors = convert("hf-import", tmp_path / "hf", tmp_path / "ours", fails=True)
    assert said in errors and all(line.startswith("error: ") for line in errors.splitlines()), (
        errors
    )
    assert not (tmp_path / "ours").exists()


def partial_rotary(share: float) -> dict:
    return {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": share}}


@pytest.mark.parametrize(
    ("name", "changes", "code", "flag"),
    [
        ("phi3", partial_rotary(0.2), "rotary-channels-odd", "--rotary-percent"),
        ("phi3", partial_rotary(1.5), "value-out-of-range", "--rotary-percent"),
        ("phi3", partial_rotary(-0.5), "value-out-of-range", "--rotary-percent"),
        ("llama", {"rms_norm_eps": 0.0}, "value-out-of-range", "--norm-epsilon"),
        ("llama", {"attention_dropout": 1.5}, "value-out-of-range", "--attention-dropout"),
        ("llama", {"initializer_range": -1.0}, "value-out-of-range", "--init-method-std"),
        ("llama", {"rope_parameters": {"rope_theta": -5}}, "value-out-of-range", "--rotary-base"),
        ("granite", {"residual_multiplier": 0.0}, "value-out-of-range", "--residual-multiplier"),
        (
            "mixtral",
            {"num_experts_per_tok": 7},
            "router-topk-above-num-experts",
            "--moe-router-topk",
        ),
    ],
)
def test_a_model_that_no_run_accepts_is_not_imported(name, changes, code, flag, tmp_path, convert):
    make(transformers, name, tmp_path / "hf")
    edit_config(tmp_path / "hf", **changes)
    errors = convert(
        "hf-import", tmp_path / "hf", tmp_path / "ours", "--no-tokenizer", "--no-verify", fails=True
    )
    [line] = errors.splitlines()
    assert_problem(line, code, flag)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_sliding_window_is_no_matter_in_a_context_as_short(tmp_path, convert):
    make(transformers, "mistral", tmp_path / "hf")
    edit_config(tmp_path / "hf", sliding_window=8)
    convert("hf-import", tmp_path / "hf", tmp_path / "ours", "--max-position-embeddings", 8)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ours = open_trained_model(str(tmp_path / "ours"), device="cpu").model
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS[:, :8]), model(IDS[:, :8]).logits, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="8"):
        ours(IDS)


def test_an_unknown_key_can_be_called_harmless(tmp_path, convert):
    make(transformers, "llama", tmp_path / "hf")
    edit_config(tmp_path / "hf", lucky_number=7)
    convert("hf-import", tmp_path / "hf", tmp_path / "ours", "--ignore-config-key", "lucky_number")
    convert("hf-export", tmp_path / "ours", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["lucky_number"] == 7


def test_a_model_that_a_family_cannot_express_is_not_written(tmp_path, convert):
    make(transformers, "qwen3", tmp_path / "hf")
    convert("hf-import", tmp_path / "hf", tmp_path / "ours")
    errors = convert(
        "hf-export", tmp_path / "ours", tmp_path / "no", "--family", "gpt2", fails=True
    )
    assert "error: " in errors and not (tmp_path / "no").exists()
    errors = convert(
        "hf-export", tmp_path / "ours", tmp_path / "no", "--family", "llama", fails=True
    )
    assert "llama" in errors and "qk_layernorm is True" in errors


def test_a_constant_of_the_family_must_have_its_value(tmp_path, convert):
    make(transformers, "apertus", tmp_path / "hf")
    name = "model.layers.2.mlp.act_fn.beta"
    edit_tensors(tmp_path / "hf", lambda s: s.update({name: torch.tensor(0.7)}))
    errors = convert("hf-import", tmp_path / "hf", tmp_path / "no", fails=True)
    assert name in errors and "scalar 0.5" in errors
    assert not (tmp_path / "no").exists()


def test_constants_are_rounded_to_the_precision_of_the_file(tmp_path, convert):
    make(transformers, "apertus", tmp_path / "hf")
    halve = {"eps": torch.float16, "beta": torch.bfloat16}

    def low(state):
        for name in state:
            dtype = halve.get(name.rpartition(".")[2], torch.float32)
            state[name] = state[name].to(dtype).float()

    edit_tensors(tmp_path / "hf", low)
    convert("hf-import", tmp_path / "hf", tmp_path / "ours", "--no-verify")


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DAMAGED = {
    "weights end early": (lambda hf: cut(hf / "model.safetensors", 9000), "model.safetensors"),
    "weights end in the header": (
        lambda hf: cut(hf / "model.safetensors", 20),
        "model.safetensors",
    ),
    "weights are empty": (lambda hf: cut(hf / "model.safetensors", 0), "model.safetensors"),
    "weights are a pickle": (
        lambda hf: torch.save({"a": torch.ones(2)}, hf / "model.safetensors"),
        "model.safetensors",
    ),
    "config is not JSON": (lambda hf: (hf / "config.json").write_text("{"), "config.json"),
    "config is a list": (lambda hf: (hf / "config.json").write_text("[1]"), "config.json"),
    "config is nested too deep": (
        lambda hf: (hf / "config.json").write_text("[" * 100_000),
        "config.json",
    ),
    "tokenizer is a directory": (lambda hf: (hf / "tokenizer.json").mkdir(), "tokenizer.json"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_one_error_and_nothing_is_written(case, tmp_path, convert):
    damage, said = DAMAGED[case]
    make(transformers, "llama", tmp_path / "hf")
    damage(tmp_path / "hf")
    errors = convert("hf-import", tmp_path / "hf", tmp_path / "no", fails=True)
    assert said in errors and all(line.startswith("error: ") for line in errors.splitlines())
    assert not (tmp_path / "no").exists()


def test_shards_and_their_index_must_agree(tmp_path, convert):
    model = make(transformers, "llama", tmp_path / "hf")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    index = tmp_path / "shards" / "model.safetensors.index.json"
    convert("hf-import", tmp_path / "shards", tmp_path / "ours")
    table = json.loads(index.read_text())
    for change, said in (
        ({Q: "../x.safetensors"}, "[name-not-safe]"),
        ({Q: None}, "weight_map must name"),
        ({"other": table["weight_map"][Q]}, "says otherwise than the shards do about other"),
    ):
        index.write_text(json.dumps({"weight_map": table["weight_map"] | change}))
        assert said in convert("hf-import", tmp_path / "shards", tmp_path / "no", fails=True)


def test_a_pickle_is_not_read_and_nothing_is_overwritten(tmp_path, convert):
    make(transformers, "llama", tmp_path / "hf")
    (tmp_path / "ours").mkdir()
    before = list((tmp_path / "ours").iterdir())
    said = convert("hf-import", tmp_path / "hf", tmp_path / "ours", fails=True)
    assert said.startswith(f"error: {tmp_path}/ours: ")
    assert list((tmp_path / "ours").iterdir()) == before
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    said = convert("hf-import", tmp_path / "hf", tmp_path / "no", fails=True)
    assert "pytorch_model.bin" in said and "pickle" in said
    assert "config.json" in convert("hf-import", tmp_path, tmp_path / "no", fails=True)
    (tmp_path / "adapter_config.json").touch()
    assert "merge_and_unload" in convert("hf-import", tmp_path, tmp_path / "no", fails=True)
    assert "latest_checkpointed_iteration.txt" in convert(
        "hf-export", tmp_path / "hf", tmp_path / "no", fails=True
    )


# --- inspect, diff, verify


def test_inspect_diff_and_verify(tmp_path, convert):
    make(transformers, "llama", tmp_path / "hf")
    convert("hf-import", tmp_path / "hf", tmp_path / "ours")
    rewrite_on_ranks(tmp_path / "ours", tmp_path / "ranks", tp=2, pp=2)
    said = convert("inspect", tmp_path / "ranks", "--tensors")
    assert (
        "iteration 5" in said
        and "decoder.layers.3.mlp.linear_fc1.weight float32 [2, 96, 64]" in said
    )
    assert "num_query_groups=2" in said and "optimizer: none" in said
    assert "model_type 'llama'" in convert("inspect", tmp_path / "hf")
    for a, b in (("ours", "ranks"), ("ours", "hf"), ("hf", "ranks"), ("hf", "hf")):
        assert "same: " in convert("diff", tmp_path / a, tmp_path / b), (a, b)
    assert "TOO LARGE" not in convert("verify", tmp_path / "ranks", tmp_path / "hf")
    edit_tensors(tmp_path / "hf", lambda s: s[Q].__setitem__((3, 5), 4.0))
    out = convert("diff", tmp_path / "ours", tmp_path / "hf", fails="out")
    assert f"{Q}: 1 of 4,096 values differ" in out and "1 of 39 tensors differ" in out
    lines = convert("verify", tmp_path / "ours", tmp_path / "hf", fails="out").splitlines()
    wrong = ["TOO LARGE" in line for line in lines[:-1]]
    assert wrong == [False, False, True, True, True, True], lines


def test_verify_says_what_it_cannot_do(tmp_path, convert):
    make(transformers, "llama", tmp_path / "hf")
    convert("hf-import", tmp_path / "hf", tmp_path / "ours")
    edit_config(tmp_path / "hf", model_type="internlm2")
    assert "hf-export --family llama" in convert(
        "verify", tmp_path / "ours", tmp_path / "hf", fails=True
    )
    assert "config.json" in convert("verify", tmp_path / "ours", tmp_path / "ours", fails=True)


def test_a_tokenizer_with_fewer_ids_than_the_embedding_has_rows(tmp_path, convert):
    """As Qwen's: the rows behind stay, through a run of the same layout too, and the tokenizer's
    files go along."""
    tokenizers = pytest.importorskip("tokenizers")
    model = make(transformers, "llama", tmp_path / "hf")
    words = {f"w{number}": number for number in range(49)} | {"<eos>": 49}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(
        str(tmp_path / "hf" / "tokenizer.json")
    )
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    convert("hf-import", tmp_path / "hf", tmp_path / "ours")
    trained = open_trained_model(str(tmp_path / "ours"), device="cpu")
    assert (trained.tokenizer.vocab_size, trained.tokenizer.eod) == (50, 49)
    assert trained.model.embedding.word_embeddings.weight.shape[0] == VOCAB
    with torch.no_grad():
        ids = IDS % 50
        torch.testing.assert_close(
            trained.model(ids), model(ids).logits[..., :50], rtol=0, atol=1e-5
        )
    convert("hf-export", tmp_path / "ours", tmp_path / "back")
    same_model(transformers, model, tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    words |= {f"more{number}": number for number in range(50, 70)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(
        str(tmp_path / "hf" / "tokenizer.json")
    )
    errors = convert("hf-import", tmp_path / "hf", tmp_path / "no", fails=True)
    assert numbers(errors) == [70, 61] and not (tmp_path / "no").exists()
    convert("hf-import", tmp_path / "hf", tmp_path / "numbers", "--no-tokenizer")
    assert open_trained_model(str(tmp_path / "numbers"), device="cpu").tokenizer.vocab_size == VOCAB


def test_a_model_trained_here_gets_its_own_special_ids(tmp_path, convert):
    make(transformers, "llama", tmp_path / "hf")
    convert("hf-import", tmp_path / "hf", tmp_path / "ours")
    rewrite_on_ranks(tmp_path / "ours", tmp_path / "ranks", tp=1, pp=1)
    convert("hf-export", tmp_path / "ranks", tmp_path / "back")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (
        None,
        VOCAB - 1,
        None,
    )
    convert("hf-export", tmp_path / "ranks", tmp_path / "chat", "--chat-template", "chatml")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "chat")
    assert tokenizer("3 1 2")["input_ids"] == [3, 1, 2]
    turn = [{"role": "user", "content": "3"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False).startswith("<|im_start|>user\n3")
