"""--ema-decay: the average is that of its formula, of the main weights, in every layout; nothing else
changes it, and no resume or rollback loses it."""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.addons.averaging import average
from megatron.config.plan.saves import checkpoint_bytes
from megatron.config.plan.state_bytes import bytes_per_rank
from megatron.training.step import train_step
from tests.core.parity.differences import PADDED
from tests.core.parity.layouts import (
    A2A,
    DISTRIBUTED,
    EP,
    EP_MOE,
    GPT2,
    MUON,
    OVERLAP,
    PP,
    SP,
    TP,
    ZERO2,
    ZERO3,
    Case,
    argv,
)
from tests.core.training.tiny_run import make_run, micro_batches
from tests.features.spikes.injected import inject
from tests.load_tool import exit_code, load_tool
from tests.problems import assert_problem
from tests.runs import EXACT, Finished, plot, same_tensors, train, write_text

DECAY = 0.75
EMA = ("--ema-decay", str(DECAY))
PREFIX = "optimizer.ema."
FIRST, LAST = 2, 4  # a resume in another layout begins behind FIRST

# on ranks that share the average, on several stages with a tied embedding, of experts
LAYOUTS = {
    "one process": Case(GPT2, 1, ()),
    "dp2, ZeRO-3": Case(GPT2, 2, ZERO3),
    "dp2, ZeRO-2": Case(GPT2, 2, ZERO2),
    "dp2, distributed optimizer, overlap": Case(GPT2, 2, OVERLAP),
    "dp2, whole parameters, Muon": Case((*GPT2, *MUON), 2, DISTRIBUTED),
    "tp2 sp": Case(GPT2, 2, (TP, "2", SP)),
    "tp2 pp2, tied": Case(GPT2, 4, (TP, "2", PP, "2")),
    "ep2, experts with a bias": Case(EP_MOE, 2, (EP, "2", *A2A)),
}
QUICK = ("one process", "dp2, ZeRO-3")
CAMPAIGN = ("tp2 pp2, tied", "ep2, experts with a bias")


def marks(layout: str) -> list[pytest.MarkDecorator]:
    if layout in QUICK:
        return []
    return [pytest.mark.campaign if layout in CAMPAIGN else pytest.mark.sweep]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


def run(
    folder: Path, data: str, case: Case, steps: int, *more: str, load: Path | None = None, **how
) -> Finished:
    """A run that saves each iteration, and goes on from the newest in `load`."""
    words = argv(data, case.model, steps, *case.precision.split(), *case.layout, *more)
    words += ["--save", str(folder / "save"), "--save-interval", "1"]
    words += ["--load", str(load)] if load else []
    return train(folder, words, case.world, **how)


@pytest.fixture(scope="module")
def begun(data, tmp_path_factory):
    """By model, the checkpoint of iteration FIRST of one process. Iteration 1 is skipped, so its
    checkpoint has the initial weights."""
    done: dict[tuple[str, ...], Finished] = {}

    def of(model: tuple[str, ...]) -> Finished:
        if model not in done:
            folder = tmp_path_factory.mktemp("begun")
            more = (*EMA, "--train-range-to-skip", "1", "1")
            # as long as the runs that go on, whose schedule is the same
            more += ("--exit-interval", str(FIRST))
            done[model] = run(folder, data, Case(model, 1, ()), LAST, *more)
        return done[model]

    return of


def main_weights(done: Finished, iteration: int) -> dict[str, torch.Tensor]:
    """What is averaged: the main weights of all trained parameters."""
    tensors = done.tensors(iteration)
    names = [name.removeprefix(PREFIX) for name in tensors if name.startswith(PREFIX)]
    return {name: tensors.get(f"optimizer.fp32_param.{name}", tensors[name]) for name in names}


def averages(done: Finished, iteration: int) -> dict[str, torch.Tensor]:
    tensors = done.tensors(iteration)
    return {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}


def follows(
    before: dict[str, torch.Tensor], done: Finished, first: int, last: int, rounding: float = 1e-13
) -> None:
    """The averages of each checkpoint from `first` to `last` follow from those `before` by the
    formula, in float64."""
    assert before, "no averages"
    for iteration in range(first, last + 1):
        weights, found = main_weights(done, iteration), averages(done, iteration)
        assert found.keys() == before.keys() == weights.keys()
        for name, average_of in found.items():
            rows = 211 if name.endswith(PADDED) else len(average_of)
            expected = DECAY * before[name][:rows].double()
            expected += (1 - DECAY) * weights[name][:rows].double()
            difference = (average_of[:rows].double() - expected).abs().max()
            assert difference <= rounding * expected.abs().max(), (iteration, name)
        before = found


