"""The parameter table: counts of published models, names and shapes, what each option adds, first
values."""

import math

import pytest

from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import (
    Chunk,
    ParameterSpec,
    count_parameters,
    parameter_table,
    stage_table,
)

SMALL = dict(
    num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, max_position_embeddings=16
)


def table(vocab=64, **flags):
    return parameter_table(ModelConfig(**{**SMALL, **flags}), vocab)


def shapes(**flags):
    return {spec.name: spec.shape for spec in table(**flags)}


def test_seed_configuration():
    gpt2_345m = ModelConfig(
        num_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        seq_length=1024,
        max_position_embeddings=1024,
    )
    assert count_parameters(parameter_table(gpt2_345m, 50304)) == 354871296


@pytest.mark.parametrize(
    "h, layers, heads, ffn, total",
    [
        (4096, 32, 32, 11008, 7_321_948_160),
        (5120, 60, 40, 13824, 20_089_943_040),
        (6144, 60, 48, 16384, 28_449_036_288),
    ],
)
def test_internlm_sizes(h, layers, heads, ffn, total):
    """Totals those models print: biases on qkv and attention output, none in the MLP."""
    flags = dict(
        num_layers=layers,
        hidden_size=h,
        num_attention_heads=heads,
        ffn_hidden_size=ffn,
        seq_length=2048,
        max_position_embeddings=2048,
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        add_bias_linear=False,
    )
    biased = ModelConfig(**flags, add_qkv_bias=True, add_attention_output_bias=True)
    assert count_parameters(parameter_table(biased, 103168)) == total
    assert count_parameters(parameter_table(ModelConfig(**flags), 103168)) == total - layers * 4 * h


@pytest.mark.parametrize(
    "h, layers, vocab, length", [(64, 1, 128, 32), (96, 5, 640, 48), (768, 12, 50304, 1024)]
)
def test_gpt2_formula(h, layers, vocab, length):
    model = ModelConfig(
        num_layers=layers,
        hidden_size=h,
        num_attention_heads=4,
        seq_length=length,
        max_position_embeddings=length,
    )
    total = vocab * h + length * h + layers * (12 * h * h + 13 * h) + 2 * h
    assert count_parameters(parameter_table(model, vocab)) == total


def test_names_and_shapes_in_order():
    assert [(spec.name, spec.shape, spec.splits) for spec in table(num_layers=1)] == [
        ("embedding.word_embeddings.weight", (64, 32), (("tp", 0),)),
        ("embedding.position_embeddings.weight", (16, 32), ()),
        ("decoder.layers.0.input_layernorm.weight", (32,), ()),
        ("decoder.layers.0.input_layernorm.bias", (32,), ()),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (96, 32), (("tp", 0),)),
        ("decoder.layers.0.self_attention.linear_qkv.bias", (96,), (("tp", 0),)),
        ("decoder.layers.0.self_attention.linear_proj.weight", (32, 32), (("tp", 1),)),
        ("decoder.layers.0.self_attention.linear_proj.bias", (32,), ()),
        ("decoder.layers.0.pre_mlp_layernorm.weight", (32,), ()),
        ("decoder.layers.0.pre_mlp_layernorm.bias", (32,), ()),
        ("decoder.layers.0.mlp.linear_fc1.weight", (128, 32), (("tp", 0),)),
        ("decoder.layers.0.mlp.linear_fc1.bias", (128,), (("tp", 0),)),
        ("decoder.layers.0.mlp.linear_fc2.weight", (32, 128), (("tp", 1),)),
        ("decoder.layers.0.mlp.linear_fc2.bias", (32,), ()),
        ("decoder.final_layernorm.weight", (32,), ()),
        ("decoder.final_layernorm.bias", (32,), ()),
    ]


@pytest.mark.parametrize(
    "flag, names",
    [
        ("add_qkv_bias", {"self_attention.linear_qkv.bias"}),
        ("add_attention_output_bias", {"self_attention.linear_proj.bias"}),
        ("add_mlp_bias", {"mlp.linear_fc1.bias", "mlp.linear_fc2.bias"}),
    ],
)
def test_each_bias_switch_adds_its_own(flag, names):
    bare = shapes(add_bias_linear=False)
    assert not [name for name in bare if ".linear_" in name and name.endswith(".bias")]
    added = set(shapes(add_bias_linear=False, **{flag: True})) - set(bare)
    assert added == {f"decoder.layers.{i}.{name}" for i in (0, 1) for name in names}


@pytest.mark.parametrize(
    "flags, name, shape",
    [
        (
            dict(group_query_attention=True, num_query_groups=2),
            "self_attention.linear_qkv.weight",
            (64, 32),
        ),
        (dict(kv_channels=16), "self_attention.linear_qkv.weight", (192, 32)),
        (dict(kv_channels=16), "self_attention.linear_proj.weight", (32, 64)),
        (dict(swiglu=True, ffn_hidden_size=40), "mlp.linear_fc1.weight", (2, 40, 32)),
        (dict(swiglu=True, ffn_hidden_size=40), "mlp.linear_fc1.bias", (2, 40)),
        (dict(geglu=True), "mlp.linear_fc1.weight", (2, 64, 32)),
        (dict(squared_relu=True, ffn_hidden_size=40), "mlp.linear_fc2.weight", (32, 40)),
        (dict(qk_layernorm=True), "self_attention.q_layernorm.weight", (8,)),
        (dict(qk_layernorm=True), "self_attention.k_layernorm.bias", (8,)),
    ],
)
def test_options_shape_their_parameters(flags, name, shape):
    assert shapes(**flags)[f"decoder.layers.1.{name}"] == shape


