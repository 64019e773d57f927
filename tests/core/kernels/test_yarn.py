"""YaRN's rotary tables against those of transformers."""

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.kernels.rotary import rotary_tables

SIZES = dict(num_layers=1, hidden_size=64, num_attention_heads=4, seq_length=64)
# Flags, and the keys of rope_parameters that say the same.
CASES = {
    "plain": ({}, {}),
    "factor 1": (dict(rotary_scaling_factor=1.0), dict(factor=1.0)),
    "a large factor": (dict(rotary_scaling_factor=40.0), dict(factor=40.0)),
    "turns": (dict(beta_fast=16.0, beta_slow=2.0), dict(beta_fast=16.0, beta_slow=2.0)),
    "channels not rounded": (
        dict(yarn_correction_range_round_to_int=False),
        dict(truncate=False),
    ),
    "a short context": (
        dict(original_max_position_embeddings=32),
        dict(original_max_position_embeddings=32),
    ),
    "one channel": (dict(beta_fast=1.0, beta_slow=1.0), dict(beta_fast=1.0, beta_slow=1.0)),
    "lengths": (dict(mscale=0.7, mscale_all_dim=1.3), dict(mscale=0.7, mscale_all_dim=1.3)),
    "another base": (dict(rotary_base=500000), dict(rope_theta=500000.0)),
    "half of a head": (dict(rotary_percent=0.5), dict(partial_rotary_factor=0.5)),
}


@pytest.mark.peers
@pytest.mark.parametrize(("flags", "keys"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("typed", ["rope_type", "position_embedding_type"])
def test_tables_are_those_of_transformers(flags, keys, typed):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = dict(rotary_scaling_factor=4.0, original_max_position_embeddings=4096)
    model = ModelConfig(**SIZES | {"position_embedding_type": "rope", typed: "yarn"} | yarn | flags)
    rope = model.rope(0)
    old = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=16384,
        rope_parameters=old | dict(rope_theta=10000.0) | keys,
    )
    frequencies, length = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    cos, sin = rotary_tables(200, rope.width, rope.base, yarn=rope.yarn, dtype=torch.float64)
    angles = torch.arange(200).double()[:, None] * frequencies.double()
    torch.testing.assert_close(cos, angles.cos() * length, rtol=0, atol=2e-5)
    torch.testing.assert_close(sin, angles.sin() * length, rtol=0, atol=2e-5)


def test_layers_with_a_window_have_a_base_of_their_own():
    """... and no YaRN; without the flag those of the other layers."""
    flags = SIZES | dict(
        num_layers=4,
        position_embedding_type="yarn",
        rotary_scaling_factor=4.0,
        window_size=(7, 0),
        window_attn_skip_freq="2",
    )
    model = ModelConfig(**flags, window_rotary_base=500)
    assert [model.rope(layer).base for layer in range(4)] == [500, 10000, 500, 10000]
    assert [model.rope(layer).yarn is None for layer in range(4)] == [True, False, True, False]
    same = ModelConfig(**flags)
    assert len({same.rope(layer) for layer in range(4)}) == 1
    assert model.window_base == 500 and same.window_base is None
