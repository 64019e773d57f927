"""InternLM's demos as this suite's flags: sizes, parameter counts, initial values and ramp."""

import math

import pytest
import torch

from megatron.addons.internlm.initial_values import internlm_scheme
from megatron.arguments import config_from
from megatron.config import command_line
from megatron.config.checks.rules import problems
from megatron.config.model import ModelConfig
from megatron.config.plan import tables
from megatron.config.plan.batch_ramps import micro_batch_steps
from megatron.config.plan.batch_size import build_batch_size_schedule
from megatron.config.plan.parameters import count_parameters, parameter_table
from megatron.config.training import TrainingConfig
from megatron.data.tokenizers.planned import planned_vocabulary
from megatron.features.registry import RunConfig
from megatron.parallel.sharding import Sharding, draw_values
from tests.core.training.built_runs import built
from tests.problems import assert_problem, raises

VOCAB = 103168
DEMOS = {
    "7b": (4096, 32, 32, 11008, 7_321_948_160),
    "20b": (5120, 60, 40, 13824, 20_089_943_040),
    "30b": (6144, 60, 48, 16384, 28_449_036_288),
}


def model_of(hidden: int, layers: int, heads: int, **more) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=2048,
        ffn_multiple_of=256,
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        add_attention_output_bias=True,
        init_scheme="internlm",
        **more,
    )


@pytest.mark.parametrize("demo", DEMOS)
def test_widths_and_parameters_are_those_of_the_demos(demo):
    hidden, layers, heads, ffn, size = DEMOS[demo]
    model = model_of(hidden, layers, heads)
    assert model.ffn == ffn and count_parameters(parameter_table(model, VOCAB)) == size


LOGGED = {
    ("7b", 8): [
        894509056,
        944865280,
        966909952,
        966909952,
        966909952,
        944865280,
        966909952,
        670068736,
    ],
    ("20b", 16): [1262168320, 1269084160, 1269084160, 1222844160],
    ("30b", 16): [1782007296, 1812307968, 1812307968, 1706469888],
}


@pytest.mark.parametrize("demo", LOGGED, ids=str)
def test_the_elements_on_each_rank_that_the_demos_log(demo, capsys):
    """Seeds 000 and 001 and the log of the older 30B page, through a dry
    run."""
    name, world = demo
    words = [
        f"@examples/internlm/{name}.args",
        "--zero-partition",
        "whole-params",
        "--dry-run",
        "--world-size",
        str(world),
    ]
    line = command_line.read(words, {}, tree=RunConfig)
    tables.print_plan(line, planned_vocabulary(line.config.data))
    assert f"  elements per ZeRO rank: {LOGGED[demo]}\n" in capsys.readouterr().out


def test_one_tensor_parallel_rank_holds_what_its_log_sums_to():
    """The 20B log's four ZeRO shares of rank 0; there the output bias is rank 0's alone, here every
    rank has it."""
    hidden, layers, heads, *_ = DEMOS["20b"]
    table = parameter_table(model_of(hidden, layers, heads), VOCAB)
    assert (
        count_parameters(table, {"tp": 4})
        == 5_023_180_800
        == sum((1262168320, 1269084160, 1269084160, 1222844160))
    )


def test_initial_deviations_depend_on_the_layer_and_the_half():
    model = model_of(64, 3, 4)
    table = {s.name: s for s in parameter_table(model, 512, scheme=internlm_scheme(model))}
    assert (
        table["embedding.word_embeddings.weight"].std == table["output_layer.weight"].std == 0.0052
    )
    for layer in range(3):
        at = f"decoder.layers.{layer}."
        scaled = 0.006 / math.sqrt(2 * (layer + 1))
        assert table[at + "self_attention.linear_qkv.weight"].std == 0.006
        assert table[at + "self_attention.linear_proj.weight"].std == scaled
        assert table[at + "mlp.linear_fc1.weight"].std == (0.006, scaled)
        assert table[at + "mlp.linear_fc2.weight"].std == 0.0015
        assert table[at + "self_attention.linear_qkv.bias"].init == "zeros"


def test_a_run_starts_with_the_values_of_its_scheme():
    run = built("--init-scheme", "internlm", "--swiglu")
    weights = dict(run.model[0].named_parameters())
    std = weights["embedding.word_embeddings.weight"][:211].std().item()
    assert std == pytest.approx(0.0052, rel=0.05)
    std = weights["decoder.layers.0.self_attention.linear_qkv.weight"].std().item()
    assert std == pytest.approx(0.006, rel=0.05)