@pytest.mark.parametrize("layout", [pytest.param(name, marks=marks(name)) for name in LAYOUTS])
def test_it_is_that_of_the_formula_in_each_layout(layout, data, begun, tmp_path):
    """After a resume from one process's checkpoint, whose first average is the initial weights."""
    case = LAYOUTS[layout]
    start = begun(case.model)
    initial = averages(start, 1)
    same_tensors(initial, main_weights(start, 1))
    trained = {name for name in start.tensors(1) if not name.startswith("optimizer.")}
    assert {name for name in trained if "expert_bias" not in name} == initial.keys()
    follows(initial, start, FIRST, FIRST)
    done = run(tmp_path, data, case, LAST, *EMA, load=start.save)
    assert done.resumes == [FIRST]
    follows(averages(start, FIRST), done, FIRST + 1, LAST)
    assert {split for split, *_ in done.evaluations} == {"validation", "validation-ema"}


@pytest.mark.campaign
def test_of_bf16_it_averages_the_fp32_main_weights(data, tmp_path):
    """Not their bf16 copies, from which these are apart by more than fp32 rounds."""
    case = Case(GPT2, 2, DISTRIBUTED, precision="--bf16")
    done = run(tmp_path, data, case, LAST, *EMA)
    assert {tensor.dtype for tensor in averages(done, LAST).values()} == {torch.float32}
    follows(averages(done, 1), done, 2, LAST, rounding=2e-7)
    copies = {name: done.tensors(LAST)[name] for name in averages(done, LAST)}
    assert {tensor.dtype for tensor in copies.values()} == {torch.bfloat16}


def test_nothing_else_changes(data, tmp_path):
    """Losses, norms and weights with and without it; and a checkpoint without it goes on with it
    from its weights, which is said."""
    case = Case(GPT2, 1, ())
    plain = run(tmp_path / "plain", data, case, LAST, "--eval-interval", "2")
    done = run(tmp_path / "ema", data, case, LAST, "--eval-interval", "2", *EMA)
    assert plain.series(*EXACT) == done.series(*EXACT)
    evaluations = [each for each in done.evaluations if each[0] != "validation-ema"]
    assert evaluations == plain.evaluations and len(done.evaluations) == len(evaluations) + 2
    own = {n: t for n, t in done.tensors().items() if not n.startswith(PREFIX)}
    same_tensors(own, plain.tensors())
    later = run(tmp_path / "later", data, case, LAST, *EMA, "--ckpt-step", "3", load=plain.save)
    assert "the checkpoint has no ema of its weights" in later.first_rank_log
    weights = {name: plain.tensors(3)[name] for name in averages(later, LAST)}
    follows(weights, later, LAST, LAST)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), id="one", marks=pytest.mark.sweep),
        pytest.param((*OVERLAP, "--async-save"), id="dp2", marks=pytest.mark.campaign),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(layout, data, tmp_path):
    case = Case(GPT2, 1 + bool(layout), layout, precision="--bf16")
    whole = run(tmp_path / "whole", data, case, 5, *EMA)
    folder = tmp_path / "killed"
    run(folder, data, case, 5, *EMA, kill_at=4)
    done = run(folder, data, case, 5, *EMA, load=folder / "save")
    assert done.resumes[0] in (2, 3)
    same_tensors(done.tensors(5), whole.tensors(5))
    assert averages(whole, 5)


@pytest.mark.campaign
def test_a_skipped_update_leaves_it(data, tmp_path):
    """Of a spike, bit for bit; the next one counts."""
    words = ("--spike-action", "skip-update", *EMA)
    done = run(
        tmp_path, data, Case(GPT2, 1, ()), 33, *words, hook=functools.partial(inject, {31: 3.0})
    )
    assert [row["iteration"] for row in done.rows if row["skipped"]] == [31]
    same_tensors(averages(done, 31), averages(done, 30))
    follows(averages(done, 31), done, 32, 33)


@pytest.mark.sweep
def test_an_overflow_leaves_it(data, tmp_path):
    """fp16, whose scale grows until the gradients overflow."""
    case = Case(GPT2, 1, (), precision="--fp16")
    words = ("--initial-loss-scale", str(2**22), "--loss-scale-window", "1", "--hysteresis", "1")
    done = run(tmp_path, data, case, 8, *words, *EMA)
    skipped = [row["iteration"] for row in done.rows if row["skipped"]]
    updated = [row["iteration"] for row in done.rows if not row["skipped"]]
    later = [iteration for iteration in skipped if iteration > min(updated)]
    assert later, "no overflow behind an update"
    for iteration in later:
        same_tensors(averages(done, iteration), averages(done, iteration - 1))


@pytest.mark.parametrize(
    "interval",
    [
        pytest.param("10", id="memory", marks=pytest.mark.campaign),
        pytest.param("0", id="a checkpoint", marks=pytest.mark.sweep),
    ],
)
def test_a_rollback_restores_it(interval, data, tmp_path):
    """As in a run that is started again from the checkpoint behind iteration 20."""
    case = Case(GPT2, 1, ())
    hook = functools.partial(inject, {31: 2.0, 32: 1.7})
    words = ("--spike-snapshot-interval", interval, *EMA, "--save-interval", "20")
    rewind = ("--spike-action", "rewind")
    mine = run(tmp_path / "mine", data, case, 36, *words, *rewind, hook=hook)
    assert [row["iteration"] for row in mine.rows if row["skipped"]] == [30, 31, 32, 33]
    its = tmp_path / "its"
    log = ("--spike-action", "log", *words[2:])
    run(its, data, case, 36, *log, "--exit-interval", "20")
    skip = ("--train-range-to-skip", "30", "33")
    other = run(its, data, case, 36, *log, *skip, load=its / "save", hook=hook)
    same_tensors(mine.tensors(36), other.tensors(36))
    assert averages(mine, 36)


