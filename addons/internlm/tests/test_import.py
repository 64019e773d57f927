"""tools/convert_checkpoint.py internlm-import: folders written by its layout's rules, transformers'
Llama as the oracle."""

from __future__ import annotations

import copy
import shlex

import pytest
import torch

from megatron.addons.internlm.feature import InternlmConfig
from megatron.config.checks.load_paths import of_another_suite
from megatron.inference.load_model import open_trained_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers
GROUPS = [InternlmConfig]
HEADS = 4
WIDTH = 64
FFN = 256
LAYERS = 4
VOCAB = 64
IDS = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))


def llama():
    """A Llama with InternLM's biases, none of them zero."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        attention_bias=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for number, p in enumerate(model.parameters()):
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    return model


def write_folder(folder, model, tp, pp, up="w2", split_hidden=False, **changes):
    """The folder of a step, as tp x pp ranks write it."""
    state = {name: p.detach() for name, p in model.named_parameters()}
    down = {"w2": "w3", "w3": "w2"}[up]
    folder.mkdir()
    for t in range(tp):

        def rows(name, t=t):
            return state[name].chunk(tp)[t].clone()

        def columns(name, t=t):
            return state[name].chunk(tp, dim=1)[t].clone()

        for p in range(pp):
            part = {}
            if p == 0:
                part["embedding.weight"] = (columns if split_hidden else rows)(
                    "model.embed_tokens.weight"
                )
            for local in range(LAYERS // pp):
                at = f"model.layers.{p * LAYERS // pp + local}."
                here = f"blocks.{local}."
                for kind in ("weight", "bias"):
                    part[f"{here}mixer.Wqkv.{kind}"] = torch.cat(
                        [rows(f"{at}self_attn.{x}_proj.{kind}") for x in "qkv"]
                    )
                part[f"{here}mixer.rotary_emb.inv_freq"] = torch.ones(8)
                part[f"{here}mixer.out_proj.weight"] = columns(at + "self_attn.o_proj.weight")
                if t == 0:
                    part[f"{here}mixer.out_proj.bias"] = state[at + "self_attn.o_proj.bias"]
                part[f"{here}norm1.weight"] = state[at + "input_layernorm.weight"]
                part[f"{here}norm2.weight"] = state[at + "post_attention_layernorm.weight"]
                part[f"{here}mlp.w1.weight"] = rows(at + "mlp.gate_proj.weight")
                part[f"{here}mlp.{up}.weight"] = rows(at + "mlp.up_proj.weight")
                part[f"{here}mlp.{down}.weight"] = columns(at + "mlp.down_proj.weight")
            if p == pp - 1:
                part["norm.weight"], part["head.weight"] = (
                    state["model.norm.weight"],
                    rows("lm_head.weight"),
                )
            torch.save(
                {f"model.{name}": value for name, value in part.items()},
                folder / f"model_tp{t}_pp{p}.pt",
            )
    torch.save(
        dict(
            num_layers=LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            vocab_size=VOCAB,
            mlp_ratio=8 / 3,
            layer_norm_epsilon=1e-5,
            use_swiglu=True,
            norm_type="rmsnorm",
            dtype=torch.float32,
            num_chunks=1,
            embed_split_hidden=split_hidden,
            checkpoint=False,
            use_flash_attn=True,
        )
        | changes,
        folder / "model_config.pt",
    )


@pytest.mark.parametrize(
    ("tp", "pp", "up", "split_hidden"),
    [
        (1, 1, "w2", False),
        (2, 2, "w2", True),
        (2, 1, "w3", False),
        pytest.param(4, 2, "w3", True, marks=pytest.mark.campaign),
    ],
)
def test_the_logits_are_those_of_a_llama_with_attention_biases(
    tp, pp, up, split_hidden, tmp_path, convert, monkeypatch
):
    if tp == 4:
        monkeypatch.undo()  # by the other process
    model = llama()
    write_folder(tmp_path / "step", model, tp, pp, up, split_hidden)
    convert(
        "internlm-import",
        tmp_path / "step",
        tmp_path / "ours",
        "--max-position-embeddings",
        32,
        *(["--mlp-weights", {"w2": "w2-up", "w3": "w2-down"}[up]] if tp * WIDTH == FFN else []),
    )
    ours = open_trained_model(str(tmp_path / "ours"), device="cpu").model
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), model(IDS).logits, rtol=0, atol=1e-5)
    convert("hf-export", tmp_path / "ours", tmp_path / "hf", "--family", "internlm")
    convert("hf-export", tmp_path / "ours", tmp_path / "llama", "--family", "llama")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama").state_dict()
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


def test_neighbouring_channels_rotate_with_qk_interleaved(tmp_path, convert):
    """InternEvo's layout of queries and keys: the same model after their rows are permuted."""
    model = llama()
    permuted = copy.deepcopy(model)
    for name, p in permuted.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            heads = p.data.unflatten(0, (HEADS, 2, WIDTH // HEADS // 2))
            p.data = heads.transpose(1, 2).flatten(0, 2).contiguous()
    write_folder(tmp_path / "step", permuted, 1, 1, qk_interleaved=True, rope_base=10000)
    words = ["--max-position-embeddings", 32, "--mlp-weights", "w2-up"]
    convert("internlm-import", tmp_path / "step", tmp_path / "ours", *words)
    ours = open_trained_model(str(tmp_path / "ours"), device="cpu").model
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("lucky_number", 7, "config-key-unknown"),
        ("use_dynamic_ntk_rope", True, "config-key-not-supported"),
        ("num_kv_attention_heads", 2, "config-key-not-supported"),
    ],
)
def test_a_key_of_another_model_is_refused(key, value, code, tmp_path, convert):
    write_folder(tmp_path / "step", llama(), 1, 1, **{key: value}, unset=None)
    words = ["internlm-import", tmp_path / "step", tmp_path / "ours", "--mlp-weights", "w2-up"]
    errors = convert(*words, fails=True)
    assert key in errors and f"[{code}]" in errors
    if code == "config-key-unknown":
        convert(*words, "--ignore-config-key", key)


