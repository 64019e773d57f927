"""From typed flags to the things that train: what each flag changes in them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.config.plan.plan import make_plan
from megatron.config.plan.state_bytes import bytes_per_rank
from megatron.parallel.context import ParallelContext
from megatron.parallel.sharding import local_box
from megatron.timers import Timers
from megatron.training.build import (
    build_model,
    build_run,
    make_tokenizer,
    plan_run,
)
from megatron.training.launch.initialize import Runtime
from megatron.training.run import Run
from tests.core.data.vocabularies import write_sentencepiece
from tests.core.training.built_runs import RUNTIME, built, config_of
from tests.forkrun import run_ranks

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


MUON = ["--optimizer", "muon", "--muon-momentum", "0.95"]


def rank_of_a_run(rank: int, world: int, flags: list[str]) -> tuple[dict, dict, dict, int]:
    """(bytes really held by kind, the plan's, {name: (place in the whole, values)}, number of
    buckets) of a run's rank."""
    config = config_of(*flags)
    tokenizer = make_tokenizer(config)
    plan = make_plan(config, world, tokenizer.vocab_size)
    runtime = Runtime(
        torch.device("cpu"), ParallelContext(config.parallel, world, rank), world, rank
    )
    run = build_run(config, plan, runtime, Timers(), tokenizer)
    params = list(run.model.parameters())
    state = run.optimizer.tensors()

    def size(part: str) -> int:
        return sum(tensor.nbytes for name, tensor in state.items() if part in name)

    held = {
        "weights": sum(p.nbytes for p in params),
        "gradients": sum(p.main_grad.nbytes for p in params),
        "main weights": size("fp32_param"),
        "optimizer moments": size("exp_avg") + size("momentum_buffer"),
        "FP8 scales": 0 if run.fp8 is None else run.fp8.state.nbytes + run.fp8.step_amax.nbytes,
    }
    shards = {
        p.sharding.name: (local_box(p.sharding, runtime.ctx), p.detach().clone()) for p in params
    }
    planned = bytes_per_rank(config, plan, runtime.ctx.pp.rank, runtime.ctx.shard.rank)
    return held, planned, shards, len(run.buffers.buckets)


@pytest.mark.parametrize(
    "more",
    [
        ["--bf16"],
        ["--bf16", "--fp8-format", "hybrid", "--fp8-amax-history-len", "100"],
        [
            "--untie-embeddings-and-output-weights",
            "--swiglu",
            "--qk-layernorm",
            "--group-query-attention",
            "--num-query-groups",
            "2",
        ],
        ["--bf16", "--grad-reduce-in-bf16"],
        ["--fp16", "--use-precision-aware-optimizer", "--exp-avg-sq-dtype", "fp16"],
        ["--use-precision-aware-optimizer", "--exp-avg-dtype", "fp8"],
        ["--bf16", *MUON],
        ["--bf16", *MUON, "--muon-neuron-beta2", "0.95"],
    ],
    ids=" ".join,
)
def test_ranks_hold_what_the_plan_says_and_slices_of_the_same_weights(more):
    _, _, whole, _ = rank_of_a_run(0, 1, more)
    for held, planned, shards, _ in run_ranks(
        2, rank_of_a_run, [*more, "--tensor-model-parallel-size", "2"]
    ):
        assert held == planned
        assert shards.keys() == whole.keys()
        cut = 0
        for name, (box, values) in shards.items():
            full = whole[name][1]
            # of a vocabulary: what one rank has of it
            expected = full[tuple(slice(*span) for span in box)]
            assert (
                torch.equal(values[: len(expected)], expected) and not values[len(expected) :].any()
            ), name
            cut += values.numel() < full.numel()
        assert cut >= 1 + 2 * 6, "the embedding and six tensors of each layer are split"


SHARDS = ["--use-distributed-optimizer"]
PRECISION_AWARE = (
    "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16"
).split()
SPLIT = ["--tensor-model-parallel-size", "2", "--sequence-parallel", *SHARDS]
INSTANCES = [*SHARDS, "--num-distributed-optimizer-instances", "2"]


