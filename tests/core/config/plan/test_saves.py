"""What a dry run says of checkpoints: their bytes, against those that runs have written, and how many
there are."""

import shlex

import pytest

from megatron.config import command_line
from megatron.config.plan import saves
from megatron.config.plan.plan import make_plan
from megatron.features.registry import RunConfig
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

WORDS = [
    *with_flags(SMALL, "--vocab-size", "5000", "--hidden-size", "64"),
    *NO_DROPOUT,
    "--mock-data",
]


def planned(words, world=1):
    line = command_line.read([*words, "--dry-run", "--world-size", str(world)], {}, tree=RunConfig)
    return line.config, make_plan(line.config, world, line.config.data.vocab_size)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "flags, world",
    [
        ("", 1),
        ("--bf16", 1),
        (
            "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16",
            2,
        ),
        ("--optimizer muon --muon-momentum 0.95", 1),
        ("--bf16 --num-experts 4", 1),
        ("--bf16 --tensor-model-parallel-size 2 --no-save-optim", 2),
    ],
)
def test_bytes_are_those_of_a_checkpoint(flags, world, tmp_path):
    words = [*WORDS, *shlex.split(flags), "--train-iters", "4", "--save", str(tmp_path / "run")]
    folder = tmp_path / "run" / "iter_0000004"
    config, plan = planned(words, world)
    train(tmp_path, [*words, "--save-interval", "4"], world=world)
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert written == pytest.approx(saves.checkpoint_bytes(config, plan), rel=0.02)


@pytest.mark.parametrize(
    "flags, kept",
    [
        ("", 1),
        ("--save-interval 10", 10),
        ("--save-interval 30", 4),
        ("--save-interval 10 --keep-last 2", 3),
        ("--save-interval 10 --keep-last 2 --keep-every 50", 5),
        ("--save-interval 50 --keep-last 9", 2),
    ],
)
def test_how_many_are_kept(flags, kept, tmp_path):
    words = [*WORDS, "--train-iters", "100", "--save", str(tmp_path), *flags.split()]
    config, plan = planned(words)
    assert saves.checkpoints_kept(config, plan) == kept
    [line] = saves.save_lines(config, plan)
    assert f" {kept} on the disk" in line


def test_host_memory_of_asynchronous_saves(tmp_path):
    config, plan = planned([*WORDS, "--train-iters", "9", "--save", str(tmp_path), "--async-save"])
    assert len(list(saves.save_lines(config, plan))) == 2
    assert not list(saves.save_lines(*planned([*WORDS, "--train-iters", "9"])))
