"""Arguments of Megatron-LM's and Megatron-DeepSpeed's releases, as their parsers set them: each is
read, changes nothing, or is refused by name."""

from __future__ import annotations

import math

import pytest

from megatron.addons.convert.links import ConversionError
from megatron.addons.convert.megatron_names import args_for, flags_from
from megatron.addons.convert.tests.argument_sets import releases
from megatron.config.model import ModelConfig

SIZES = dict(
    num_layers=4, hidden_size=64, num_attention_heads=8, seq_length=16, max_position_embeddings=16
)
KINDS = dict.fromkeys("ABCD", "legacy") | dict.fromkeys("VWXY", "deepspeed")
UNKNOWN, UNSUPPORTED = "[config-key-unknown]", "[config-key-not-supported]"


def read(letter: str, **changes) -> ModelConfig:
    """The model of a release's arguments."""
    args = releases()[letter] | SIZES | changes
    flags = flags_from(args, "args", kind=KINDS.get(letter, "core"))
    return ModelConfig(**{name: v for name, v in flags.items() if name in vars(ModelConfig())})


def refusal(letter: str, **changes) -> str:
    with pytest.raises(ConversionError) as error:
        read(letter, **changes)
    return str(error.value)


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXY"
CORE = "EFGHIJKLMNOPQRSTU"


def test_every_release_is_read_and_three_planted_arguments_are_refused():
    assert "".join(releases()) == LETTERS
    for letter in LETTERS:
        assert read(letter).num_layers == 4
        planted = {"attention_temperature": 0.5, "alibi": True, "logits_softcap": 30.0}
        said = refusal(letter, **planted)
        assert UNKNOWN in said and "--ignore-config-key " + " ".join(planted) in said
        args = releases()[letter] | SIZES | planted
        assert flags_from(args, "args", ignored=planted, kind=KINDS.get(letter, "core"))
        read(letter, no_flag_of_ours=False, nor_this=None, nor_that=[])


# what a model is made of, in the words of the releases that have them: arguments, what they are here
ACTS = [
    ("ABCDQRSTUVWXY", {"layernorm_epsilon": 0.1}, {"norm_epsilon": 0.1}),
    ("EFGHIJKLMNOP", {"norm_epsilon": 0.1}, {"norm_epsilon": 0.1}),
    ("QRSTU", {"layernorm_zero_centered_gamma": True}, {"apply_layernorm_1p": True}),
    ("CDEFGHIJKLMNOPWXY", {"apply_layernorm_1p": True}, {"apply_layernorm_1p": True}),
    ("WXY", {"rope_theta": 50000}, {"rotary_base": 50000}),
    (CORE[4:], {"rotary_base": 50000}, {"rotary_base": 50000}),
    ("NOPQRSTU", {"no_rope_freq": [0, 0, 0, 1]}, {"no_rope_freq": "[0, 0, 0, 1]"}),
    ("NOPQRSTU", {"no_rope_freq": 4}, {"no_rope_freq": "4"}),
    ("WXY", {"num_key_value_heads": 2}, {"query_groups": 2}),
    (CORE, {"group_query_attention": True, "num_query_groups": 2}, {"query_groups": 2}),
    ("CDWXY", {"use_rotary_position_embeddings": True}, {"positions": "rope"}),
    ("CDEFWXY", {"swiglu": True}, {"activation": "swiglu"}),
    ("ABCDV", {"openai_gelu": True, "bias_gelu_fusion": False}, {"activation": "gelu (tanh)"}),
    (CORE, {"openai_gelu": True, "bias_gelu_fusion": False}, {"activation": "gelu (erf)"}),
    (
        CORE[1:],
        {"num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": [0.1]},
        {"num_experts": 4, "moe_router_topk": 2},
    ),
]


@pytest.mark.parametrize(("letters", "args", "model"), ACTS)
def test_what_the_model_is_made_of_is_read_in_every_release(letters, args, model):
    for letter in letters:
        assert args.keys() <= releases()[letter].keys() | {"num_query_groups"}, letter
        found = read(letter, **args)
        assert {name: getattr(found, name) for name in model} == model, letter