def test_the_halves_are_drawn_with_their_own_deviation():
    sharding = Sharding(
        "mlp.linear_fc1.weight", (2, 300, 200), (), init="normal", std=(0.006, 0.002)
    )
    gate, up = draw_values(sharding, 7)
    assert gate.std().item() == pytest.approx(0.006, rel=0.01) and up.std().item() == pytest.approx(
        0.002, rel=0.01
    )
    assert not torch.equal(gate / 0.006, up / 0.002)


def test_ramp_of_micro_batches():
    """ "2 2 6" with 8 micro-batches: 6 steps of 2, 6 of 4, 6 of 6, then 8 (facts 1.2.7)."""
    schedule = build_batch_size_schedule(
        micro_batch_size=2,
        global_batch_size=64,
        data_parallel_size=4,
        rampup_micro_batches=(2, 2, 6),
    )
    counts = [schedule.num_microbatches(schedule.samples_before(n)) for n in range(1, 26)]
    assert counts == [2] * 6 + [4] * 6 + [6] * 6 + [8] * 7
    assert micro_batch_steps((3, 2, 2), 6, 1) == [(0, 3), (6, 5), (16, 6)]
    for values, code in (
        ((0, 1, 1), "value-out-of-range"),
        ((9, 1, 1), "batch-ramp-starts-too-high"),
        (("a", 1, 1), "batch-ramp-malformed"),
    ):
        with raises(ValueError, code, "--rampup-micro-batches"):
            micro_batch_steps(values, 64, 8)
    with raises(
        ValueError, "flags-exclude-each-other", "--rampup-micro-batches", "--rampup-batch-size"
    ):
        build_batch_size_schedule(
            micro_batch_size=2,
            global_batch_size=64,
            rampup_batch_size=(8, 8, 64),
            rampup_micro_batches=(2, 2, 6),
        )


def test_a_fraction_of_layers_is_recomputed():
    assert [TrainingConfig(recompute_fraction=f).recomputed_runs(5) for f in (0.0, 0.5, 1.0)] == [
        [],
        [1, 1],
        [1] * 5,
    ]
    assert TrainingConfig(recompute_fraction=0.3).recompute == "full"


GOOD = dict(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=16,
    max_position_embeddings=16,
    micro_batch_size=1,
    lr=1e-3,
    train_iters=10,
    mock_data=True,
    vocab_size=100,
    tokenizer_type="NullTokenizer",
)
BAD = [
    ({"ffn_multiple_of": 256}, "flag-needs-other-flag", "--ffn-multiple-of 256"),
    (
        {"ffn_multiple_of": 256, "swiglu": True, "ffn_hidden_size": 64},
        "flags-exclude-each-other",
        "--ffn-multiple-of",
    ),
    ({"init_scheme": "internlm"}, "flag-needs-other-flag", "--init-scheme internlm"),
    ({"label_smoothing": 1.0}, "value-out-of-range", "--label-smoothing 1.0"),
    ({"embed_grad_scale": 0.0}, "value-out-of-range", "--embed-grad-scale 0.0"),
    ({"recompute_fraction": 1.5}, "value-out-of-range", "--recompute-fraction 1.5"),
    (
        {"recompute_fraction": 0.5, "recompute_activations": True},
        "flags-exclude-each-other",
        "--recompute-activations",
    ),
    ({"loss_scale_growth_factor": 1.0}, "value-out-of-range", "--loss-scale-growth-factor 1.0"),
    ({"loss_scale_backoff_factor": 1.0}, "value-out-of-range", "--loss-scale-backoff-factor 1.0"),
    (
        {"fp16": True, "max_loss_scale": 65536.0},
        "initial-loss-scale-out-of-bounds",
        "--max-loss-scale 65536.0",
    ),
    ({"tf32": True, "bf16": True}, "tf32-without-fp32-on-cuda", "--tf32"),
    ({"tf32": True, "device": "cpu"}, "tf32-without-fp32-on-cuda", "--tf32"),
    (
        {"rampup_micro_batches": (9, 1, 1), "global_batch_size": 4},
        "batch-ramp-starts-too-high",
        "--rampup-micro-batches 9 1 1",
    ),
    ({"lr_init_iters": 5, "lr_warmup_iters": 6}, "lr-warmup-too-long", "--lr-init-iters 5"),
]


@pytest.mark.parametrize(
    ("changes", "code", "named"), BAD, ids=[" ".join(changes) for changes, *_ in BAD]
)
def test_what_cannot_be_is_refused(changes, code, named):
    assert not problems(config_from(RunConfig, GOOD), 1)
    [line] = problems(config_from(RunConfig, GOOD | changes), 1, tuple(changes))
    assert_problem(line, code, named)
