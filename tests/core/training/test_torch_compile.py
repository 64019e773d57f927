"""--torch-compile: the graphs of each kind of layer, however many layers and steps there are, and
their numbers against those of eager layers."""

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.kernels import cu_seqlens, dropout, libraries
from megatron.kernels.cuda import torch_flash
from megatron.model import compile as model_compile
from megatron.training import batch, loop
from megatron.training.batch import MicroBatch
from megatron.training.step import forward_backward
from megatron.training.step_sums import StepSums
from tests.core.kernels.cuda.flash_on_cpu import on_cpu
from tests.core.parity.layouts import DELTA, GATED_DELTA, LAYOUTS, LLAMA, SINKS
from tests.core.training.built_runs import built
from tests.runs import NO_DROPOUT, SMALL, plot, train, with_flags

TEN_LAYERS = with_flags(SMALL, "--num-layers", "10", "--lr-warmup-iters", "1")
STEPS = ["--mock-data", "--train-iters", "3", "--eval-iters", "0", "--torch-compile"]
LAYERS = ("--num-layers", "6")  # a graph of each of them would show
GATED = ((*LLAMA, *LAYERS), ("--geglu", *LAYERS))  # the second with biases of gate and up
# Every kind of model of the parity table that can be compiled, with the name of its first case.
# How weights are updated is in no graph of a layer, so models with Muon are the same kinds again.
KINDS = {GATED[1]: "geglu with biases"}
SIX = {"[0,1]": "[0,1]*3", "[1,0,1]": "[1,0,1]*2"}  # patterns of layers
TWO = {"[0,1]*3": "[0,1]", "[1,0,1]*2": "[1,0]"}
for _name, _case in LAYOUTS.items():
    others = {"--num-experts", "muon", "gated_delta_net", "--hybrid-layer-pattern"}
    if others.isdisjoint(_case.model):
        _model = [SIX.get(word, word) for word in _case.model]
        KINDS.setdefault(tuple(with_flags(_model, *LAYERS)), _name)
KINDS[(*LLAMA, *LAYERS, *SINKS)] = "learnable sinks"
# Flags, and the rounding as a part of the norm of all gradients.
PRECISIONS = {
    "fp64": ("--fp64", 1e-12),
    "fp32": ("", 1e-5),
    "fp16": ("--fp16 --loss-scale 64", 1e-2),
    "bf16": ("--bf16", 5e-2),
}
EXPERTS = (
    *LLAMA,
    *"--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64".split(),
    *"--moe-shared-expert-intermediate-size 64 --moe-aux-loss-coeff 0.01".split(),
)


def backend_of(**records: Callable[[torch.fx.GraphModule], None]) -> Callable[..., Any]:
    """A backend of `aot_autograd` that shows each graph to these and runs it as it is. The packages that
    it takes need a second to load."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(record, graph, inputs):
        record(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(
        **{name: functools.partial(compiler, record) for name, record in records.items()}
    )


def gradients(*flags: str, device: str = "cpu", backend: str | None = None) -> torch.Tensor:
    """Those of an iteration of two micro-batches, flat."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    base = [*NO_DROPOUT, "--global-batch-size", "4", *["--torch-compile"] * bool(backend)]
    run = built(*with_flags(base, *flags), device=device)
    if backend:
        layers = run.model[0].decoder.layers.values()
        model_compile.compile_layers(layers, dynamic=False, backend=backend)
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 211, (2, 33), generator=random) for _ in range(2)]
    run.buffers.zero(2)
    sums = StepSums(run.runtime.device, routers=run.config.model.router_numbers)
    forward_backward(run, plot().forward_step, map(MicroBatch, rows), sums, 1, 0)
    return run.buffers.flat


QUICK = pytest.param(GATED[1], id=KINDS[GATED[1]])
# a sixth of the others in CI
REST = [
    pytest.param(kind, id=name, marks=pytest.mark.sweep if n % 6 else pytest.mark.campaign)
    for n, (kind, name) in enumerate(KINDS.items())
    if kind != GATED[1]
]


def another_number_of_documents(monkeypatch) -> None:
    """In each micro-batch."""
    numbers = itertools.count(3)

    def with_lengths(document_ids, on_host):
        document_ids.cu_seqlens = torch.empty(next(numbers), dtype=torch.int32, device="meta")
        return document_ids

    monkeypatch.setattr(cu_seqlens, "with_lengths", with_lengths)