@pytest.mark.parametrize("name", ["rope_theta", "rotary_position_embeddings_theta"])
def test_a_base_by_another_name_is_that_of_the_model(name):
    """... that has one: the older model computes with 10000."""
    assert read("E", position_embedding_type="rope", **{name: 50000}).rotary_base == 50000
    assert UNSUPPORTED in refusal("A", **{name: 50000})


REFUSED = {
    "qk_l2_norm": True,
    "spec": ["a", "b"],
    "experimental_attention_variant": "dsa",
    "is_hybrid_model": True,
    "hybrid_override_pattern": "M*-",
    "position_embedding_type": "mrope",
    "modelopt_enabled": True,
    "compression_training": True,
    "num_experts_switch": 8,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_this_suite_cannot_compute_is_refused(name):
    letters = [letter for letter in LETTERS if name in releases()[letter]]
    assert letters
    for letter in letters:
        said = refusal(letter, **{name: REFUSED[name]})
        assert UNSUPPORTED in said and name in said


LATENT = dict(
    multi_latent_attention=True,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_head_dim=12,
    qk_pos_emb_head_dim=8,
    v_head_dim=10,
)


def test_latent_attention_is_read_in_every_release_that_has_it():
    for letter in "KLMNOPQRSTU":
        model = read(letter, **LATENT)
        assert model.latents == (24, 20, 12, 8, 10, model.norm_epsilon)
        assert model.yarn is None and model.add_qkv_bias is False


def test_yarn_of_latent_attention_has_what_its_arguments_say_or_is_refused():
    """Its context is no argument: releases read the model's positions, or 4096."""
    yarn = LATENT | dict(rotary_scaling_factor=40.0, max_position_embeddings=4096)
    for letter in "LMNOPQRSTU":
        found = read(letter, **yarn | dict(mscale_all_dim=1.0)).yarn
        assert (found.factor, found.context, found.length) == (40.0, 4096, 1.0)
        assert found.scores == pytest.approx((1 + 0.1 * math.log(40.0)) ** 2)
    assert "--mscale-all-dim" in refusal("K", **yarn)
    longer = refusal("Q", **yarn | dict(max_position_embeddings=8192))
    assert "--original-max-position-embeddings" in longer
    assert read("Q", **yarn | dict(rope_type="rope")).yarn is None
    for name in ("rotary_interleaved", "window_size"):
        value = True if name == "rotary_interleaved" else (7, 0)
        assert UNSUPPORTED in refusal("Q", **LATENT, **{name: value})
    with pytest.raises(ConversionError, match="--multi-latent-attention"):
        flags_from(releases()["Q"] | SIZES | LATENT, "args", kind="legacy")


def test_experts_have_arguments_of_their_own():
    experts = {"num_experts": 4, "moe_router_topk": 2}
    for name, value in {
        "moe_latent_size": 32,
        "moe_apply_probs_on_input": True,
        "moe_mlp_glu_interleave_size": 32,
    }.items():
        assert UNSUPPORTED in refusal("U", **experts, **{name: value})
        assert read("U", **{name: value}).num_experts is None
    assert UNKNOWN in refusal("U", **experts, moe_new_thing=3)
    assert "num_experts" in refusal("E", num_experts=4)  # routers before core 0.5


def test_the_older_model_does_not_read_the_base():
    """Its rotary positions have the base 10000 in all releases, whatever --rotary-base says."""
    args = releases()["I"] | SIZES | {"rotary_base": 500000}
    assert flags_from(args, "args")["rotary_base"] == 500000
    with pytest.raises(ConversionError, match="--rotary-base"):
        flags_from(args, "args", kind="legacy")
    given = {"rotary_base": 10000}
    assert flags_from(args, "args", kind="legacy", overrides=given)["rotary_base"] == 10000
    model = ModelConfig(**SIZES, rotary_base=500000)
    assert args_for(model, {}, experts=False)["rotary_base"] == 500000
    with pytest.raises(ConversionError, match="--rotary-base"):
        args_for(model, {}, experts=False, kind="legacy")


def test_the_older_model_has_no_mup():
    model = ModelConfig(**SIZES, use_mup=True, mup_base_hidden_size=8)
    assert args_for(model, {}, experts=False)["use_mup"]
    with pytest.raises(ConversionError, match="--use-mup"):
        args_for(model, {}, experts=False, kind="legacy")


def test_two_names_of_one_setting_must_agree():
    for letter, both in (("U", {"norm_epsilon": 0.1}), ("W", {"rotary_base": 500})):
        assert UNSUPPORTED in refusal(letter, **both)
        args = releases()[letter] | SIZES | both
        assert flags_from(args, "args", overrides=both)[next(iter(both))] == next(
            iter(both.values())
        )


@pytest.mark.parametrize(
    ("letter", "count"),
    [
        ("A", (19, 129, 0)),
        pytest.param("F", (38, 246, 3), marks=pytest.mark.sweep),
        pytest.param("P", (72, 512, 14), marks=pytest.mark.sweep),
        pytest.param("U", (90, 768, 18), marks=pytest.mark.campaign),
        pytest.param("Y", (30, 347, 4), marks=pytest.mark.sweep),
    ],
)
def test_every_argument_of_a_release_is_sorted(letter, count):
    """How many are flags of the model here, change nothing, and are refused."""
    base = read(letter)
    sorts = {}
    for name in releases()[letter]:
        sorts[name] = "harmless"
        for value in ("other", 5, True, 2.5, [0, 0, 0, 1]):
            try:
                same = read(letter, **{name: value}) == base
            except ConversionError as error:
                sorts[name] = "refused" if "config-key" in str(error) else "read"
                assert name in str(error) or sorts[name] == "read"
            else:
                sorts[name] = sorts[name] if same else "read"
            if sorts[name] != "harmless":
                break
    kinds = list(sorts.values())
    assert tuple(kinds.count(kind) for kind in ("read", "harmless", "refused")) == count


def test_an_export_has_the_layers_without_rotary_positions_and_no_gelu_that_core_lacks():
    rope = {"position_embedding_type": "rope", "no_rope_freq": "[0]*3+[1]*1"}
    args = args_for(ModelConfig(**SIZES, **rope), {}, experts=False)
    assert args["no_rope_freq"] == [0, 0, 0, 1]
    assert flags_from(args, "args")["no_rope_freq"] == "[0, 0, 0, 1]"
    model = ModelConfig(**SIZES, openai_gelu=True, bias_gelu_fusion=False)
    with pytest.raises(ConversionError, match="--openai-gelu"):
        args_for(model, {}, experts=False)
    assert args_for(model, {}, experts=False, kind="legacy")["openai_gelu"]


def test_windows_and_yarn_go_to_megatrons_arguments_and_back():
    """Its plain attention reads yarn_* alone; --rope-type and names without are of latent
    attention."""
    flags = dict(
        window_size=(127, 0),
        window_attn_skip_freq="2",
        position_embedding_type="rope",
        rope_type="yarn",
        rotary_scaling_factor=8.0,
        mscale_all_dim=0.5,
    )
    model = ModelConfig(**SIZES, **flags)
    args = args_for(model, {}, experts=False)
    assert args["window_attn_skip_freq"] == [1, 0, 1, 0]
    assert args["position_embedding_type"] == "yarn" and args["yarn_rotary_scaling_factor"] == 8.0
    back = ModelConfig(**flags_from(args | {"rotary_scaling_factor": 1.0}, "args"))
    assert back.yarn == model.yarn and back.window == 128
    assert back.full_attention_layers == [1, 3]
    latent = flags_from(args | {"position_embedding_type": "rope", "rope_type": "yarn"}, "args")
    assert ModelConfig(**latent).yarn is None
