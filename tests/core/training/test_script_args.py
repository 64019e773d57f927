"""Flags of a script's own: read in its forward_step, printed, saved with the checkpoint."""

import contextlib
import copy
import json
import pickle
import re
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import reading
from megatron.config import command_line, saved_flags
from megatron.config.plan.plan import make_plan
from megatron.config.script import Script
from megatron.features.registry import RunConfig
from megatron.training import get_args
from megatron.training.logging.printed_arguments import dump
from megatron.training.run import Progress
from megatron.training.script_args import Arguments
from tests.forkrun import run_ranks
from tests.runs import NO_DROPOUT, SMALL, plot, same_tensors, with_flags

FLAGS = with_flags([*SMALL, *NO_DROPOUT], "--log-format", "short", "--mock-data")
COUNTERS = ("iteration", "curr_iteration", "consumed_train_samples")


def add_flags(parser):
    parser.add_argument("--loss-factor", type=float, default=1.0, help="weight of every loss")


def own_loss(batch, model):
    """The loss times the script's flag; how often it was called is a metric."""
    args = get_args()
    args.calls = getattr(args, "calls", 0) + 1
    padded = {1: 216, 2: 224}[args.tensor_model_parallel_size]
    assert (args.padded_vocab_size, args.params_dtype) == (padded, torch.float32)
    counters = {f"own {name}": float(getattr(args, name)) for name in COUNTERS}
    losses = model(batch.tokens, batch.position_ids, labels=batch.labels, **batch.extras)
    metrics = {"calls": float(args.calls), **counters}
    return losses.sum() * args.loss_factor, losses.numel(), metrics


def _rank(rank: int, world: int, folder: Path, argv: list[str]) -> None:
    with open(folder / f"log.{rank}", "a") as log, contextlib.redirect_stdout(log):
        plot().main(argv, forward_step=own_loss, extra_args_provider=add_flags)


def run(folder: Path, world: int, *flags: str) -> tuple[list[dict], dict]:
    """The rows of the metrics file, and all tensors of the last checkpoint."""
    folder.mkdir(exist_ok=True)
    files = ["--save", folder / "save", "--load", folder / "save", "--metrics-file", folder / "m"]
    argv = with_flags(FLAGS, *map(str, files), *flags)
    run_ranks(world, _rank, folder, argv, seconds=100.0)
    with reading.load(folder / "save").reader() as reader:
        tensors = {name: reader.read(name) for name in reader.names()}
    rows = map(json.loads, (folder / "m").read_text().splitlines())
    return [row for row in rows if "split" not in row], tensors


LAYOUTS = {
    "one": (1, []),
    "data": (2, ["--use-distributed-optimizer"]),
    "tensor": (2, ["--tensor-model-parallel-size", "2"]),
}


@pytest.mark.parametrize("layout", ["one", pytest.param("tensor", marks=pytest.mark.campaign)])
def test_own_loss_with_an_own_flag_trains_and_resumes(tmp_path, layout):
    world, flags = LAYOUTS[layout]
    flags = [*flags, "--train-iters", "4", "--lr-warmup-iters", "1"]
    factor = ["--loss-factor", "0.5"]
    plain, _ = run(tmp_path / "plain", world, *flags)
    halved, tensors = run(tmp_path / "halved", world, *flags, *factor)
    assert halved[0]["lm_loss"] == pytest.approx(plain[0]["lm_loss"] / 2, rel=1e-6)
    assert halved[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"] / 2, rel=1e-5)

    run(tmp_path / "resumed", world, *flags, *factor, "--exit-interval", "2")
    resumed, again = run(tmp_path / "resumed", world, *flags, *factor)
    assert [row["lm_loss"] for row in resumed] == [row["lm_loss"] for row in halved]
    same_tensors(tensors, again)
    assert [[row[f"own {name}"] for row in halved] for name in COUNTERS] == [
        [0, 0, 0, 0],
        [0, 1, 2, 3],
        [0, 8, 16, 24],
    ]
    assert [row["own iteration"] for row in resumed] == [0, 0, 2, 2]

    assert "--loss-factor 0.5" in (tmp_path / "halved/log.0").read_text()
    args = reading.load(tmp_path / "halved/save").directory / "args"
    assert "--loss-factor 0.5\n" in args.read_text()
    for tree in (saved_flags.Config, RunConfig):
        assert saved_flags.read(args, tree).notes == []


def test_the_table_of_arguments_has_them():
    line = command_line.read(
        [*FLAGS, "--train-iters", "9", "--loss-factor", "3"],
        {},
        Script(extra_args_provider=add_flags),
        RunConfig,
    )
    plan = make_plan(line.config, 1, 211)
    assert re.search(r"loss_factor \.+ 3\.0", dump(line.config, plan, "gloo", of_script=line.extra))


def test_arguments_of_the_suite_cannot_be_assigned():
    args = Arguments({"hidden_size": 32}, {"loss_factor": 0.5})
    args.loss_factor = args.other = 2.0
    assert (args.hidden_size, args.loss_factor, args.other) == (32, 2.0, 2.0)
    for name in ("hidden_size", "iteration", "consumed_train_samples"):
        with pytest.raises(AttributeError, match=name):
            setattr(args, name, 64)
    assert args.consumed_train_samples == 0
    args.follow(Progress(iteration=3, consumed_train_samples=24))
    for same in (args, pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
        assert (same.iteration, same.consumed_train_samples) == (3, 24)
        assert vars(same) == {"iteration": 3, "hidden_size": 32, "loss_factor": 2.0, "other": 2.0}
    with pytest.raises(AttributeError, match="sft_rate"):
        _ = args.sft_rate
