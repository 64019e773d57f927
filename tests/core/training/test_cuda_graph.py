"""--cuda-graph-impl local: micro-batches that graphs replay train as others do, bit by bit, and what
a graph cannot repeat is found. By stand-ins: recorded operations on a CPU, the meta device."""

import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from megatron import cuda
from megatron.kernels import dropout as dropout_rows
from megatron.kernels.cpu import bf16_attention, experts, fp32_attention, native
from megatron.model import embedding, layer
from megatron.model.blocks.moe import module as moe
from megatron.training.batch import MicroBatch
from megatron.training.cuda_graph import MicroBatchGraphs
from megatron.training.run import Run
from megatron.training.step import MicroBatches, train_step
from megatron.training.step_sums import StepSums
from tests.core.training.built_runs import built
from tests.graph_on_cpu import graphs  # noqa: F401  # a fixture
from tests.problems import raises
from tests.runs import plot

GPT = "--attention-dropout 0 --hidden-dropout 0.1"
LLAMA = (
    "--attention-dropout 0 --hidden-dropout 0 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 2"
)
EXPERTS = (
    f"{LLAMA} --bf16 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 1e-3 --moe-grouped-gemm"
)
SINKS = "--softmax-type learnable --window-size 8 0 --window-attn-skip-freq 2"
MODELS = {"gpt": f"{GPT} --bf16", "llama": f"{LLAMA} --bf16", "experts": EXPERTS}


@pytest.fixture
def operations(monkeypatch):
    """Two operations that only CUDA has, each with its seed or sizes in a tensor, on the CPU."""
    library = torch.library.Library("megatron", "IMPL")

    def drop(x, p, seed, residual=None):
        keep = torch.empty_like(x).bernoulli_(
            1 - p, generator=torch.Generator().manual_seed(int(seed))
        )
        dropped = x * keep / (1 - p)
        return dropped if residual is None else residual + dropped

    def add_grouped_product(total, rows_out, rows_in, ends, add):
        start = 0
        for matrix, end in zip(total, ends.tolist(), strict=True):
            product = rows_out[start:end].float().t() @ rows_in[start:end].float()
            matrix.copy_(matrix * add + product)
            start = end

    library.impl("drop", drop, "CPU")
    library.impl("add_grouped_product_", add_grouped_product, "CPU")
    rows = [row for row in dropout_rows.DROPOUT if row.name == "triton"]
    rows = [replace(row, unavailable=lambda spec: None) for row in rows]
    monkeypatch.setattr(layer, "DROPOUT", rows)
    monkeypatch.setattr(embedding, "DROPOUT", rows)
    monkeypatch.setattr(moe, "in_one_call", lambda weight: True)
    for cpp in (native, experts):  # it writes unseen
        monkeypatch.setattr(cpp, "runs", lambda x: False)
    for cpp in (bf16_attention, fp32_attention):
        monkeypatch.setattr(cpp, "unavailable_reason", lambda *_: "not here")
    yield
    library._destroy()