def test_gated_weights_are_split_inside_each_half():
    spec = {s.name: s for s in table(swiglu=True, ffn_hidden_size=40)}[
        "decoder.layers.0.mlp.linear_fc1.weight"
    ]
    assert spec.splits == (("tp", 1),)
    assert spec.local_shape({"tp": 2}) == (2, 20, 32)


def test_positions_norm_and_output():
    plain = shapes()
    assert shapes(max_position_embeddings=20)["embedding.position_embeddings.weight"] == (20, 32)
    for flags in (dict(position_embedding_type="rope"), dict(add_position_embedding=False)):
        assert set(plain) - set(shapes(**flags)) == {"embedding.position_embeddings.weight"}
    assert all(
        "layernorm.bias" not in name for name in shapes(normalization="RMSNorm", qk_layernorm=True)
    )
    untied = shapes(untie_embeddings_and_output_weights=True)
    assert set(untied) - set(plain) == {"output_layer.weight"} and untied[
        "output_layer.weight"
    ] == (64, 32)


def test_megatron_first_values():
    specs = {
        s.name: s
        for s in table(num_layers=8, init_method_std=0.01, untie_embeddings_and_output_weights=True)
    }
    ends_a_branch = 0.01 / math.sqrt(2 * 8)
    for name, spec in specs.items():
        if name.endswith("bias"):
            assert (spec.init, spec.std) == ("zeros", 0.0)
        elif "norm" in name:
            assert spec.init == "ones"
        else:
            std = ends_a_branch if "linear_proj" in name or "linear_fc2" in name else 0.01
            assert (spec.init, spec.std) == ("normal", std), name


def test_layernorm_1p_and_xavier():
    specs = {s.name: s for s in table(apply_layernorm_1p=True, init_method_xavier_uniform=True)}
    assert specs["decoder.final_layernorm.weight"].init == "zeros"
    assert {s.init for s in specs.values() if len(s.shape) == 2} == {"xavier_uniform"}


def test_another_scheme_fits():
    """A scheme may depend on the layer itself, as InternLM's depth-scaled one does."""
    model = ModelConfig(**SMALL)

    def scheme(role, layer):
        return "normal", 0.006 / math.sqrt(2 * (layer + 1)) if role == "attention_output" else 0.006

    stds = {s.name: s.std for s in parameter_table(model, 64, scheme=scheme)}
    assert stds["decoder.layers.1.self_attention.linear_proj.weight"] == 0.006 / 2
    assert stds["decoder.layers.1.self_attention.linear_qkv.weight"] == 0.006


def test_padding_rows_are_named_on_both_ends():
    model = ModelConfig(**SMALL, untie_embeddings_and_output_weights=True)
    real = {s.name: s.real_rows for s in parameter_table(model, 64, 61)}
    assert {name for name, rows in real.items() if rows == 61} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }
    assert set(real.values()) == {61, None}
    assert {s.real_rows for s in parameter_table(model, 64, 64)} == {None}


@pytest.mark.parametrize("untied", [False, True])
def test_stages_cover_the_model(untied):
    whole = table(num_layers=4, untie_embeddings_and_output_weights=untied)
    chunks = [Chunk(range(i * 2, i * 2 + 2), i == 0, i == 1, i == 1) for i in (0, 1)]
    stages = [stage_table(whole, chunk) for chunk in chunks]
    names = [spec.name for stage in stages for spec in stage]
    twice = {name for name in names if names.count(name) > 1}
    assert set(names) == {spec.name for spec in whole}
    assert twice == (set() if untied else {"embedding.word_embeddings.weight"})
    assert (
        stage_table(whole, Chunk(range(4), True, True, True))
        == whole
        == stage_table(whole, *chunks)
    )
    assert {spec.layer for spec in stages[1]} - {None} == {2, 3}
    assert "embedding.position_embeddings.weight" not in [spec.name for spec in stages[1]]


def test_an_uneven_split_names_itself():
    spec = ParameterSpec("decoder.layers.0.mlp.linear_fc1.weight", (10, 4), (("tp", 0),))
    with pytest.raises(ValueError, match=r"linear_fc1.weight: dim 0 .*\b10 .*tp 4"):
        spec.local_shape({"tp": 4})


def test_local_counts_add_up():
    specs = table(swiglu=True, ffn_hidden_size=40)
    whole = sum(s.size for s in specs if not s.splits)
    assert 2 * count_parameters(specs, {"tp": 2}) - whole == count_parameters(specs)