@pytest.mark.parametrize("more", [[*SHARDS, "--bf16"], SPLIT], ids=" ".join)
def test_ranks_that_own_matrices_hold_what_the_plan_says(more):
    """A matrix has one rank and one tensor of state; together the ranks of a tensor-parallel rank
    have the state once."""
    config = config_of(*more, *MUON)
    found = [
        held for held, planned, *_ in run_ranks(4, rank_of_a_run, [*more, *MUON]) if held == planned
    ]
    assert len(found) == 4
    whole = replace(config, parallel=replace(config.parallel, use_distributed_optimizer=False))
    plan = make_plan(config, 4, 211)
    expected = bytes_per_rank(whole, plan)["optimizer moments"] * (2 if more == SPLIT else 1)
    assert sum(held["optimizer moments"] for held in found) == expected
    assert (
        max(held["optimizer moments"] for held in found)
        == bytes_per_rank(config, plan)["optimizer moments"]
    )


@pytest.mark.parametrize(
    "world, more",
    [
        (2, [*SHARDS, "--bf16"]),
        (4, SHARDS),
        (4, INSTANCES),
        (4, [*SPLIT, "--bf16", "--ddp-num-buckets", "3"]),
        (4, [*SPLIT, "--ddp-bucket-size", "2000"]),
        (2, [*SHARDS, "--fp16", "--optimizer", "sgd"]),
        (4, [*INSTANCES, *PRECISION_AWARE]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_shards_of_the_optimizer_are_the_plans_to_the_byte(world, more):
    """Every rank's own figures; together the ranks of one instance hold the state once."""
    config = config_of(*more)
    found = run_ranks(world, rank_of_a_run, more)
    for held, planned, _, _ in found:
        assert held == planned
    share = [held["optimizer moments"] for held, *_ in found]
    whole = bytes_per_rank(
        replace(config, parallel=replace(config.parallel, use_distributed_optimizer=False)),
        make_plan(config, world, 211),
    )["optimizer moments"]
    copies = (
        2 if "--num-distributed-optimizer-instances" in more or "--sequence-parallel" in more else 1
    )
    assert sum(share) == copies * whole and max(share) < 1.1 * whole * copies / world


@pytest.mark.parametrize(
    "world, more",
    [
        (4, ["--pipeline-model-parallel-size", "2"]),
        (
            4,
            [
                "--pipeline-model-parallel-size",
                "2",
                "--num-layers",
                "4",
                "--num-virtual-stages-per-pipeline-rank",
                "2",
            ],
        ),
        (4, ["--context-parallel-size", "2"]),
        pytest.param(
            8,
            [
                "--pipeline-model-parallel-size",
                "2",
                "--tensor-model-parallel-size",
                "2",
                "--sequence-parallel",
            ],
            marks=pytest.mark.campaign,
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_shards_of_every_stage_are_the_plans_to_the_byte(world, more):
    """Tied embeddings and norms of sequence shards, which have buckets of their own, and chunks of
    layers."""
    for held, planned, _, _ in run_ranks(
        world, rank_of_a_run, [*more, *SHARDS, "--bf16", "--ddp-bucket-size", "3000"]
    ):
        assert held == planned


def buckets(world: int, *more: str) -> list[int]:
    """How many gradient buckets ranks have with these flags."""
    return sorted({count for *_, count in run_ranks(world, rank_of_a_run, list(more))})


def test_bucket_flags():
    """28,000 parameters: their number or their size, neither of which goes without the other."""
    assert buckets(2) == [1] and buckets(2, "--overlap-grad-reduce") == [1]
    assert buckets(2, "--ddp-num-buckets", "3") == [3]
    assert (
        buckets(2, *SHARDS, "--ddp-bucket-size", "10000")
        == [3]
        != buckets(2, *SHARDS, "--ddp-bucket-size", "5000")
    )


def test_stages_hold_what_the_plan_says():
    """Two virtual stages on each of two ranks: every parameter once, but the word embedding on both
    ends."""
    flags = ["--num-layers", "5", "--bf16"]
    _, _, whole, _ = rank_of_a_run(0, 1, flags)
    ranks = run_ranks(
        2,
        rank_of_a_run,
        [
            *flags,
            "--pipeline-model-parallel-size",
            "2",
            "--num-virtual-stages-per-pipeline-rank",
            "2",
        ],
    )
    assert all(held == planned for held, planned, _, _ in ranks)
    first, last = (shards for _, _, shards, _ in ranks)
    assert first.keys() & last.keys() == {EMBEDDING} and first.keys() | last.keys() == whole.keys()
    assert all(
        torch.equal(values, whole[name][1])
        for shards in (first, last)
        for name, (_, values) in shards.items()
    )
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "2"}


def test_a_model_with_fewer_layers_than_asked_for_is_noticed():
    config = config_of()
    plan = make_plan(config, 1, 211)
    with pytest.raises(AssertionError, match=r"layers \[0\]"):
        build_model(config, replace(plan, layers_per_stage=((range(0, 1),),)), RUNTIME)
    with pytest.raises(KeyError, match=plan.parameters[0].name):
        build_model(config, replace(plan, parameters=plan.parameters[1:]), RUNTIME)
    norm = replace(plan.parameters[-1], name="decoder.layers.0.unbuilt.weight")
    with pytest.raises(AssertionError, match=norm.name):
        build_model(config, replace(plan, parameters=(*plan.parameters, norm)), RUNTIME)


def by_name(run: Run, key: str) -> dict[str, float]:
    """A value of the parameter groups by the name of each parameter."""
    return {name: group[key] for group in run.optimizer.param_groups for name in group["names"]}


def test_decoupled_learning_rate():
    """Embedding and output layer rise to --decoupled-lr and fall to its floor, all others to --lr
    and --min-lr."""
    plain = ["--lr", "0.01", "--min-lr", "0.001", "--untie-embeddings-and-output-weights"]
    for flags, peak, floor in (
        ([], 0.01, 0.001),
        (["--decoupled-lr", "0.5"], 0.5, 0.001),
        (["--decoupled-lr", "0.5", "--decoupled-min-lr", "0.25"], 0.5, 0.25),
    ):
        run = built(*plain, *flags)
        for samples, own, others in ((24, peak, 0.01), (100, floor, 0.001)):
            run.scheduler.step(samples)
            rates = by_name(run, "lr")
            assert [rates.pop(EMBEDDING), rates.pop(OUTPUT)] == pytest.approx([own, own])
            assert list(rates.values()) == pytest.approx([others] * len(rates)) and len(rates) > 10


def test_weight_decay_of_query_and_key_norms():
    flags = ["--qk-layernorm", "--weight-decay", "0.125"]
    without, decays = (
        by_name(built(*flags, *more), "weight_decay")
        for more in ([], ["--apply-wd-to-qk-layernorm"])
    )
    changed = {name for name in decays if decays[name] != without[name]}
    assert changed == {
        f"decoder.layers.{i}.self_attention.{qk}_layernorm.{kind}"
        for i in range(2)
        for qk in "qk"
        for kind in ("weight", "bias")
    }
    assert {decays[name] for name in changed} == {0.125} and {
        without[name] for name in changed
    } == {0.0}


def vocabulary(*flags: str) -> tuple[int, int]:
    """(ids, padded)"""
    config = config_of(*flags)
    size = make_tokenizer(config).vocab_size
    return size, plan_run(config, 1, size).padded_vocab_size


def test_extra_ids_make_a_larger_vocabulary(tmp_path: Path):
    flags = [
        "--tokenizer-type",
        "SentencePieceTokenizer",
        "--tokenizer-model",
        write_sentencepiece(tmp_path),
    ]
    plain = vocabulary(*flags)
    more = vocabulary(*flags, "--vocab-extra-ids", "20")
    assert more[0] - plain[0] == 20 and more[1] - plain[1] in (16, 24)
