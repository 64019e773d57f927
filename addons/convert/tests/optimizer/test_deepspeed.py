"""deepspeed-import: Megatron-DeepSpeed's checkpoints, written by the layout of its files: one per
tensor-parallel rank, or with its pipeline one per layer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron.addons.convert.tests.deepspeed_writer import write_files
from megatron.inference.load_model import open_trained_model
from tests.core.model.tiny import tiny_config, tiny_model
from tests.load_tool import load_tool

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


def write(folder: Path, flags: dict, tp: int, pp: int, **root) -> torch.nn.Module:
    """A run directory with one checkpoint; pp 0: without DeepSpeed's pipeline."""
    model = tiny_model(vocab=VOCAB, padded=VOCAB, scramble=True, **SIZE, **flags)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    config = tiny_config(**SIZE, **flags)
    write_files(folder / "global_step7", tensors, config, tp, pp, **root)
    (folder / "latest").write_text("global_step7")
    return model


def convert(tmp_path: Path, source: str = "ds") -> int:
    words = ["deepspeed-import", str(tmp_path / source), str(tmp_path / "ours")]
    return load_tool("convert_checkpoint").main(words)


@pytest.mark.parametrize("pp", [0, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "flags",
    [{}, LLAMA | dict(rotary_base=500, norm_epsilon=0.1)],
    ids=["gpt", "llama"],
)
def test_the_logits_are_those_of_the_model(flags, tp, pp, tmp_path, monkeypatch):
    if not flags and tp == pp == 2:
        monkeypatch.undo()  # by the other process
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
        (2, lambda s: (s.parent / "latest").write_text("../ds"), "[name-not-safe]"),
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
