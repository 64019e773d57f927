"""tools/convert_checkpoint.py megatron-import and -export: files made with megatron-core's
GPTModel, and the older names."""

from __future__ import annotations

import argparse

import pytest
import torch

from megatron.addons.convert.tests.megatron_files import (
    IDS,
    MODELS,
    SIZE,
    VOCAB,
    arguments,
    assert_is_the_model,
    logits_of,
    on_a_rank,
    unsaid,
)
from tests.core.model.tiny import tiny_model
from tests.forkrun import run_ranks

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
SAMPLE = {
    *(("llama", (2, 1)), ("latent attention", (1, 2))),
    ("multi-token prediction, tied", (1, 2)),
}
CASES = [
    pytest.param(
        name, layout, marks=pytest.mark.campaign if (name, layout) in SAMPLE else pytest.mark.sweep
    )
    for name in MODELS
    for layout in LAYOUTS
    # its local layers split what is whole in Transformer Engine's and here
    if not (name.startswith("latent") and layout[0] > 1)
]


@pytest.mark.peers
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_megatron_core_files_both_ways(name, layout, tmp_path, convert):
    pytest.importorskip("megatron.core")
    flags = MODELS[name]
    (tp, pp) = layout
    source = tmp_path / "theirs"
    source.mkdir()
    want = run_ranks(tp * pp, on_a_rank, flags, tp, pp, source)[0]
    convert("megatron-import", source, tmp_path / "ours", *unsaid(flags, tmp_path))
    assert want.std() > 0.5
    torch.testing.assert_close(logits_of(tmp_path / "ours"), want, rtol=0, atol=1e-5)
    assert_is_the_model(tmp_path / "ours", flags)
    convert(
        "megatron-export",
        tmp_path / "ours",
        tmp_path / "back",
        "--tensor-model-parallel-size",
        tp,
        "--pipeline-model-parallel-size",
        pp,
    )
    for file in sorted((source / "iter_0000007").rglob("*.pt")):
        theirs = torch.load(file, weights_only=False)
        back = torch.load(
            tmp_path / "back" / "release" / file.parent.name / file.name, weights_only=False
        )
        ours = back["model"]
        model = {k: v for k, v in theirs["model"].items() if isinstance(v, torch.Tensor)}
        assert ours.keys() == model.keys() and all(
            torch.equal(ours[key], model[key]) for key in model
        )
        for key in (
            "num_layers",
            "swiglu",
            "num_query_groups",
            "padded_vocab_size",
            "untie_embeddings_and_output_weights",
            "tensor_model_parallel_size",
            "normalization",
        ):
            assert getattr(back["args"], key) == getattr(theirs["args"], key), key
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "release"


# --- the older model: no oracle, the layout rules of its files spelled out


def legacy_files(
    folder, flags, tp=1, pp=1, version=3.0, old_names=False, **changes
) -> dict[str, torch.Tensor]:
    """Write the older model's files for tp x pp ranks; returns the whole weights by our names."""
    ours = tiny_model(vocab=VOCAB, padded=VOCAB, scramble=True, **SIZE, **flags)
    whole = {name: p.detach() for name, p in ours.named_parameters()}
    layers = SIZE["num_layers"] // pp
    for p in range(pp):
        for t in range(tp):
            words = whole["embedding.word_embeddings.weight"].chunk(tp)[t]
            language: dict = {"encoder": {}}
            model: dict = {"language_model": language}
            if p == 0:
                language["embedding"] = {"word_embeddings": {"weight": words}}
                if "embedding.position_embeddings.weight" in whole:
                    language["embedding"]["position_embeddings"] = {
                        "weight": whole["embedding.position_embeddings.weight"]
                    }
            for layer in range(layers):
                at = f"layers.{layer}."
                here = f"decoder.layers.{p * layers + layer}."
                for mine, theirs, cut in (
                    ("input_layernorm", "input_norm", None),
                    ("pre_mlp_layernorm", "post_attention_norm", None),
                    ("self_attention.linear_qkv", "self_attention.query_key_value", 0),
                    ("self_attention.linear_proj", "self_attention.dense", 1),
                    ("mlp.linear_fc1", "mlp.dense_h_to_4h", 0),
                    ("mlp.linear_fc2", "mlp.dense_4h_to_h", 1),
                ):
                    for kind in ("weight", "bias"):
                        value = whole.get(f"{here}{mine}.{kind}")
                        if value is None:
                            continue
                        if mine == "mlp.linear_fc1" and flags.get("swiglu"):
                            value = torch.cat([half.chunk(tp)[t] for half in value])
                        elif cut is not None and not (cut == 1 and kind == "bias"):
                            value = value.chunk(tp, dim=cut)[t].clone()
                        language["encoder"][f"{at}{theirs}.{kind}"] = value
            if p == pp - 1:
                for kind in ("weight", "bias"):
                    if f"decoder.final_layernorm.{kind}" in whole:
                        language["encoder"][f"final_norm.{kind}"] = whole[
                            f"decoder.final_layernorm.{kind}"
                        ]
                if "output_layer.weight" in whole:
                    language["output_layer"] = {"weight": whole["output_layer.weight"].chunk(tp)[t]}
                elif pp > 1:
                    model["word_embeddings_for_head"] = {"weight": words}
            if old_names:
                language["transformer"] = {
                    key.replace("_norm.", "_layernorm.").replace(
                        ".self_attention.", ".attention."
                    ): value
                    for key, value in language.pop("encoder").items()
                }
            target = folder / "release" / (f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp > 1))
            target.mkdir(parents=True)
            args = argparse.Namespace(**vars(arguments(flags, tp, pp)) | changes)
            torch.save(
                {"args": args, "checkpoint_version": version, "iteration": 0, "model": model},
                target / "model_optim_rng.pt",
            )
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return whole


