"""Which parameters are decayed, in which group order, and who gets the decoupled learning rate."""

from types import SimpleNamespace

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.param_groups import build_param_groups, has_weight_decay


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("embedding.word_embeddings.weight", (50304, 1024), True),
        ("embedding.position_embeddings.weight", (1024, 1024), True),
        ("decoder.layers.3.self_attention.linear_proj.weight", (1024, 1024), True),
        ("decoder.layers.3.self_attention.linear_proj.bias", (1024,), False),
        ("decoder.layers.3.mlp.linear_fc1.weight", (2, 4096, 1024), True),
        ("decoder.layers.3.mlp.linear_fc1.bias", (2, 4096), False),
        ("decoder.layers.3.input_layernorm.weight", (1024,), False),
        ("decoder.layers.3.input_layernorm.bias", (1024,), False),
        ("decoder.layers.3.self_attention.q_layernorm.weight", (64,), False),
        ("decoder.final_layernorm.weight", (1024,), False),
        ("output_layer.weight", (50304, 1024), True),
    ],
)
def test_weight_decay_rule(name, shape, decayed):
    assert has_weight_decay(name, shape) is decayed


def test_qk_layernorm_flag_touches_only_those_norms():
    for name, decayed in [
        ("decoder.layers.0.self_attention.q_layernorm.weight", True),
        ("decoder.layers.0.self_attention.k_layernorm.weight", True),
        ("decoder.layers.0.input_layernorm.weight", False),
        ("decoder.layers.0.self_attention.linear_qkv.bias", False),
    ]:
        assert has_weight_decay(name, (64,), apply_wd_to_qk_layernorm=True) is decayed


def test_groups_cover_all_parameters_decayed_first(make_params, decayed_names):
    params = make_params()
    decay, no_decay = build_param_groups(params, OptimizerConfig())
    assert (decay["wd_mult"], no_decay["wd_mult"]) == (1.0, 0.0)
    assert set(decay["names"]) == decayed_names
    assert set(decay["names"]) | set(no_decay["names"]) == {param.sharding.name for param in params}
    for group in (decay, no_decay):
        assert [param.sharding.name for param in group["params"]] == group["names"]


def test_one_dimension_is_judged_on_the_global_shape():
    # a flat piece of a matrix is still a matrix's weight
    sliced = torch.nn.Parameter(torch.zeros(8))
    sliced.sharding = SimpleNamespace(name="decoder.layers.0.mlp.linear_fc2.weight", shape=(4, 4))
    (group,) = build_param_groups([sliced], OptimizerConfig())
    assert group["wd_mult"] == 1.0


def test_decoupled_learning_rate_goes_to_embedding_and_output(make_params):
    groups = build_param_groups(
        make_params(), OptimizerConfig(decoupled_lr=1e-3, decoupled_min_lr=1e-4)
    )
    assert [(g.get("max_lr"), g.get("min_lr"), g["wd_mult"]) for g in groups] == [
        (None, None, 1.0),
        (None, None, 0.0),
        (1e-3, 1e-4, 1.0),
    ]
    assert groups[2]["names"] == ["embedding.word_embeddings.weight", "output_layer.weight"]
    assert "min_lr" not in build_param_groups(make_params(), OptimizerConfig(decoupled_lr=1e-3))[2]


def test_a_name_given_twice_is_refused(make_params):
    params = make_params()
    with pytest.raises(ValueError, match=r"output_layer\.weight"):
        build_param_groups([*params, params[-1]], OptimizerConfig())