def test_the_command_that_load_prints_converts_it(tmp_path, convert, monkeypatch):
    (tmp_path / "a run").mkdir()
    write_folder(tmp_path / "a run" / "50", llama(), 2, 1)
    monkeypatch.chdir(tmp_path)
    said = of_another_suite("a run", GROUPS)
    words = shlex.split(said.partition("python ")[2].partition(", then give")[0])
    assert words[0] == "tools/convert_checkpoint.py"
    convert(*words[1:])
    assert of_another_suite("DIR", GROUPS) is None


def test_what_does_not_fit_is_said(tmp_path, convert):
    model = llama()
    words = ["--mlp-weights", "w2-up"]
    write_folder(tmp_path / "a", model, 2, 1)
    errors = convert(
        "internlm-import", tmp_path / "a", tmp_path / "o", "--mlp-weights", "w2-down", fails=True
    )
    assert "is --mlp-weights the other one?" in errors
    write_folder(tmp_path / "square", model, FFN // WIDTH, 1)
    assert "give --mlp-weights" in convert(
        "internlm-import", tmp_path / "square", tmp_path / "o", fails=True
    )
    (tmp_path / "a" / "model_tp1_pp0.pt").rename(tmp_path / "a" / "model_tp2_pp0.pt")
    assert "model_tp1_pp0.pt missing" in convert(
        "internlm-import", tmp_path / "a", tmp_path / "o", *words, fails=True
    )
    write_folder(tmp_path / "b", model, 1, 1, norm_type="layernorm", num_layers=5)
    write_folder(tmp_path / "c", model, 1, 1, num_layers=5)
    write_folder(tmp_path / "d", model, 1, 1, num_layers=3)
    for folder, said in (
        ("b", "norm_type 'layernorm'"),
        ("c", "blocks.4.norm1.weight is missing"),
        ("d", "blocks.3.norm1.weight is not a part"),
        (".", "needs model_tp0_pp0.pt"),
    ):
        assert said in convert(
            "internlm-import", tmp_path / folder, tmp_path / "o", *words, fails=True
        )
    assert not (tmp_path / "o").exists()