@pytest.mark.campaign
def test_fp8_layers_are_two_graphs():
    """That of the first micro-batch, which casts the weights, and that of the others. Each scale
    begins where its memory does, as cuBLAS wants it: none is a part of another tensor."""
    offsets = []

    def record(graph):
        for node in graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten._scaled_mm.default
        ):
            offsets.extend(scale.meta["val"].storage_offset() for scale in node.args[2:4])

    fp8 = "--fp8-format hybrid --fp8-recipe tensorwise --bf16".split()
    gradients(*fp8, *LAYERS, device="meta", backend=backend_of(fw_compiler=record))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    assert len(offsets) == 2 * 4 * 3 * 2 and not any(offsets)


# Where no flash-attn is installed, capped scores, and latent attention inside documents, are computed
# in chunks: a loop between two graphs.
CHUNKED = ({"--attn-logit-softcapping"}, {"--multi-latent-attention", "--reset-attention-mask"})
WHOLE = [kind for kind in REST if not any(flags <= {*kind.values[0]} for flags in CHUNKED)]


@pytest.mark.parametrize("kind", [QUICK, *WHOLE])
def test_layers_of_a_kind_are_one_graph(kind, monkeypatch):
    """With the kernels of CUDA, for which the meta device stands. Forward is a graph and backward
    another, which adds the gradients of the weights itself."""
    another_number_of_documents(monkeypatch)
    small = {"--window-size", "--softmax-type", "--mtp-num-layers", "--attention-output-gate"}
    heads = ["--kv-channels", "8"] * bool(small & set(kind))  # as CUDA's kernels ask for these
    graphs: list[str] = []
    added: list[int] = []

    def record(name, graph):
        graphs.append(name)
        nodes = [str(node.args[:1]) for node in graph.graph.nodes if node.op == "call_function"]
        added.append(sum("add_product_" in node for node in nodes))

    backend = backend_of(
        fw_compiler=functools.partial(record, "forward"),
        bw_compiler=functools.partial(record, "backward"),
    )
    gradients(*with_flags(kind, *heads, "--bf16"), device="meta", backend=backend)
    counters = torch._dynamo.utils.counters
    # layers without positions or windows are another graph than those with
    kinds = 1 + bool({"--no-rope-freq", "--window-attn-skip-freq"} & set(kind))
    assert counters["stats"]["unique_graphs"] == kinds
    latent = 2 + ("--q-lora-rank" in kind) if "--multi-latent-attention" in kind else 0
    assert (
        sorted(zip(graphs, added, strict=True))
        == [("backward", 4 + latent)] * kinds + [("forward", 0)] * kinds
    )
    assert not counters["graph_break"]


@pytest.mark.campaign
def test_experts_stay_out_of_the_graphs():
    """What precedes the router, the shared expert and what follows are three graphs, the same of
    all layers; the gradients are those of eager layers."""
    gradients(*EXPERTS, *LAYERS, "--bf16", device="meta", backend="aot_eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert_as_eager(EXPERTS, "fp64", "aot_eager")


@pytest.mark.campaign
def test_delta_rules_stay_out_of_the_graphs():
    """However many layers: what precedes the rule, what follows it, and layers with attention; the
    gradients are those of eager layers."""
    for layers in "2", "6":
        flags = (*LLAMA, *DELTA, "--num-layers", layers, "--bf16")
        gradients(*flags, device="meta", backend="aot_eager")
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 6
    assert_as_eager(GATED_DELTA, "fp64", "aot_eager")


def assert_as_eager(kind: tuple[str, ...], precision: str, backend: str) -> None:
    flags, rounding = PRECISIONS[precision]
    flags = with_flags(kind, *flags.split(), "--num-layers", "2")
    flags = [TWO.get(flag, flag) for flag in flags]
    eager = gradients(*flags)
    difference = gradients(*flags, backend=backend) - eager
    assert difference.norm() <= rounding * eager.norm()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(GATED[1], id=KINDS[GATED[1]], marks=pytest.mark.campaign),
        *(kind for kind in REST if kind.values[0] != GATED[0]),
    ],
)
def test_compiled_layers_have_the_gradients_of_eager_ones(kind):
    assert_as_eager(kind, "fp64", "aot_eager")


