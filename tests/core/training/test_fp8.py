"""Whole runs with --fp8-format: resumed bit for bit, recomputed bit for bit, the same in every
layout, each flag seen."""

from contextlib import nullcontext

import pytest
import torch

from megatron.kernels import fp8 as kernels
from megatron.parallel import fp8
from megatron.parallel.fp8 import PREFIX
from megatron.training.batch import MicroBatch
from megatron.training.step import forward_backward
from megatron.training.step_sums import StepSums
from tests.core.training.built_runs import built
from tests.runs import NO_DROPOUT, SMALL, plot, same_tensors, train, with_flags

HISTORY = "--fp8-amax-history-len:"  # of the line about scales that are not there
EXACT = ("iteration", "lm_loss", "grad_norm")
RUN = [*with_flags(SMALL, *NO_DROPOUT), "--mock-data", "--train-iters", "8", "--eval-iters", "0"]
DELAYED = [
    "--fp8-format",
    "hybrid",
    "--fp8-amax-history-len",
    "3",
    "--fp8-amax-compute-algo",
    "max",
]
TENSORWISE = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
RECIPES = [
    pytest.param(DELAYED, id="delayed", marks=pytest.mark.campaign),
    pytest.param(TENSORWISE, id="tensorwise", marks=pytest.mark.sweep),
]


def saving(folder, *flags):
    return [
        *RUN,
        *flags,
        "--save",
        str(folder / "save"),
        "--load",
        str(folder / "save"),
        "--save-interval",
        "4",
    ]


@pytest.mark.campaign
@pytest.mark.parametrize(
    "world, more",
    [(1, ["--bf16"]), (2, ["--tensor-model-parallel-size", "2"])],
    ids=["bf16", "tp2"],
)
def test_a_killed_run_goes_on_with_its_scales(tmp_path, world, more):
    straight = train(tmp_path / "straight", saving(tmp_path / "straight", *DELAYED, *more), world)
    scales = {name: x for name, x in straight.tensors().items() if name.startswith(PREFIX)}
    assert len(scales) == 8 and all(x.shape == (3, 4) and x.all() for x in scales.values())
    argv = saving(tmp_path / "killed", *DELAYED, *more)
    train(tmp_path / "killed", argv, world, kill_at=6)
    resumed = train(tmp_path / "killed", argv, world)
    assert resumed.resumes[-1] == 4 and HISTORY not in resumed.log
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())


@pytest.mark.campaign
def test_scales_begin_anew_where_a_checkpoint_has_none(tmp_path):
    argv = [*with_flags(saving(tmp_path / "run"), "--train-iters", "16"), "--exit-interval", "4"]
    train(tmp_path / "run", argv)
    first = train(tmp_path / "run", [*argv, *DELAYED])
    assert HISTORY in first.first_rank_log + first.log
    again = train(tmp_path / "again", [*argv, *DELAYED])  # now there are
    assert HISTORY not in again.log + again.first_rank_log
    assert train(tmp_path / "without", argv).rows[-1]["iteration"] == 16  # and without fp8 again


@pytest.mark.parametrize("recipe", RECIPES)
def test_layouts_and_recompute_give_the_same(tmp_path, recipe):
    """Equal scales leave only the order of fp32 sums, and the casts that it tips over; recompute
    repeats every bit."""
    argv = [*with_flags(RUN, "--train-iters", "4"), *recipe, "--save-interval", "4"]
    one = train(tmp_path / "one", [*argv, "--save", str(tmp_path / "one/save")])
    again = train(tmp_path / "again", [*argv, *FULL, "--save", str(tmp_path / "again/save")])
    assert again.series(*EXACT) == one.series(*EXACT)
    same_tensors(again.tensors(), one.tensors())
    tp = ["--tensor-model-parallel-size", "2"]
    layouts = {
        "sp": [*tp, "--sequence-parallel"],
        "cp": ["--context-parallel-size", "2"],
        "pp": ["--pipeline-model-parallel-size", "2"],
        "dp": ["--use-distributed-optimizer"],
    }
    for name, flags in layouts.items():
        other = train(tmp_path / name, [*argv, *flags, "--save", str(tmp_path / name / "save")], 2)
        for key, near in (("lm_loss", 3e-4), ("grad_norm", 1e-2)):
            expected = [value for (value,) in one.series(key)]
            assert [value for (value,) in other.series(key)] == pytest.approx(expected, rel=near), (
                name,
                key,
            )
        mine = other.tensors()
        theirs = one.tensors()
        assert mine.keys() == theirs.keys()
        for scale in (key for key in theirs if key.startswith(PREFIX)):
            torch.testing.assert_close(
                mine[scale], theirs[scale], rtol=0.05, atol=0.0, msg=f"{name}: {scale}"
            )


