"""Families of several kinds of layers, of experts, and LongRoPE against transformers, in the corners of their
configurations: logits, gradients, export, generation beyond the window, the sizes of published models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.addons.convert.config_keys import Keys
from megatron.addons.convert.families import read_config
from megatron.addons.convert.hf_files import HFFolder
from megatron.addons.convert.huggingface import hf_export, hf_import
from megatron.addons.convert.inspect_checkpoint import diff
from megatron.addons.convert.links import ConversionError
from megatron.addons.convert.tests.corners import FULL, ROWS
from megatron.addons.convert.tests.hf_models import (
    IDS,
    as_compared,
    as_known,
    config_of,
    same_model,
    selection_biases,
)
from megatron.addons.convert.tests.test_families import gradients, opened
from megatron.arguments import config_from, to_args_text
from megatron.config.plan.parameters import count_parameters, parameter_table
from megatron.config.tree import Config
from megatron.inference.cached_model import CachedModel
from megatron.model.blocks.mtp.module import Depths, rolled
from tests.problems import raises
from tests.runs import plot

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.peers

WIDE = re.compile(r"e_score_correction_bias|gate\.wg\.")
# keys that Kimi K2's config.json has beside transformers' of DeepSeek-V3
KIMI = dict(
    model_type="kimi_k2",
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    aux_loss_alpha=0.001,
    seq_aux=True,
    ep_size=1,
    moe_layer_freq=1,
    num_nextn_predict_layers=0,
    pretraining_tp=1,
)
CASES = [(name, number) for name, row in ROWS.items() for number in range(len(row.corners))]
WITH_CORNERS = [name for name, row in ROWS.items() if row.corners]
PUBLISHED = {name: model for row in ROWS.values() for name, model in row.published.items()}


def corner_of(name: str, **changes: Any):
    return config_of(name, **{**ROWS[name].base, **changes})


def as_kimi(file: Path) -> None:
    """A config.json of DeepSeek-V3 as Kimi K2's is written: older keys of rotary positions, and
    more."""
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    config |= {"rope_theta": theta, "rope_scaling": rope | {"type": kind} if rope else None}
    file.write_text(json.dumps(config | KIMI))


def made(name: str, changes: dict[str, Any], folder: Path):
    """transformers' model with weights that all matter, among them large sinks, and ours."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(corner_of(name, **changes)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            scale = 3.0 if key.endswith("sinks") else 0.1
            p += scale * torch.randn(p.shape, generator=generator)
        for bias in selection_biases(model):
            bias += 0.2 * torch.randn(bias.shape, generator=generator)
    model.save_pretrained(folder / "hf")
    if name == "kimi_k2":
        as_kimi(folder / "hf" / "config.json")
    hf_import(folder / "hf", folder / "ours", tokenizer=False)
    return model, opened(folder / "ours")


MARKS = {0: (), 1: pytest.mark.campaign}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(*case, marks=MARKS.get(case[1], pytest.mark.sweep), id=f"{case}")
        for case in CASES
    ],
)
def test_a_corner_is_the_model_of_transformers(name, number, tmp_path):
    changes = ROWS[name].corners[number]
    model, ours = made(name, changes, tmp_path)
    with torch.no_grad():
        narrow = ours.model(IDS), model(IDS).logits
    with as_compared(name, ours.model, model) as (mine, theirs):
        with torch.no_grad():
            expected = theirs(IDS).logits
            logits = (mine(IDS) - expected).abs().max().item()
            start = (mine(IDS[:, :10]) - theirs(IDS[:, :10]).logits).abs().max().item()
        worst = gradients(mine, ours.config.model, theirs, name, tmp_path / "gradients")
    print(f"{name} {number}: logits {logits:.1e}, gradients {worst:.1e}")
    if ROWS[name].wide:  # in float32, as near to float64 as transformers
        mine, theirs = ((each - expected).abs().max().item() for each in narrow)
        print(f"{name} {number} in float32: {mine:.1e}, transformers {theirs:.1e}")
        assert mine < 2 * theirs
    assert expected.std() > 0.2
    # of the largest logit: what is rounded differs between processors
    assert max(logits, start) < 5e-6 * max(expected.abs().max().item(), 1.0)
    assert worst < 3e-5
    hf_export(tmp_path / "ours", tmp_path / "back", shard_bytes=10**9)
    if name == "kimi_k2":  # remote code there
        file = tmp_path / "back" / "config.json"
        config, _ = as_known(json.loads(file.read_text()), {})
        file.write_text(json.dumps(config))
    same_model(transformers, model, tmp_path / "back")


