"""deepspeed-import: Megatron-DeepSpeed's checkpoints, written by the layout of its files: one per
tensor-parallel rank, or with its pipeline one per layer."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch

from megatron.config.plan.parameters import parameter_table
from megatron.inference.load_model import open_trained_model
from tests.load_tool import load_tool
from tests.model.tiny import tiny_config, tiny_model

VOCAB = 64
LAYERS = 4
SIZE = dict(num_layers=LAYERS, hidden_size=32, num_attention_heads=4, seq_length=16)
IDS = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
LLAMA = dict(
    position_embedding_type="rope",
    swiglu=True,
    ffn_hidden_size=48,
    normalization="RMSNorm",
    add_bias_linear=False,
    group_query_attention=True,
    num_query_groups=2,
    untie_embeddings_and_output_weights=True,
)
MODULES = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}


def parts(flags: dict, tp: int) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """A model, and the tensors of each tensor-parallel rank under our names."""
    model = tiny_model(vocab=VOCAB, padded=VOCAB, scramble=True, **SIZE, **flags)
    splits = {
        one.name: dict(one.splits).get("tp")
        for one in parameter_table(tiny_config(**SIZE, **flags), VOCAB, VOCAB)
    }
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(tp)]
    for name, p in model.named_parameters():
        whole = p.detach()
        pieces = [whole] * tp if splits[name] is None else whole.chunk(tp, splits[name])
        for rank, piece in zip(ranks, pieces, strict=True):
            gated = piece.dim() == 3 or (name.endswith("linear_fc1.bias") and piece.dim() == 2)
            rank[name] = (piece.flatten(0, 1) if gated else piece).clone()
    return model, ranks


def arguments(flags: dict, tp: int, pp: int) -> argparse.Namespace:
    """What Megatron-DeepSpeed saves of its command line."""
    config = vars(tiny_config(**SIZE, **flags))
    for name in ("num_query_groups", "group_query_attention", "norm_epsilon", "num_experts"):
        config.pop(name)
    return argparse.Namespace(
        **config
        | dict(
            num_key_value_heads=flags.get("num_query_groups", 4),
            layernorm_epsilon=1e-5,
            num_experts=[1],
            normalization=flags.get("normalization", "LayerNorm").lower(),
            tokenizer_type="NullTokenizer",
            vocab_size=VOCAB,
            padded_vocab_size=VOCAB,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            params_dtype=torch.float32,
        )
    )


def in_layer(name: str) -> tuple[int, str]:
    """Number of the layer, and the name in its file."""
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return int(layer), f"{MODULES[module]}.{kind}"


def nested(rank: dict[str, torch.Tensor]) -> dict:
    """The state dict of its model without a pipeline."""
    embedding: dict = {}
    encoder: dict = {}
    language = {"embedding": embedding, "encoder": encoder}
    for name, x in rank.items():
        if name.startswith("embedding."):
            _, table, kind = name.split(".")
            embedding[table] = {kind: x}
        elif name.startswith("output_layer"):
            language["output_layer"] = {"weight": x}
        elif "final_layernorm" in name:
            encoder[name.removeprefix("decoder.")] = x
        else:
            layer, rest = in_layer(name)
            encoder[f"layers.{layer}.{rest}"] = x
    return {"language_model": language}


def write(folder: Path, flags: dict, tp: int, pp: int, **root) -> torch.nn.Module:
    """A run directory with one checkpoint; pp 0: without DeepSpeed's pipeline."""
    model, ranks = parts(flags, tp)
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    common = {
        "args": arguments(flags, tp, max(pp, 1)),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": "0.14.0",
    } | root
    for m in range(tp * max(pp, 1)):
        module = None if pp else nested(ranks[m])
        torch.save(common | {"module": module}, step / f"mp_rank_{m:02d}_model_states.pt")
    for t in range(tp if pp else 0):
        files: dict[int, dict[str, torch.Tensor]] = {}
        for name, x in ranks[t].items():
            if name.startswith("embedding."):
                files.setdefault(1, {})[name.removeprefix("embedding.")] = x
            elif name.startswith("output_layer"):
                files.setdefault(LAYERS + 6, {})["lm_head.weight"] = x
            elif "final_layernorm" in name:
                files.setdefault(LAYERS + 5, {})[name.rpartition(".")[2]] = x
            else:
                layer, rest = in_layer(name)
                files.setdefault(3 + layer, {})[rest] = x
        for number, tensors in files.items():
            torch.save(tensors, step / f"layer_{number:02d}-model_{t:02d}-model_states.pt")
    return model