@pytest.mark.parametrize("recipe", RECIPES)
def test_sinks_and_windows_beside_casts(tmp_path, recipe):
    """Attention takes what the cast layers give: sinks train, alike in each layout."""
    options = "--softmax-type learnable --window-size 8 0 --window-attn-skip-freq 2".split()
    argv = [*with_flags(RUN, "--train-iters", "4"), *options, "--save-interval", "4"]
    runs = {
        "plain": ([], 1),
        "one": (recipe, 1),
        "sp": ([*recipe, "--tensor-model-parallel-size", "2", "--sequence-parallel"], 2),
        "cp": ([*recipe, "--context-parallel-size", "2"], 2),
    }
    found = {}
    for name, (flags, world) in runs.items():
        folder = tmp_path / name
        found[name] = train(folder, [*argv, *flags, "--save", str(folder / "save")], world)
    for name, near in (("plain", 1e-2), ("sp", 3e-4), ("cp", 3e-4)):
        expected = [value for (value,) in found[name].series("lm_loss")]
        assert [value for (value,) in found["one"].series("lm_loss")] == pytest.approx(
            expected, rel=near
        )
    tensors = {name: run.tensors() for name, run in found.items()}
    sinks = [name for name in tensors["one"] if name.endswith("softmax_offset")]
    assert sinks
    for name in sinks:
        assert not torch.equal(tensors["one"][name], tensors["plain"][name])
        for layout in ("sp", "cp"):
            torch.testing.assert_close(
                tensors[layout][name], tensors["one"][name], rtol=1e-2, atol=1e-4
            )


EXPERTS = (
    "--disable-bias-linear --swiglu --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--moe-shared-expert-intermediate-size 32 --moe-aux-loss-coeff 0.01 --train-iters 4 "
    "--save-interval 4"
).split()


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_in_every_layout_and_with_recompute(tmp_path, recipe):
    """As dense layers: scales of all experts of a layer, equal on all ranks."""
    argv = [*with_flags(RUN, *EXPERTS), *recipe]

    def run(name, flags=(), world=1):
        return train(
            tmp_path / name, [*argv, *flags, "--save", str(tmp_path / name / "save")], world
        )

    one = run("one")
    plain = train(tmp_path / "plain", with_flags(RUN, *EXPERTS))
    assert one.series("lm_loss") != plain.series("lm_loss")
    again = run("again", "--recompute-granularity selective --recompute-modules moe".split())
    assert again.series(*EXACT) == one.series(*EXACT)
    same_tensors(again.tensors(), one.tensors())
    ep = ["--expert-model-parallel-size", "2"]
    layouts = {
        "ep": [*ep, "--use-distributed-optimizer"],
        "ep, all-to-all": [*ep, "--moe-token-dispatcher-type", "alltoall"],
        "tp": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        "ep, tp": [
            *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
            *(*ep, "--expert-tensor-parallel-size", "1"),
        ],
    }
    theirs = one.tensors()
    scales = {key for key in theirs if key.startswith(PREFIX)}
    assert len(scales) == (12 if recipe is DELAYED else 0)
    for name, flags in layouts.items():
        other = run(name, flags, 2)
        for key, near in (("lm_loss", 3e-4), ("grad_norm", 1e-2)):
            expected = [value for (value,) in one.series(key)]
            found = [value for (value,) in other.series(key)]
            assert found == pytest.approx(expected, rel=near), (name, key)
        mine = other.tensors()
        assert mine.keys() == theirs.keys()
        for scale in scales:
            torch.testing.assert_close(mine[scale], theirs[scale], rtol=0.05, atol=0.0)


