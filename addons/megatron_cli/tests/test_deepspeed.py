"""--deepspeed_config: what the JSON file sets becomes flags, and anything else in it is an error."""

from __future__ import annotations

import json

import pytest

from megatron.config import command_line
from megatron.features.registry import RunConfig
from tests.core.config.checks.checked_flags import BASE
from tests.problems import assert_problem

FILE = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 3},
    "bf16": {"enabled": False},
    "train_micro_batch_size_per_gpu": "auto",
    "scheduler": None,
}


def read(tmp_path, content: object, *more: str):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return command_line.read(
        [*BASE.split(), *more, "--deepspeed_config", str(path)], {}, tree=RunConfig
    )


def test_what_it_sets_are_flags(tmp_path):
    c = read(tmp_path, FILE, "--deepspeed").config
    expected = (
        "--global-batch-size 32 --clip-grad 0.5 --data-parallel-sharding-strategy optim --fp16 "
        "--initial-loss-scale 4096 --hysteresis 3"
    )
    assert c == command_line.read([*BASE.split(), *expected.split()], {}, tree=RunConfig).config


EXPERTS = (
    "--moe-expert-parallel-size 2 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 "
    "--moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --create-moe-param-group"
).split()


def test_one_expert_of_megatron_deepspeed_is_none():
    line = command_line.read([*BASE.split(), "--num-experts", "1", *EXPERTS], {}, tree=RunConfig)
    assert line.config == command_line.read(BASE.split(), {}, tree=RunConfig).config
    assert any("--num-experts 1" in note for note in line.notes)


@pytest.mark.parametrize("number", ["2", None])
def test_experts_of_megatron_deepspeed_are_refused(number):
    words = ["--num-experts", number] * (number is not None)
    _, problems = command_line.judge([*BASE.split(), *words, *EXPERTS], 1, RunConfig)
    for flag in EXPERTS[::2]:
        assert any(line.startswith(flag) for line in problems)


def test_one_expert_of_megatron_is_one():
    line = command_line.judge([*BASE.split(), "--num-experts", "1"], 1, RunConfig)
    assert any("router" in problem for problem in line[1])


def test_a_fixed_loss_scale(tmp_path):
    c = read(tmp_path, {"fp16": {"enabled": True, "loss_scale": 512}}).config
    assert c.precision.loss_scale == 512


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        ({"zero_optimization": {"stage": 4}}, "deepspeed-config-not-supported", "stage 4"),
        ({"optimizer": {"type": "Adam"}}, "deepspeed-config-not-supported", "--adam-beta1"),
        ({"curriculum_learning": {"enabled": True}}, "deepspeed-config-not-supported", "curric"),
        ({"train_micro_batch_size_per_gpu": 8}, "flag-contradicts-deepspeed-config", "--micro"),
        ([1], "deepspeed-config-malformed", "ds.json"),
    ],
)
def test_what_is_refused(tmp_path, capsys, content, code, named):
    with pytest.raises(SystemExit) as left:
        read(tmp_path, content)
    [line] = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert_problem(line, code, named)


def test_a_missing_file_is_an_error_of_a_real_run_only(capsys):
    words = [*BASE.split(), "--deepspeed_config", "none.json"]
    with pytest.raises(SystemExit):
        command_line.read(words, {}, tree=RunConfig)
    assert_problem(capsys.readouterr().err.strip(), "file-not-readable", "none.json")
    assert command_line.read([*words, "--dry-run"], {}, tree=RunConfig).config.training.dry_run