@pytest.fixture
def kernels_of_cuda(monkeypatch):
    """Dropout and attention with masks are one operation each, on the CPU."""
    masks = batch.masks_of

    def with_lengths(*args):
        *others, documents = masks(*args)
        return *others, cu_seqlens.with_lengths(documents, documents)

    monkeypatch.setattr(batch, "masks_of", with_lengths)
    monkeypatch.setattr(libraries, "cuda_only", lambda device: None)
    monkeypatch.setattr(torch_flash, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(dropout, "no_triton_here", lambda *_: None)
    monkeypatch.setattr(model_compile, "fused_ops", lambda *_: True)
    library = torch.library.Library("megatron", "IMPL", "CPU")

    def drop(x, p, seed, residual=None):
        dropped = dropout._drop(x, p, int(seed))
        return dropped if residual is None else residual + dropped

    library.impl("drop", drop)
    with on_cpu():
        yield
    library._destroy()


MASKS = "--hidden-dropout 0.1 --attention-dropout 0.2 --reset-attention-mask"


@pytest.mark.parametrize(
    "backend, flags",
    [
        pytest.param("aot_eager", "--recompute-granularity selective", marks=pytest.mark.campaign),
        pytest.param("inductor", "", marks=pytest.mark.sweep),
    ],
)
def test_masks_in_the_graph_are_those_of_eager_layers(kernels_of_cuda, backend, flags):
    assert_as_eager(tuple(f"{MASKS} {flags}".split()), "fp64", backend)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def count_graphs() -> None:
    """Say after each step how many graphs and frames there are so far, and what was compiled
    anew. The graphs are those that inductor would get, which is the slow part and left out."""
    step = loop.train_step
    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")

    def counting(*args):
        outcome = step(*args)
        counters = torch._dynamo.utils.counters
        print(
            "COUNTS",
            json.dumps([counters["stats"]["unique_graphs"], counters["frames"]["total"]]),
            flush=True,
        )
        return outcome

    loop.train_step = counting


OVERLAP = [
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--ddp-bucket-size",
    "3000",
]


@pytest.mark.parametrize(
    "flags, graphs, frames",
    [
        pytest.param([], 6, 11, marks=pytest.mark.campaign),
        pytest.param(["--recompute-granularity", "selective"], 6, 11, marks=pytest.mark.sweep),
        pytest.param([*NO_DROPOUT, *LLAMA], 1, 1, marks=pytest.mark.sweep),
        pytest.param([*NO_DROPOUT, *EXPERTS], 3, 7, marks=pytest.mark.sweep),
        pytest.param([*NO_DROPOUT, "--reset-attention-mask"], 6, 11, marks=pytest.mark.sweep),
    ],
)
def test_dropout_does_not_compile_again(tmp_path, flags, graphs, frames):
    """Torch gives a function up after 8 recompilations, so ten layers show what depends on layer,
    step or seed."""
    compiled = train(
        tmp_path / "compiled", [*with_flags(TEN_LAYERS, *flags), *STEPS], hook=count_graphs
    )
    counts = [
        json.loads(line.removeprefix("COUNTS "))
        for line in compiled.log.splitlines()
        if line.startswith("COUNTS")
    ]
    assert len(counts) == 3 and counts[0] == counts[1] == counts[2], counts
    assert (
        1 <= counts[0][0] <= graphs
        and counts[0][1] <= frames
        and "recompile_limit" not in compiled.log
    )
    plain = train(tmp_path / "plain", [*with_flags(TEN_LAYERS, *flags), *STEPS[:-1]])
    for key, near in (("lm_loss", 1e-5), ("grad_norm", 1e-3)):
        assert [value for (value,) in compiled.series(key)] == pytest.approx(
            [value for (value,) in plain.series(key)], rel=near
        )


@pytest.mark.campaign
def test_weights_under_way_split_no_graph(tmp_path):
    """A compiled layer waits for its weights before its one graph begins."""
    flags = [*with_flags(TEN_LAYERS, *NO_DROPOUT), *STEPS, *OVERLAP]
    compiled = train(tmp_path / "compiled", flags, 2, hook=count_graphs)
    assert [line for line in compiled.log.splitlines() if line.startswith("COUNTS")] == [
        "COUNTS [1, 1]"
    ] * 3
    plain = train(tmp_path / "plain", [flag for flag in flags if flag != "--torch-compile"], 2)
    assert [value for (value,) in compiled.series("lm_loss")] == pytest.approx(
        [value for (value,) in plain.series("lm_loss")], rel=1e-5
    )
