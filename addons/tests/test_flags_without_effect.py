"""A flag of which a command line says that it has no effect has its default in the configuration:
of everything that a flag needs, without it."""

from __future__ import annotations

import functools

import pytest

from megatron.arguments import Flag, flags_of, values_of
from megatron.config import command_line
from megatron.config.checks.declared import effective, is_met
from megatron.config.checks.facts import Facts
from megatron.config.command_line import CommandLine
from megatron.config.script import NO_SCRIPT, Script
from megatron.features.registry import RunConfig
from tests.core.config.checks.checked_flags import BASE
from tests.problems import codes_of

# Command lines that lack what flags need: each flag is added to the first that lacks its need.
LACKING = (
    BASE,
    f"{BASE} --device cpu --eval-iters 0 --lr-decay-style constant --optimizer sgd "
    "--position-embedding-type none --weight-decay-incr-style linear --start-weight-decay 0 "
    "--end-weight-decay 0.1 --attention-backend fused --tensorboard-dir x --decoupled-lr 1e-3 "
    "--init-method-xavier-uniform",
    f"{BASE} --num-experts 2 --moe-router-score-function sigmoid --disable-bias-linear "
    "--moe-router-load-balancing-type none",
    f"{BASE} --fp8-format hybrid --fp8-recipe tensorwise --swiglu --skip-train",
    BASE.replace("--mock-data", "--packed-samples --dummy-data internlm"),
    f"{BASE} --swiglu --init-scheme internlm",
    f"{BASE} --multi-latent-attention --position-embedding-type rope --disable-bias-linear",
)
# What the rules want with a flag.
WITH = {
    "fim_split_sample": "--fim-fragment-rate 0.5",
    "decoupled_min_lr": "--decoupled-lr 1e-3",
    "main_grads_dtype": "--use-precision-aware-optimizer",
}
FLAGS = flags_of(RunConfig)
NEEDS = [(flag, index) for flag in FLAGS.values() for index in range(len(flag.needs))]
VALUES = {
    "linear_attention_freq": "[0,1]",
    "moe_layer_freq": "[0,1]",
    "no_rope_freq": "[0,1]",
    "window_attn_skip_freq": "[0,1]",
    "window_size": "3,0",
    "split": "80,10,10",
    "loss_scale_growth_factor": "3",
    "loss_scale_window": "3",
    "lr_power_exponent": "-0.3",
    "rotary_percent": "0.5",
    "spike_action": "off",
    "cuda_graph_warmup_steps": "5",
    "crash_loop_limit": "5",
    "hierarchical_context_parallel_sizes": "1 2",
}


def words_of(flag: Flag) -> list[str]:
    """The flag with another value than its default."""
    if flag.kind in ("switch", "off"):
        return [flag.spelling]
    value = VALUES.get(flag.name) or {int: "3", float: "0.0001"}.get(flag.type, "x")
    if flag.choices and flag.name not in VALUES:
        default = flag.default if isinstance(flag.default, tuple) else (flag.default,)
        value = next(str(choice) for choice in flag.choices if choice not in default)
    return [flag.spelling, value]


def read(flags: str, script: Script = NO_SCRIPT) -> CommandLine:
    return command_line.read(flags.split(), {}, script, RunConfig)


@functools.cache
def facts(base: str) -> Facts:
    """Of a base without the flag."""
    return Facts(read(base).config, 1, ())


@pytest.mark.parametrize(
    ("flag", "index"), NEEDS, ids=[f"{flag.name}-{index}" for flag, index in NEEDS]
)
def test_without_what_it_needs_a_flag_is_noted_and_leaves_the_configuration(flag, index):
    need = flag.needs[index]
    bases = [f"{base} {WITH.get(flag.name, '')}" for base in LACKING]
    if flag.name.endswith("_samples"):
        bases = [base.replace("--train-iters", "--train-samples") for base in bases]
    base = next(base for base in bases if not is_met(need, facts(base)))
    line = read(f"{base} {' '.join(words_of(flag))}")
    assert codes_of([note for note in line.notes if note.startswith(flag.spelling)])
    assert line.typed[flag.name] != flag.default
    assert line.config == facts(base).config


def test_with_it_the_value_stays():
    line = read(
        f"{BASE} --num-experts 2 --disable-bias-linear --moe-router-topk 1 --moe-router-pre-softmax"
    )
    assert line.notes == []
    assert line.config.model.moe_router_topk == 1 and line.config.model.moe_router_pre_softmax


def test_what_needs_a_flag_without_effect_has_none_either():
    chain = "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
    line = read(f"{BASE} {chain} --moe-layer-recompute --recompute-modules mlp")
    assert codes_of(line.notes) == ["flag-has-no-effect"] * 4
    assert line.config == read(BASE).config
    assert line.config.training.recompute is None


def test_a_decay_that_a_constant_rate_warms_up_in_has_an_effect():
    """... the warm-up may be longer than this run."""
    flags = "--lr-decay-style constant --lr-warmup-iters 15 --lr-decay-iters 40"
    line = read(f"{BASE} {flags}")
    assert line.notes == [] and line.config.optimizer.lr_decay_iters == 40


def test_a_model_of_ones_own_may_read_what_ours_has_no_use_for():
    flags = f"{BASE} --rotary-base 5000 --loss-scale 2"
    for script in (Script(model_provider=print), Script(complete=False)):
        line = read(flags, script)
        assert codes_of(line.notes) == ["flag-has-no-effect"]
        assert line.config.model.rotary_base == 5000 and line.config.precision.loss_scale is None
    assert effective(line.config).model == read(BASE).config.model


def test_data_of_ones_own_may_read_the_flags_of_ours():
    line = read(f"{BASE} --split 8,1,1", Script(datasets_provider=print))
    assert line.notes == [] and line.config.data.split == "8,1,1"


def test_defaults_of_a_script_are_taken_back_too():
    def provider(parser):
        parser.set_defaults(expert_tensor_parallel_size=2)

    line = read(BASE, Script(extra_args_provider=provider))
    assert codes_of(line.notes) == ["flag-has-no-effect"]
    assert values_of(line.config) == values_of(read(BASE).config)