@pytest.mark.parametrize(
    ("name", "tp", "pp", "old_names"),
    [
        ("gpt2", 1, 1, False),
        ("gpt2", 2, 2, True),
        ("gpt2", 1, 2, False),
        ("llama", 2, 1, False),
        ("llama tied, qkv bias", 1, 2, False),
    ],
)
def test_the_older_model_both_ways(name, tp, pp, old_names, tmp_path, convert):
    flags = MODELS[name]
    legacy_files(tmp_path / "theirs", flags, tp, pp, old_names=old_names)
    convert("megatron-import", tmp_path / "theirs", tmp_path / "ours")
    model = tiny_model(vocab=VOCAB, padded=VOCAB, scramble=True, **SIZE, **flags)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(tmp_path / "ours"), model(IDS), rtol=0, atol=1e-5)
    convert(
        "megatron-export",
        tmp_path / "ours",
        tmp_path / "back",
        "--model",
        "legacy",
        "--tensor-model-parallel-size",
        tp,
        "--pipeline-model-parallel-size",
        pp,
    )
    if old_names:
        return
    for file in sorted(tmp_path.glob("theirs/release/*/*.pt")):
        there, back = (
            torch.load(
                tmp_path / side / "release" / file.parent.name / file.name, weights_only=False
            )["model"]
            for side in ("theirs", "back")
        )
        assert same(there, back), file


def same(a, b) -> bool:
    """Are two nested dicts of tensors equal, bit for bit?"""
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        )
    return torch.equal(a, b)


REFUSED = {
    "experts": (dict(num_experts=8), "num_experts 8 cannot be represented"),
    "window": (dict(window_size=(128, 0)), "window_size"),
    "positions": (dict(position_embedding_type="mrope"), "position_embedding_type"),
    "wider MLP": (
        dict(ffn_hidden_size=512),
        "dense_h_to_4h.weight has shape [256, 64], should be [512, 64]",
    ),
    "more layers": (dict(num_layers=5), "decoder.layers.4.input_layernorm.weight is missing"),
    "fewer layers": (dict(num_layers=3), "layers.3.input_norm.weight is not a part of this model"),
    "untied": (dict(untie_embeddings_and_output_weights=True), "output_layer.weight is missing"),
    "old order": (dict(version=1.0), "checkpoint_version 1.0"),
    "no arguments": (dict(num_layers=None), "give --args FILE"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_megatron_checkpoint_says_must_be_true_of_it(case, tmp_path, convert):
    changes, said = REFUSED[case]
    legacy_files(tmp_path / "theirs", {}, **changes)
    assert said in convert("megatron-import", tmp_path / "theirs", tmp_path / "ours", fails=True)
    assert not (tmp_path / "ours").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "something was left behind"


def test_ranks_must_be_complete_and_agree(tmp_path, convert):
    legacy_files(tmp_path / "theirs", {}, tp=2, pp=2)
    victim = tmp_path / "theirs" / "release" / "mp_rank_01_001" / "model_optim_rng.pt"
    state = torch.load(victim, weights_only=False)
    state["model"]["language_model"]["encoder"]["final_norm.weight"][3] = 9.0
    torch.save(state, victim)
    said = convert("megatron-import", tmp_path / "theirs", tmp_path / "o", fails=True)
    assert "final_layernorm.weight" in said and " 0 and 1 " in said
    state["model"]["word_embeddings_for_head"]["weight"] = torch.zeros(32, 64)
    torch.save(state, victim)
    said = convert("megatron-import", tmp_path / "theirs", tmp_path / "o", fails=True)
    assert "word_embeddings_for_head" in said
    victim.unlink()
    assert "mp_rank_01_001" in convert(
        "megatron-import", tmp_path / "theirs", tmp_path / "o", fails=True
    )
