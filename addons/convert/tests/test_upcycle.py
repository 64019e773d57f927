"""tools/convert_checkpoint.py upcycle: a mixture of experts of a dense checkpoint."""

from __future__ import annotations

import pytest
import torch

from megatron.arguments import config_from, to_args_text
from megatron.checkpoint import store
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState
from megatron.checkpoint.tensor_slices import whole
from megatron.config.tree import Config
from megatron.inference.load_model import open_trained_model
from tests.core.model.tiny import tiny_config, tiny_model

VOCAB = 61
FLAGS = dict(
    num_layers=3,
    swiglu=True,
    add_bias_linear=False,
    position_embedding_type="rope",
    normalization="RMSNorm",
)
IDS = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))


def write_ours(folder, model, **flags) -> None:
    """A run directory with this model's weights at iteration 5; `flags` are those of the model."""
    values = vars(tiny_config(**flags))
    more = dict(mock_data=True, vocab_size=VOCAB, make_vocab_size_divisible_by=VOCAB)
    slices = [
        TensorSlice(name, tuple(p.shape), p.dtype, whole(p.shape), p.detach())
        for name, p in model.named_parameters()
    ]
    args = to_args_text(config_from(Config, values | more))
    store.save(folder, 5, slices, RunState(iteration=5), args)


def logits_of(folder) -> torch.Tensor:
    with torch.no_grad():
        return open_trained_model(str(folder), device="cpu").model(IDS)


@pytest.mark.parametrize("pattern", ["1", "[0,1,1]"])
def test_an_upcycled_model_computes_what_the_dense_one_does(pattern, tmp_path, convert):
    """All experts are equal and their probabilities add up to 1."""
    dense = tiny_model(scramble=True, padded=VOCAB, vocab=VOCAB, **FLAGS)
    write_ours(tmp_path / "dense", dense, **FLAGS)
    words = ["--num-experts", 6, "--moe-router-topk", 3, "--moe-layer-freq", pattern]
    convert("upcycle", tmp_path / "dense", tmp_path / "moe", *words)
    with torch.no_grad():
        expected = dense(IDS)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(tmp_path / "moe"), expected, rtol=0, atol=1e-6)
    model = open_trained_model(str(tmp_path / "moe"), device="cpu").model
    weights = dict(model.named_parameters())
    for layer in range(3):
        router = weights.get(f"decoder.layers.{layer}.mlp.router.weight")
        assert (router is None) == (pattern != "1" and layer == 0)
        assert router is None or router.std() > 0


@pytest.mark.parametrize("gated", [True, False])
def test_experts_that_are_parts_of_an_mlp(gated, tmp_path, convert):
    """The parts of one copy have equal logits, so the experts of a token are whole copies."""
    flags = FLAGS | dict(swiglu=gated, ffn_hidden_size=48)
    dense = tiny_model(scramble=True, padded=VOCAB, vocab=VOCAB, **flags)
    write_ours(tmp_path / "dense", dense, **flags)
    words = ["--num-experts", 12, "--moe-router-topk", 6, "--moe-upcycling-granularity", 3]
    convert("upcycle", tmp_path / "dense", tmp_path / "moe", *words)
    with torch.no_grad():
        expected = dense(IDS)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(tmp_path / "moe"), expected, rtol=0, atol=1e-5)
    weights = dict(open_trained_model(str(tmp_path / "moe"), device="cpu").model.named_parameters())
    mlp = "decoder.layers.1.mlp."
    assert weights[mlp + "experts.linear_fc2.weight"].shape == (12, 32, 16)
    logits = weights[mlp + "router.weight"].view(4, 3, 32)
    assert torch.equal(logits, logits[:, :1].expand_as(logits))
    assert not torch.equal(logits[0], logits[1])


def test_what_cannot_be_upcycled(tmp_path, convert):
    biases = FLAGS | dict(add_bias_linear=True)
    for name, flags in (("dense", FLAGS), ("biases", biases)):
        model = tiny_model(padded=VOCAB, vocab=VOCAB, **flags)
        write_ours(tmp_path / name, model, **flags)
    convert("upcycle", tmp_path / "dense", tmp_path / "moe", "--num-experts", 2)
    for source, words in (
        ("biases", ["--num-experts", 2]),
        ("moe", ["--num-experts", 2]),
        ("dense", ["--num-experts", 1]),
        ("dense", ["--num-experts", 4, "--moe-router-topk", 5]),
        ("dense", ["--num-experts", 4, "--moe-router-topk", 1]),
        ("dense", ["--num-experts", 4, "--moe-layer-freq", "[1,0]"]),
        ("dense", ["--num-experts", 4, "--moe-layer-freq", "[0]*3"]),
        ("dense", ["--num-experts", 4, "--moe-layer-freq", "0"]),
        ("dense", ["--num-experts", 4, "--moe-layer-freq", "often"]),
        ("dense", ["--num-experts", 4, "--moe-upcycling-granularity", 3]),
        ("dense", ["--num-experts", 8, "--moe-upcycling-granularity", 4]),
        ("dense", ["--num-experts", 4, "--moe-upcycling-granularity", 0]),
        ("nothing", ["--num-experts", 4]),
    ):
        assert "error: " in convert(
            "upcycle", tmp_path / source, tmp_path / "no", *words, fails=True
        )
        assert not (tmp_path / "no").exists()
