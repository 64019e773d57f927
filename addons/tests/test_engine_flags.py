"""Engine and the flags of other add-ons."""

from __future__ import annotations

import pytest

from megatron.addons.engine.engine import verdict_on
from megatron.arguments import config_from, flags_of, parse_typed
from megatron.config import command_line
from megatron.features.registry import RunConfig
from megatron.training import Engine
from megatron.training.feature import Feature
from tests.problems import assert_problem, raises
from tests.runs import SMALL

# What an engine does, of all flags of features; each other one is named or refused.
TAKEN = {"extend_vocabulary", "log_max_attention_logit"} | {
    f"qk_clip{more}" for more in ("", "_alpha", "_threshold")
}


@pytest.mark.parametrize(
    "flags",
    [
        "--ema-decay 0.9",
        "--merge-window 2 --save run",
        "--data-loss-weights 1 2",
        "--spike-action skip-update",
        "--dry-run",
        "--dry-run --trace",
    ],
)
def test_what_would_make_other_steps_is_refused(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises(ValueError, "engine-flag", flags.split()[0]):
        Engine([*SMALL, "--train-iters", "8", *flags.split()])


@pytest.mark.parametrize(
    "flags",
    [
        "--fim-data",
        "--train-weighted-split-paths a",
        "--stages file --save run",
        "--phase-transition-iterations 4 --save run",
    ],
)
def test_what_chooses_samples_is_refused(flags, tmp_path, monkeypatch, capsys):
    """As for a script with data sets of its own."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        Engine([*SMALL, "--train-iters", "8", *flags.split()])
    assert left.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert_problem(line, "two-data-sources", flags.split()[0])


def test_no_flag_is_ignored_silently():
    """Of those that belong to features, an engine does these, and has a word for all others."""
    config = config_from(RunConfig, parse_typed(command_line.parser(RunConfig), SMALL))
    flags = flags_of(RunConfig).values()
    of_features = [flag for flag in flags if isinstance(getattr(config, flag.group), Feature)]
    assert len(of_features) > 60
    assert {flag.name for flag in of_features if verdict_on(flag, config) == "taken"} == TAKEN


@pytest.mark.parametrize("flag", ["data_path", "num_workers", "replication", "log_params_norm"])
def test_flags_of_data_and_loop_are_named(flag):
    config = config_from(RunConfig, parse_typed(command_line.parser(RunConfig), SMALL))
    assert verdict_on(flags_of(RunConfig)[flag], config) == "noted"
    for name in ("vocab_size", "eod_mask_loss", "seed", "load"):
        assert verdict_on(flags_of(RunConfig)[name], config) == "taken"