def convert(tmp_path: Path, source: str = "ds") -> int:
    words = ["deepspeed-import", str(tmp_path / source), str(tmp_path / "ours")]
    return load_tool("convert_checkpoint").main(words)


@pytest.mark.parametrize("pp", [0, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("flags", [{}, LLAMA], ids=["gpt", "llama"])
def test_the_logits_are_those_of_the_model(flags, tp, pp, tmp_path):
    model = write(tmp_path / "ds", flags, tp, pp)
    assert convert(tmp_path) == 0
    ours = open_trained_model(str(tmp_path / "ours"), device="cpu").model
    with torch.no_grad():
        assert torch.equal(ours(IDS), model(IDS))
    assert convert(tmp_path) == 1, "nothing is overwritten"


class Call:
    """Unpickles as a call of os.system."""

    def __init__(self, flag: Path):
        self.flag = flag

    def __reduce__(self):
        return os.system, (f"touch {self.flag}",)


def edit(path: Path, change) -> None:
    table = torch.load(path, weights_only=False)
    change(table)
    torch.save(table, path)


LAYER = "layer_04-model_01-model_states.pt"
STATES = "mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("pp", "damage", "said"),
    [
        (2, lambda s: (s / LAYER).unlink(), "is on 1 of 2 tensor ranks"),
        (2, lambda s: [p.unlink() for p in s.glob("layer_04-*")], "layers.3.input_layernorm"),
        (2, lambda s: (s / STATES).unlink(), "should be 0, 1, 2"),
        (0, lambda s: (s / "mp_rank_01_model_states.pt").unlink(), "has shape"),
        (2, lambda s: (s / LAYER).write_bytes((s / LAYER).read_bytes()[:999]), "zip file"),
        (2, lambda s: edit(s / LAYER, lambda t: t.update(more=torch.ones(2))), "is not a part"),
        (
            2,
            lambda s: edit(
                s / LAYER, lambda t: t.update({"mlp.dense_4h_to_h.bias": torch.ones(3)})
            ),
            "has shape",
        ),
        (2, lambda s: edit(s / LAYER, lambda t: t.update(evil=Call(s / "executed"))), "run code"),
        (2, lambda s: edit(s / STATES, lambda t: t.update(evil=Call(s / "executed"))), "run code"),
        (0, lambda s: edit(s / STATES, lambda t: t.update(checkpoint_version=0)), "older order"),
        (
            0,
            lambda s: edit(s / STATES, lambda t: t["args"].__dict__.update(num_experts=[4])),
            "num_",
        ),
        (
            0,
            lambda s: (s / STATES).rename(s / "zero_pp_rank_0_mp_rank_00_model_states.pt"),
            "ZeRO 3",
        ),
        (
            2,
            lambda s: (s / LAYER).rename(s / "layer_4_expert_0_mp_rank_0_model_states.pt"),
            "experts",
        ),
        (2, lambda s: (s.parent / "latest").write_text("../ds"), "not a folder's name"),
    ],
)
def test_damaged_folders_are_refused_and_nothing_is_written(pp, damage, said, tmp_path, capfd):
    write(tmp_path / "ds", {}, 2, pp)
    damage(tmp_path / "ds/global_step7")
    assert convert(tmp_path) == 1
    errors = capfd.readouterr().err
    assert said in errors and all(line.startswith("error: ") for line in errors.splitlines()), (
        errors
    )
    assert not (tmp_path / "ours").exists() and not list(tmp_path.rglob("executed"))
