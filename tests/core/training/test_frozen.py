"""--train-only: frozen parameters keep their bits and have no memory of gradients and optimizer; the
others are trained as if all were."""

import math

import pytest
import torch

from megatron.config.plan.plan import make_plan
from megatron.config.plan.state_bytes import bytes_per_rank
from megatron.parallel.context import ParallelContext
from megatron.timers import Timers
from megatron.training.batch import MicroBatch
from megatron.training.build import build_run, make_tokenizer
from megatron.training.checkpointing.save import own_tensors
from megatron.training.launch.initialize import Runtime
from megatron.training.step import train_step
from pretrain_gpt import forward_step
from tests.core.parity.layouts import (
    A2A,
    EP,
    GPT2,
    LLAMA,
    MLA,
    MOE,
    MUON,
    PP,
    SP,
    TIED_MTP,
    TP,
    ZERO2,
    ZERO3,
)
from tests.core.training.built_runs import built, config_of
from tests.forkrun import run_ranks
from tests.problems import raises
from tests.runs import NO_DROPOUT, SMALL, train

ONE_STEP = (*NO_DROPOUT, "--weight-decay", "0.1", "--clip-grad", "1e9", "--lr-warmup-iters", "0")
ZERO1 = ("--use-distributed-optimizer",)
ATTENTION = ("--train-only", "decoder.layers.*.self_attention.*")