@pytest.mark.parametrize("name", WITH_CORNERS)
def test_a_cache_gives_the_full_pass_beyond_the_window(name, tmp_path):
    _, ours = made(name, ROWS[name].corners[0], tmp_path)
    if ROWS[name].wide:
        ours.model.double()
    with torch.no_grad():
        expected = ours.model(IDS)
    cached = CachedModel(ours.model, 2, 32)
    prompts = IDS.tolist()
    worst = (cached.forward([each[:9] for each in prompts], [0, 0]) - expected[:, 8]).abs().max()
    for at in range(9, 32):
        logits = cached.forward([each[at : at + 1] for each in prompts], [at, at])
        worst = max(worst, (logits - expected[:, at]).abs().max())
    assert worst < 5e-6


def refused(table: dict[str, Any]) -> str:
    with pytest.raises(ConversionError) as caught:
        read_config(Keys(table, "config.json"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [(name, key, value) for name, row in ROWS.items() for key, value in row.refused],
)
def test_what_is_another_model_is_refused_by_name(name, key, value):
    table = corner_of(name).to_dict() | {"architectures": None, key: value}
    assert key in refused(table)


def test_heads_for_later_tokens_are_dropped_when_asked(tmp_path):
    model, _ = made("glm4_moe", {}, tmp_path)
    files = safetensors_torch.load_file(tmp_path / "hf/model.safetensors")
    files["model.layers.4.eh_proj.weight"] = torch.ones(2, 2)
    files["model.layers.4.mlp.gate.weight"] = torch.ones(2, 2)
    safetensors_torch.save_file(files, tmp_path / "hf/model.safetensors", {"format": "pt"})
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.raises(ConversionError, match="model.layers.4.enorm.weight"):
        hf_import(tmp_path / "hf", tmp_path / "refused", tokenizer=False)
    hf_import(tmp_path / "hf", tmp_path / "dropped", tokenizer=False, drop_token_heads=True)
    hf_export(tmp_path / "dropped", tmp_path / "back", shard_bytes=10**9)
    same_model(transformers, model, tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 0


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _head_names(name: str, layer: int) -> tuple[str, list[str]]:
    """The prefix of the layer of a head, and the names of its two norms, its matrix and its last norm."""
    if name == "qwen3_next":
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        return "mtp.layers.0.", [f"mtp.{one}.weight" for one in names]
    prefix = f"model.layers.{layer}."
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    return prefix, [f"{prefix}{one}.weight" for one in names]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_heads_for_later_tokens_are_converted(name, tmp_path):
    """The loss of a depth is that of transformers' layers: one more of them is the head's, whose
    norms and matrix are those of the published files. An export has the same tensors."""
    torch.manual_seed(7)
    config = corner_of(name)
    last = config.num_hidden_layers
    qwen = name == "qwen3_next"  # its norms are centered at 0, and it has no copies
    kinds = {"layer_types": [*config.layer_types, FULL]} if qwen else {}
    longer = corner_of(name, num_hidden_layers=last + 1, **kinds)
    big = transformers.AutoModelForCausalLM.from_config(longer).eval()
    with torch.no_grad():
        for p in big.parameters():
            p += 0.05 * torch.randn(p.shape)
    small = transformers.AutoModelForCausalLM.from_config(config).eval()
    small.load_state_dict(big.state_dict(), strict=False)
    big.save_pretrained(tmp_path / "hf")
    if not qwen:
        config.num_nextn_predict_layers = 1
    config.save_pretrained(tmp_path / "hf")
    table, h = big.model.embed_tokens.weight, config.hidden_size
    head, names = _head_names(name, last)
    norms = [1 - qwen + 0.1 * torch.randn(h) for _ in range(3)]
    matrix = torch.randn(h, 2 * h) / h
    ends = dict(zip(names, (*norms[:2], matrix, norms[2]), strict=True))
    if not qwen:
        ends[f"{head}embed_tokens.weight"] = table.detach().clone()
        ends[f"{head}shared_head.head.weight"] = big.lm_head.weight.detach().clone()
    path = tmp_path / "hf/model.safetensors"
    layers = safetensors_torch.load_file(path)
    files = {key.replace(f"model.layers.{last}.", head): value for key, value in layers.items()}
    files |= ends
    safetensors_torch.save_file(files, path, {"format": "pt"})
    hf_import(tmp_path / "hf", tmp_path / "ours", tokenizer=False)
    ours = opened(tmp_path / "ours")
    ids = torch.randint(0, config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(1))
    tokens, labels = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        hidden = small.model(tokens).last_hidden_state[:, :-1]
        positions = torch.arange(9).unsqueeze(0)
        embedding, before, after = (
            lambda x, weight=weight: rms(x, weight + qwen, config.rms_norm_eps) for weight in norms
        )
        joined = torch.cat((embedding(table[tokens[:, 1:]]), before(hidden)), -1)
        x = big.model.layers[last](
            joined @ matrix.T,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=big.model.rotary_emb(hidden, position_ids=positions),
        )
        x = after(x[0] if isinstance(x, tuple) else x)
        expected = torch.nn.functional.cross_entropy(
            big.lm_head(x).flatten(0, 1), labels[:, 1:].flatten()
        )
        depths = Depths([(row, 0.0) for row in rolled(tokens, labels, None, None, 1)])
        ours.model(tokens, labels=labels, depths=depths)
    total, count = depths.metrics["mtp_1 loss"]
    torch.testing.assert_close(total / count, expected, rtol=1e-5, atol=0)
    hf_export(tmp_path / "ours", tmp_path / "back", shard_bytes=10**9)
    back = safetensors_torch.load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == files.keys()
    assert all(torch.equal(back[key], files[key]) for key in files)
    assert diff(tmp_path / "ours", tmp_path / "back")[1]
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1
    if qwen:  # a second layer behind the one matrix
        files["mtp.layers.1.input_layernorm.weight"] = torch.ones(h)
    else:
        files[f"{head}embed_tokens.weight"][0] += 1
    safetensors_torch.save_file(files, path, {"format": "pt"})
    named = "mtp.fc.weight" if qwen else f"{head}embed_tokens.weight"
    with raises(ConversionError, "token-heads", named):
        hf_import(tmp_path / "hf", tmp_path / "refused", tokenizer=False)


@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe", "minimax_m2", "hunyuan_v1_moe"])
def test_tensors_of_two_formats_come_back_bit_for_bit(name, tmp_path):
    model, _ = made(name, {}, tmp_path)
    model.to(torch.bfloat16)
    wide = [p for n, p in (*model.named_parameters(), *model.named_buffers()) if WIDE.search(n)]
    for p in wide:
        p.data = p.data.float() + 1e-4
    model.save_pretrained(tmp_path / "bf16")
    hf_import(tmp_path / "bf16", tmp_path / "ours16", tokenizer=False)
    hf_export(tmp_path / "ours16", tmp_path / "back", shard_bytes=10**9)
    before, after = (
        safetensors_torch.load_file(tmp_path / folder / "model.safetensors")
        for folder in ("bf16", "back")
    )
    assert before.keys() == after.keys() and wide
    assert {p.dtype for p in before.values()} == {torch.bfloat16, torch.float32}
    for key, value in before.items():
        assert value.dtype == after[key].dtype and torch.equal(value, after[key]), key


@pytest.mark.parametrize("shape", [(256, 384), (130, 300), (40, 64)])
def test_fp8_weights_are_their_scaled_values(shape, tmp_path):
    """As the published files' own script dequantizes them, and transformers, which takes whole
    blocks alone."""
    generator = torch.Generator().manual_seed(5)
    weight = (30 * torch.randn(shape, generator=generator)).to(torch.float8_e4m3fn)
    blocks = [-(-size // 128) for size in shape]
    scales = 0.01 * torch.rand(blocks, generator=generator) + 1e-3
    files = {"w": weight, "w_scale_inv": scales, "v": torch.ones(3)}
    safetensors_torch.save_file(files, tmp_path / "model.safetensors", {"format": "pt"})
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    table = {"quantization_config": how, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(table))
    with HFFolder(tmp_path) as folder:
        assert folder.headers() == {"w": (torch.bfloat16, shape), "v": (torch.float32, (3,))}
        found = folder.read("w")
    expected = torch.empty(shape, dtype=torch.bfloat16)
    for i in range(shape[0]):
        for j in range(0, shape[1], 128):
            scale = scales[i // 128, j // 128]
            expected[i, j : j + 128] = (weight[i, j : j + 128].float() * scale).bfloat16()
    assert torch.equal(found, expected)
    if shape == (256, 384):
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
        assert torch.equal(found, theirs)
    files["w_scale_inv"] = torch.ones(blocks[0] + 1, blocks[1])
    safetensors_torch.save_file(files, tmp_path / "model.safetensors", {"format": "pt"})
    with HFFolder(tmp_path) as folder, pytest.raises(ConversionError, match="w_scale_inv"):
        folder.headers()


def test_an_fp8_checkpoint_is_imported_and_exported_in_full_precision(tmp_path):
    made("minimax_m2", {}, tmp_path)
    whole = safetensors_torch.load_file(tmp_path / "hf/model.safetensors")
    files, expected = {}, {}
    for name, value in whole.items():
        expected[name] = value.bfloat16()
        if value.dim() == 2 and "norm" not in name and "embed" not in name:
            scale = torch.full((1, 1), value.abs().max().item() / 448)
            files[name] = (value / scale).to(torch.float8_e4m3fn)
            files[name + "_scale_inv"] = scale
            expected[name] = (files[name].float() * scale).bfloat16()
        else:
            files[name] = expected[name]
    safetensors_torch.save_file(files, tmp_path / "hf/model.safetensors", {"format": "pt"})
    path = tmp_path / "hf/config.json"
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    table = json.loads(path.read_text()) | {"quantization_config": how, "dtype": "bfloat16"}
    path.write_text(json.dumps(table))
    hf_import(tmp_path / "hf", tmp_path / "dense", tokenizer=False)
    hf_export(tmp_path / "dense", tmp_path / "back", shard_bytes=10**9)
    back = safetensors_torch.load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], value) for name, value in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_mxfp4_has_a_remedy():
    table = corner_of("gpt_oss").to_dict()
    said = refused(table | {"quantization_config": {"quant_method": "mxfp4"}})
    assert "Mxfp4Config(dequantize=True)" in said


@pytest.mark.campaign
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_a_plan(name, tmp_path, capsys):
    table, published = PUBLISHED[name]
    _, model, rows = read_config(Keys(dict(table), "config.json"))
    run = dict(mock_data=True, micro_batch_size=1, train_iters=10, lr=1e-4, bf16=True)
    run |= dict(vocab_size=rows, tokenizer_type="NullTokenizer", make_vocab_size_divisible_by=1)
    args = tmp_path / "model.args"
    args.write_text(to_args_text(config_from(Config, vars(model) | run)))
    plot().main([f"@{args}", "--dry-run"])
    assert f" {published:,} parameters" in capsys.readouterr().out


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(name):
    table, published = PUBLISHED[name]
    _, model, rows = read_config(Keys(dict(table), "config.json"))
    counted = count_parameters(parameter_table(model, rows, rows))
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING[table["model_type"]].from_dict(dict(table))
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    buffers = selection_biases(theirs)
    assert counted == sum(p.numel() for p in (*theirs.parameters(), *buffers)) == published
    assert model.seq_length == table["max_position_embeddings"] > (model.window or 0)