def gradients(monkeypatch, keeps: bool, *flags: str) -> tuple[list[torch.Tensor], list[int]]:
    """Those of two steps of two micro-batches, with an update between them; how many weights each
    step cast."""
    casts = []
    cast = fp8.cast_weight
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "cast_weight", lambda *args: casts.append(1) or cast(*args))
        if not keeps:
            patch.setattr(fp8, "weights_cast_once", nullcontext)
        run = built(*NO_DROPOUT, "--global-batch-size", "4", *flags)
        random = torch.Generator().manual_seed(1)
        found, counts = [], []
        for iteration in (1, 2):
            rows = [torch.randint(0, 211, (2, 33), generator=random) for _ in range(2)]
            run.buffers.zero(2)
            casts.clear()
            sums = StepSums(run.runtime.device, routers=run.config.model.router_numbers)
            forward_backward(run, plot().forward_step, map(MicroBatch, rows), sums, iteration, 0)
            counts.append(len(casts))
            found.append(run.buffers.flat.clone())
            run.optimizer.step()
            if run.fp8:
                run.fp8.step(True)
    return found, counts


@pytest.mark.parametrize(
    "flags",
    [DELAYED, [*TENSORWISE, "--bf16"], [*DELAYED, *FULL], [*TENSORWISE, *EXPERTS[:-4]]],
    ids=["delayed", "bf16", "recompute", "experts"],
)
def test_a_step_casts_each_weight_once(monkeypatch, flags):
    once, counts = gradients(monkeypatch, True, *flags)
    always, many = gradients(monkeypatch, False, *flags)
    layers = 12 if "--num-experts" in flags else 8
    passes = 4 if flags[-len(FULL) :] == FULL else 2
    assert counts == [layers] * 2 and many == [passes * layers] * 2
    assert all(torch.equal(a, b) for a, b in zip(once, always, strict=True))
    assert not torch.equal(*once)


@pytest.mark.parametrize("recipe", [DELAYED, TENSORWISE], ids=["delayed", "tensorwise"])
@pytest.mark.parametrize("layers", [[], EXPERTS[:-4]], ids=["dense", "experts"])
def test_every_scale_of_a_gemm_starts_at_16_bytes(monkeypatch, recipe, layers):
    """cuBLAS refuses others. Of two steps, the second of which has a history."""
    found = []
    gemm = kernels.gemm

    def noted(a, b, *args, **options):
        found.extend(scale.data_ptr() % 16 for scale in args[:2])
        return gemm(a, b, *args, **options)

    monkeypatch.setattr(kernels, "gemm", noted)
    gradients(monkeypatch, True, *recipe, *layers)
    assert len(found) >= 2 * 2 * 2 * 3 * 8 and not any(found)


def cast_always() -> None:
    fp8.weights_cast_once = nullcontext


OVERLAP = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 3000 --bf16"
).split()


@pytest.mark.campaign
@pytest.mark.parametrize("flags", [OVERLAP], ids=["overlap"])
def test_kept_casts_are_those_of_the_weights(tmp_path, flags):
    """Over weights that other ranks update and a load writes, with evaluations between."""
    runs = []
    for name, hook in (("kept", None), ("always", cast_always)):
        argv = [*with_flags(saving(tmp_path / name, *DELAYED, *flags), "--eval-iters", "1")]
        argv += ["--eval-interval", "2"]
        train(tmp_path / name, [*argv, "--exit-interval", "4"], 2, hook=hook)
        runs.append(train(tmp_path / name, argv, 2, hook=hook))
    assert runs[0].series(*EXACT) == runs[1].series(*EXACT)
    same_tensors(runs[0].tensors(), runs[1].tensors())