def step_of_a_run(rank: int, world: int, flags: list[str]) -> dict:
    """A run's rank before and after its first step: its tensors by name, what it holds, the plan."""
    config = config_of(*ONE_STEP, *flags)
    tokenizer = make_tokenizer(config)
    plan = make_plan(config, world, tokenizer.vocab_size)
    ctx = ParallelContext(config.parallel, world, rank)
    run = build_run(
        config, plan, Runtime(torch.device("cpu"), ctx, world, rank), Timers(), tokenizer
    )
    run.scheduler.step(8)  # off the rate 0 of the start

    def tensors() -> list:
        return [
            (name, sharding.shape, box, part.detach().clone())
            for name, sharding, _, own in own_tensors(run)
            for box, part in own
        ]

    before = tensors()
    rows = torch.randint(0, 200, (8, 33), generator=torch.Generator().manual_seed(ctx.dp.rank))
    size = config.training.micro_batch_size
    samples = (MicroBatch(some) for some in rows[: 8 // ctx.dp.size].split(size))
    result = train_step(run, forward_step, samples, 1)
    state = run.optimizer.tensors()

    def nbytes(part: str) -> int:
        return sum(tensor.nbytes for name, tensor in state.items() if part in name)

    held = {
        "gradients": run.buffers.flat.untyped_storage().nbytes(),
        "main weights": nbytes("fp32_param"),
        "optimizer moments": nbytes("exp_avg") + nbytes("momentum_buffer"),
    }
    planned = bytes_per_rank(config, plan, ctx.pp.rank, ctx.shard.rank)
    return dict(
        before=before,
        after=tensors(),
        held=held,
        planned={kind: planned[kind] for kind in held},
        trained={spec.name for spec in plan.trained},
        norm=result.grad_norm,
        with_gradients=[
            p.sharding.name
            for p in run.model.parameters()
            if hasattr(p, "main_grad") or p.grad is not None
        ],
    )


def whole(parts: list[list]) -> dict[str, torch.Tensor]:
    """The tensors of a model of what each rank has of them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, box, part in (each for of_rank in parts for each in of_rank):
        tensor = tensors.setdefault(name, torch.full(shape, math.nan, dtype=part.dtype))
        tensor[tuple(slice(*span) for span in box)] = part
    return tensors


LAYOUTS = {
    "one rank": (1, GPT2, ATTENTION),
    "one rank, recomputed": (
        1,
        ("--recompute-granularity", "full", "--recompute-method", "uniform"),
        ("--train-only", "decoder.layers.1.mlp.*.bias"),
    ),
    "bf16": (1, (*LLAMA, "--bf16"), ATTENTION),
    "tied embedding": (1, GPT2, ("--train-only", "embedding.word*")),
    "frozen latents, made again": (
        1,
        (*MLA, "--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj"),
        ("--train-only", "*.linear_kv_up_proj.weight"),
    ),
    "tp2 sp": (2, (TP, "2", SP), ATTENTION),
    "pp2, nothing to train on stage 0": (2, (PP, "2"), ("--train-only", "decoder.layers.1.*")),
    "pp2, nothing to train on stage 1": (
        2,
        (*LLAMA, PP, "2"),
        ("--train-only", "decoder.layers.0.*"),
    ),
    "dp2, ZeRO-1, bf16": (2, (*ZERO1, "--bf16"), ATTENTION),
    "dp2, ZeRO-2": (2, (*LLAMA, *ZERO2), ATTENTION),
    "dp2, ZeRO-3": (2, (*LLAMA, *ZERO3), ("--train-only", "decoder.layers.1.*", "output_layer*")),
    "pp2 dp2, ZeRO-3": (4, (*LLAMA, PP, "2", *ZERO3), ("--train-only", "output_layer.weight")),
    "ep2 dp2": (2, (*MOE, EP, "2", *A2A), ("--train-only", "*router.weight", "*.linear_fc1.*")),
    "frozen experts": (1, MOE, ATTENTION),
    "dp2, ZeRO-1, Muon": (2, (*LLAMA, *ZERO1, *MUON), ATTENTION),
    "pp2, tied, multi-token prediction": (2, (*TIED_MTP, PP, "2"), ("--train-only", "mtp.*")),
}


QUICK = {
    "one rank",
    "pp2, nothing to train on stage 0",
    "dp2, ZeRO-3",
    "frozen latents, made again",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.campaign) for each in LAYOUTS],
)
def test_frozen_parts_keep_their_bits_and_others_learn_as_if_all_did(name):
    """Adam updates each weight by itself, so a step of some is that of all, to the bit."""
    world, layout, globs = LAYOUTS[name]
    full = run_ranks(world, step_of_a_run, list(layout))
    some = run_ranks(world, step_of_a_run, [*layout, *globs])
    before, after, as_one = (
        whole([rank[key] for rank in ranks])
        for ranks, key in ((some, "before"), (some, "after"), (full, "after"))
    )
    trained = some[0]["trained"]
    weights = {key for key in after if not key.startswith("optimizer.")}
    assert (
        trained < weights and {name.split(".", 2)[2] for name in after.keys() - weights} == trained
    )
    for name in weights:
        assert torch.equal(after[name], (as_one if name in trained else before)[name]), name
        assert name not in trained or not torch.equal(after[name], before[name])
    for with_all, rank in zip(full, some, strict=True):
        assert trained.issuperset(rank["with_gradients"])
        for kind, nbytes in rank["held"].items():
            assert nbytes == pytest.approx(rank["planned"][kind], abs=64 * 60), kind
        assert sum(rank["held"].values()) < sum(with_all["held"].values())


def test_the_gradient_norm_is_of_what_is_trained():
    [full] = run_ranks(1, step_of_a_run, [])
    [some] = run_ranks(1, step_of_a_run, [*ATTENTION])
    squares = sum(
        (moment.double() / 0.1).square().sum().item()  # 1 - beta1, after the first step
        for name, _, _, moment in full["after"]
        if name.startswith("optimizer.exp_avg.") and name.split(".", 2)[2] in some["trained"]
    )
    assert some["norm"] == pytest.approx(math.sqrt(squares), rel=1e-6)


@pytest.mark.campaign
def test_a_resume_may_train_more_or_less(tmp_path):
    """A parameter that was frozen begins with a state of zeros: after a step the square of its first
    moment is 0.1^2 g^2, its second moment 0.001 g^2."""
    flags = [
        *SMALL,
        *NO_DROPOUT,
        "--mock-data",
        "--save",
        str(tmp_path / "save"),
        "--eval-iters",
        "0",
    ]
    flags += ["--lr-decay-iters", "9", "--load", str(tmp_path / "save"), "--bf16"]
    start = {p.sharding.name: p.detach() for p in built("--bf16").model.parameters()}
    mlp = ("--train-only", "decoder.layers.*.mlp.*")
    first = train(tmp_path, [*flags, "--train-iters", "2", *mlp]).tensors()
    both = train(tmp_path, [*flags, "--train-iters", "3", *mlp, ATTENTION[1]]).tensors()
    last = train(tmp_path, [*flags, "--train-iters", "4", *ATTENTION]).tensors()
    weight = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert f"optimizer.exp_avg.{weight}" not in first and torch.equal(first[weight], start[weight])
    moment, square = (both[f"optimizer.{key}.{weight}"] for key in ("exp_avg", "exp_avg_sq"))
    some = square > 1e-20
    assert some.any() and torch.allclose(moment[some] ** 2 / square[some], torch.tensor(10.0))
    assert not torch.equal(both[weight], start[weight])
    mlp_weight = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(last[mlp_weight], both[mlp_weight])
    assert not any("optimizer" in name and ".mlp." in name for name in last)
    embedding = "embedding.word_embeddings.weight"
    assert torch.equal(last[embedding], start[embedding])


@pytest.mark.parametrize(
    ("globs", "code"),
    [(["decoder.layers.9.*"], "train-only-unmatched"), (["*.expert_bias"], "train-only-nothing")],
)
def test_globs_that_leave_nothing_to_train(globs, code):
    flags = (*MOE, "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid")
    config = config_of(*flags, "--train-only", *globs)
    with raises(ValueError, code, "--train-only", globs[0]):
        make_plan(config, 1, 211)