def samples(run: Run, count: int, seed: int = 1):
    """Micro-batches of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = run.config.training.micro_batch_size, run.config.model.seq_length + 1
    return iter(
        [MicroBatch(torch.randint(0, 200, shape, generator=generator)) for _ in range(count)]
    )


def trained(flags: str, iterations: int = 6) -> tuple[list, Run]:
    """(loss, gradient norm, rate and metrics of each iteration, the run)."""
    run = built(*flags.split())
    data = samples(run, 99)
    numbers = []
    for iteration in range(1, iterations + 1):
        result = run.advance(train_step(run, plot().forward_step, data, iteration))
        numbers.append((result.loss, result.grad_norm, result.learning_rate, result.metrics))
    return numbers, run


GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"
TRAINED = {
    "gpt": f"{GPT} --fp64",
    "llama": f"{LLAMA} --fp64",
    "experts": EXPERTS,
    "experts with a capacity": f"{EXPERTS} --moe-expert-capacity-factor 1.0",
    "loss scales that change": f"{GPT} --fp16 --initial-loss-scale 64 --loss-scale-window 2",
    "batch sizes that change": f"{GPT} --fp64 --rampup-batch-size 4 2 12",
    "recomputed layers": f"{GPT} --fp64 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "masks and metrics": f"{GPT} --fp64 --eod-mask-loss --reset-position-ids --z-loss-coeff 1e-4",
    "sinks and windows": f"{LLAMA} --fp64 {SINKS}",
}


QUICK = (
    "llama",
    "experts with a capacity",
    "loss scales that change",
    "batch sizes that change",
    "masks and metrics",
)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=name, marks=() if name in QUICK else pytest.mark.campaign)
        for name, flags in TRAINED.items()
    ],
)
def test_replayed_micro_batches_train_alike(flags, graphs, operations):  # noqa: F811
    """Losses, gradient norms and weights, over several steps of several micro-batches."""
    expected, eager = trained(flags)
    assert not graphs
    found, run = trained(f"{flags} {GRAPHS}")
    assert [graph.replays > 10 for graph in graphs] == [True]
    assert found == expected
    assert len({numbers[0] for numbers in found}) == len({numbers[2] for numbers in found}) == 6
    for one, other in zip(run.model.parameters(), eager.model.parameters(), strict=True):
        assert torch.equal(one, other)


# What a graph cannot repeat. Meta stands for CUDA.


def watched(flags: str, forward_step, *, count: int = 2) -> None:
    """So many micro-batches of a step."""
    run = built(*flags.split(), device="meta")
    run.graphs = MicroBatchGraphs(run.model[0], run.buffers, run.runtime.device, 0)
    sums = StepSums(run.runtime.device, [], run.config.model.router_numbers)
    micro_batches = MicroBatches(
        run, forward_step, samples(run, count), sums, iteration=1, backward_scale=1.0
    )
    for micro_batch in range(count):
        micro_batches.replayed(micro_batch, 0, None)


@pytest.fixture
def recorded(monkeypatch) -> list:
    """The regions that were recorded; on the meta device nothing is."""
    regions = []

    def record(region, *others):
        regions.append(region)
        return SimpleNamespace(replay=lambda: None), region()

    monkeypatch.setattr(cuda, "record", record)
    return regions


WATCHED = MODELS | {
    "fp16": f"{GPT} --fp16",
    "a capacity": f"{EXPERTS} --moe-expert-capacity-factor 1.0",
    "sigmoid router": f"{EXPERTS} --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
    "--moe-shared-expert-intermediate-size 64 --moe-per-layer-logging",
    "recomputed layers": f"{GPT} --bf16 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "recomputed modules": f"{GPT} --bf16 --recompute-granularity selective --recompute-modules "
    "core_attn mlp",
    "masks and metrics": f"{GPT} --bf16 --eod-mask-loss --reset-position-ids --z-loss-coeff 1e-4",
    "a window": f"{GPT} --bf16 --window-size 8 0",
    "sinks and windows": f"{LLAMA} --bf16 {SINKS}",
    "a score of 0": f"{LLAMA} --bf16 --softmax-type off-by-one",
    "capped scores": f"{LLAMA} --bf16 --attn-logit-softcapping 30",
}


@pytest.mark.parametrize("flags", WATCHED.values(), ids=WATCHED)
def test_our_models_can_be_repeated(flags, recorded):
    watched(flags, plot().forward_step, count=4)
    assert len(recorded) == 1


PLANTS = {
    "item": lambda x: x * x.float().sum().item(),
    "a seed of Python's": lambda x: x + random.getrandbits(30),
    "a fresh tensor": lambda x: x + torch.tensor(1.0),
    "a branch": lambda x: x if x.float().sum() > 0 else -x,
    "a mask": lambda x: x + x[x > 0].sum(),
}
PLACES = ("forward", "backward", "forward_step")
CASES = [(*case, place) for case in product(MODELS, list(PLANTS)[:3]) for place in PLACES]
CASES += [("gpt", "a branch", "forward"), ("gpt", "a mask", "backward")]


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_an_input_that_is_not_copied_to_its_place_is_found(flags, recorded):
    """A tensor that each micro-batch makes before its region; one that stays is none."""
    step = plot().forward_step
    stays = torch.ones((), device="meta")
    fresh = iter([torch.ones((), device="meta") for _ in range(2)])

    def scaled(by):
        def forward_step(batch, model):
            loss, tokens, metrics = step(batch, model)
            return loss * by(), tokens, metrics

        return forward_step

    watched(flags, scaled(lambda: stays))
    assert len(recorded) == 1
    with raises(ValueError, "cuda-graph-cannot-hold", "--cuda-graph-impl"):
        watched(flags, scaled(lambda: next(fresh)))


def test_a_seed_as_a_number_is_found(recorded):
    step = plot().forward_step

    def forward_step(batch, model):
        batch.dropout_seeds.seed(0, "mine")
        return step(batch, model)

    with raises(ValueError, "cuda-graph-cannot-hold", "--cuda-graph-impl"):
        watched(MODELS["gpt"], forward_step)


def test_graphs_need_a_device_that_has_them():
    with raises(ValueError, "cuda-device-needed", "--cuda-graph-impl"):
        built(*f"{MODELS['llama']} --cuda-graph-impl local".split())
    run = built(*f"{MODELS['llama']} --cuda-graph-impl local".split(), device="meta")
    assert run.graphs is None  # a trace