def test_the_validation_is_that_of_the_exported_averages(data, tmp_path):
    """tools/merge_checkpoints.py --ema writes them for every tool; here the run itself."""
    case = Case(GPT2, 1, ())
    done = run(tmp_path / "run", data, case, LAST, *EMA, "--full-validation")
    [(_, _, loss)] = [each for each in done.evaluations if each[0] == "validation-ema"]
    merge = load_tool("merge_checkpoints").main
    exported = tmp_path / "exported"
    assert exit_code(merge, done.save, "--ema", "--save", exported) == 0
    words = ("--skip-train", "--full-validation")
    again = run(tmp_path / "again", data, case, LAST, *words, load=exported)
    [found] = [loss for split, _, loss in again.evaluations if split == "validation"]
    assert found == pytest.approx(loss, rel=1e-12)
    [plain] = [loss for split, _, loss in done.evaluations if split == "validation"]
    assert abs(plain - loss) > 1e-6


def test_checkpoints_without_averages_are_refused(data, tmp_path, capfd):
    done = run(tmp_path, data, Case(GPT2, 1, ()), LAST, "--exit-interval", "1")
    merge = load_tool("merge_checkpoints").main
    assert exit_code(merge, done.save, "--ema", "--save", tmp_path / "out") == 1
    assert_problem(capfd.readouterr().err.splitlines()[-1], "checkpoint-without-averages", "--ema")


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999])
def test_in_host_memory_it_has_the_same_bits(decay, monkeypatch):
    """A part at a time, computed by the weights' device."""
    random = torch.Generator().manual_seed(0)
    sizes = ((7,), (5, 11), (100, 3))
    weights, held = ([torch.randn(size, generator=random) for size in sizes] for _ in range(2))
    there = [tensor.clone() for tensor in held]
    average.move_towards(there, weights, 1 - decay)
    monkeypatch.setattr(average, "CHUNK", 16)
    average.move_on_device(held, weights, 1 - decay)
    for one, other in zip(held, there, strict=True):
        assert torch.equal(one, other)


@pytest.mark.alone
@pytest.mark.sweep
def test_an_update_costs_at_most_three_percent_of_a_step():
    """7 million parameters, 2,048 tokens a step, in turn in one process: medians."""
    sizes = dict(num_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=2048)
    sizes |= dict(seq_length=128, max_position_embeddings=128, lr=1e-4, fp64=False)
    made = make_run(ema_decay=0.999, micro_batch_size=16, global_batch_size=16, **sizes)
    rows = torch.randint(0, 2000, (16, 129), generator=torch.Generator().manual_seed(0))
    steps, updates = [], []
    for iteration in range(1, 12):
        began = time.perf_counter()
        train_step(made, plot().forward_step, micro_batches(rows, 16), iteration)
        stepped = time.perf_counter()
        average.update(made, 0.999)
        steps.append(stepped - began)
        updates.append(time.perf_counter() - stepped)
    share = statistics.median(updates[1:]) / statistics.median(steps[1:])
    print(f"{1000 * statistics.median(steps):.1f} ms a step, the average {100 * share:.2f} % of it")
    assert share <= 0.03


@pytest.mark.parametrize("precision", [{}, {"bf16": True, "fp64": False}], ids=["fp64", "bf16"])
def test_the_plan_has_its_memory(precision):
    """On the device or in host memory, and on the disk."""
    made, without = (make_run(ema_decay=decay, **precision) for decay in (0.9, None))
    size = sum(tensor.nbytes for tensor in made.optimizer.kept["ema"])
    was = bytes_per_rank(without.config, made.plan)
    now = bytes_per_rank(made.config, made.plan)
    added = {kind: now[kind] - was[kind] for kind in now if now[kind] != was[kind]}
    assert added == {"main weights": size}
    saved = [checkpoint_bytes(each.config, made.plan) for each in (made, without)]
    assert saved[0] - saved[1] == size
    told = made.config.AveragingConfig.dry_run(SimpleNamespace(config=made.config), made.plan, None)
    assert f" {size:,} bytes " in "".join(told)
    on_gpu = replace(made.config.training, device="cuda")
    held = replace(made.config.AveragingConfig, ema_device="cpu")
    there = bytes_per_rank(replace(made.config, training=on_gpu, AveragingConfig=held), made.plan)
    assert there["averages on the host"] == size and there["main weights"] == was["main weights"]
