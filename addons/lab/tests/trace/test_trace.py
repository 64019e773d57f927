"""--dry-run --trace: memory and bytes next to the plan's, and what it refuses by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron.addons.lab.tests.trace.tracing import Traced
from megatron.addons.lab.trace import dry_run
from megatron.addons.lab.trace.compare import check_agreement, figures, sent
from megatron.addons.lab.trace.picture import main as draw_picture
from megatron.addons.lab.trace.recorder import TraceError
from megatron.config.plan.transfers import sent_by_axis
from megatron.model.blocks.mlp.module import MLP
from megatron.parallel import collectives, ddp, flat_buffers, pipeline, reduction
from megatron.training import get_args, step
from tests.runs import NO_DROPOUT, SMALL, plot, with_flags

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP_SIZE = "--context-parallel-size"
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
# Wide enough that what the plan does not count is below 1 %, with 8 micro-batches in one process.
WIDE = (
    "--hidden-size 512 --seq-length 512 --max-position-embeddings 512 --num-layers 4 "
    "--global-batch-size 16 --mock-data --train-iters 2 --lr-warmup-iters 1 --bf16"
).split()
FLAGS = with_flags(SMALL, *NO_DROPOUT, *WIDE)
DROPS_INSIDE_DOCUMENTS = ("--attention-dropout", "0.1", "--reset-attention-mask")
SINKS = ("--softmax-type", "learnable", "--window-size", "100", "0")
SHORT = with_flags(FLAGS, "--global-batch-size", "8", "--num-layers", "2")
NARROW = with_flags(FLAGS, "--hidden-size", "32", "--seq-length", "64", "--global-batch-size", "16")


def refused(code: str, forward_step=None, flags=(), world: int = 1, rank: int = 0) -> str:
    """The message with which a trace ends."""
    with pytest.raises(TraceError) as error:
        Traced(with_flags(SHORT, *flags), world).rank(rank, forward_step)
    assert str(error.value).endswith(f"[{code}]"), error.value
    return str(error.value)


def plain(batch, model):
    return plot().forward_step(batch, model)


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ((*SHARDED, TP, "2", "--sequence-parallel", PP, "2"), 8),
        ((PP, "2", "--num-layers-per-virtual-pipeline-stage", "1", "--swiglu"), 2),
        ((*SHARDED, "--fp8-format", "hybrid", "--fp8-amax-history-len", "100000"), 2),
        pytest.param((), 1, marks=pytest.mark.campaign),
        pytest.param(DROPS_INSIDE_DOCUMENTS, 1, marks=pytest.mark.campaign),
        pytest.param(SINKS, 1, marks=pytest.mark.campaign),
        pytest.param((CP_SIZE, "2", *SINKS), 2, marks=pytest.mark.campaign),
    ],
)
def test_memory_and_bytes_are_the_plans(flags, world):
    traced = Traced(with_flags(FLAGS, *flags), world)
    for rank in (0, world - 1):
        trace = traced.rank(rank)
        compared = {one.name: one for one in figures(traced.config, traced.plan, trace)}
        for name in ("weights", "gradients", "optimizer"):
            assert not compared[name].differs, compared[name]
        assert abs(compared["activations"].traced / compared["activations"].planned - 1) < 0.15
        assert abs(compared["peak"].traced / compared["peak"].planned - 1) < 0.03
        assert sent(trace) == sent_by_axis(traced.config, traced.plan, trace.stage)
        assert trace.operations["host sync"] == 2


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ((TP, "2", "--global-batch-size", "4"), 2),
        ((PP, "4", "--pipeline-model-parallel-layout", "E|(tt|)*2,L"), 4),
    ],
)
def test_the_peak_of_a_narrow_model_is_the_plans(flags, world):
    """Where the loss's block of logits, or a stage of the embedding alone, is the peak."""
    traced = Traced(with_flags(NARROW, *flags), world)
    for rank in (0, world - 1):
        compared = {one.name: one for one in figures(traced.config, traced.plan, traced.rank(rank))}
        assert abs(compared["peak"].traced / compared["peak"].planned - 1) < 0.035, rank


def test_dropout_and_documents_are_one_kernel():
    """A layer without has 10 launches in forward; documents copy q, k, v and the result."""
    flags = with_flags(NARROW, *DROPS_INSIDE_DOCUMENTS, "--global-batch-size", "4")
    traces = [Traced(with_flags(flags, "--num-layers", layers), 1).rank(0) for layers in ("2", "3")]
    micro_batches = 4 // 2
    launches = [one.launches["forward-compute"] // micro_batches for one in traces]
    assert launches[1] - launches[0] <= 14
    assert traces[0].operations["flash_attention"] == 2 * micro_batches


def test_a_number_read_in_the_step():
    def forward_step(batch, model):
        losses, *rest = plain(batch, model)
        if losses.item() > 10.0:
            losses = losses * 2
        return losses, *rest

    message = refused("trace-host-sync", forward_step)
    assert "forward_step" in message and "test_trace.py" in message


def test_a_shape_that_depends_on_values():
    def forward_step(batch, model):
        batch.labels.nonzero()
        return plain(batch, model)

    assert "nonzero" in refused("trace-host-sync", forward_step)


def test_a_copy_to_the_host():
    def forward_step(batch, model):
        batch.labels.cpu()
        return plain(batch, model)

    refused("trace-host-sync", forward_step)


def test_a_mask_made_on_the_cpu():
    def forward_step(batch, model):
        return plain(replace(batch, loss_mask=torch.ones(batch.tokens.shape)), model)

    assert "on cpu" in refused("trace-device-mixed", forward_step)


def test_a_list_without_device():
    def forward_step(batch, model):
        losses, *rest = plain(batch, model)
        return (losses * torch.tensor([1.0, 2.0])).sum(), *rest

    refused("trace-device-mixed", forward_step)


def test_a_float64_constant():
    def forward_step(batch, model):
        weights = torch.ones(batch.tokens.shape, dtype=torch.float64, device=batch.tokens.device)
        return plain(replace(batch, loss_mask=weights), model)

    assert "float64" in refused("trace-widened", forward_step)


@pytest.mark.parametrize("used", [True, False])
def test_a_missing_wait(used):
    def forward_step(batch, model):
        losses, *rest = plain(batch, model)
        total = losses.detach().clone()
        torch.distributed.all_reduce(total, async_op=True)
        return (losses + 0.0 * total if used else losses), *rest

    message = refused("trace-missing-wait", forward_step, world=2)
    assert "all-reduce" in message and "forward_step" in message


EXPERTS = "--num-experts 8 --moe-router-topk 2 --disable-bias-linear --expert-model-parallel-size 2".split()


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("more", [(), (TP, "2", "--sequence-parallel", PP, "2", *SHARDED)])
def test_bytes_of_experts_are_the_plans(dispatcher, more):
    flags = with_flags(FLAGS, *EXPERTS, "--moe-token-dispatcher-type", dispatcher, *more)
    traced = Traced(flags, 8)
    for rank in (0, 7):
        trace = traced.rank(rank)
        assert sent(trace) == sent_by_axis(traced.config, traced.plan, trace.stage)


def full(method: str, layers: int) -> tuple[str, ...]:
    words = ("--recompute-granularity", "full", "--recompute-method", method)
    return (*words, "--recompute-num-layers", str(layers))


SHARED_EXPERT = ("--moe-shared-expert-intermediate-size", "16")
GATE = ("--moe-shared-expert-gate",)
CP = ("--context-parallel-size", "2")
SEQUENCE = (TP, "2", "--sequence-parallel")


@pytest.mark.parametrize(
    ("dispatcher", "more"),
    [
        ("alltoall", full("uniform", 1)),
        ("allgather", (*full("uniform", 3), TP, "2")),
        ("alltoall", (*full("uniform", 4), *SEQUENCE, *SHARED_EXPERT)),
        pytest.param(
            "allgather",
            (*full("block", 2), "--moe-layer-freq", "2", *SEQUENCE, *CP),
            marks=pytest.mark.campaign,
        ),
        ("alltoall", (*full("uniform", 2), TP, "2", "--post-mlp-layernorm", *SHARED_EXPERT, *GATE)),
    ],
)
def test_bytes_of_recomputed_experts_are_the_plans(dispatcher, more):
    """Router and experts exchange tokens in the second forward too."""
    flags = with_flags(NARROW, *EXPERTS, "--moe-token-dispatcher-type", dispatcher, *more)
    traced = Traced(flags, 8)
    assert sent(traced.rank(0)) == sent_by_axis(traced.config, traced.plan, 0)


def test_ring_attention_has_the_kernel_of_a_gpu():
    """2 micro-batches, 4 layers; of the 2 x 2 chunks of the sequence the later sees 3 whole
    and both see themselves, or the other rank's."""
    operations = Traced(with_flags(FLAGS, *CP, "--global-batch-size", "4"), 2).rank(0).operations
    assert operations["_scaled_dot_product_flash_attention"] == 2 * 4 * 5
    assert operations["_scaled_dot_product_flash_attention_backward"] == 2 * 4 * 5


BY_HEADS = {
    "a2a": (*CP, "--cp-comm-type", "a2a"),
    "both": (
        *("--context-parallel-size", "4", "--cp-comm-type", "a2a+p2p"),
        *("--hierarchical-context-parallel-sizes", "2", "2"),
    ),
}


@pytest.mark.parametrize("more", BY_HEADS.values(), ids=BY_HEADS)
def test_bytes_and_kernels_of_attention_by_heads(more):
    """The kernel of a GPU over the whole sequence, or over three blocks of its two halves."""
    traced = Traced(with_flags(FLAGS, *more, "--global-batch-size", "8"), 8)
    trace = traced.rank(3)
    assert sent(trace) == sent_by_axis(traced.config, traced.plan, trace.stage)
    kernels = 1 if "a2a" in more else 5
    per_step = traced.plan.num_microbatches(1) * 4 * kernels
    assert trace.operations["_scaled_dot_product_flash_attention"] == per_step


def test_activations_that_a_closure_keeps():
    hidden = []
    forward = MLP.forward

    def keeping(self, x, *others):
        hidden.append(x)
        return forward(self, x, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MLP, "forward", keeping)
        refused("trace-memory-kept")


def test_logits_that_are_kept():
    kept = []
    product = F.linear

    def forward_step(batch, model):
        kept.append(
            product(torch.empty_like(batch.tokens, dtype=torch.bfloat16)[..., None], model_row)
        )
        return plain(batch, model)

    model_row = torch.empty((4096, 1), dtype=torch.bfloat16, device="meta")
    assert "makes 8,388,608 bytes" in refused("trace-memory-kept", forward_step)


def test_a_bucket_kept_twice(monkeypatch):
    flatten = flat_buffers._flatten
    twice = []

    def keeping(*parts):
        flat = flatten(*parts)
        twice.append(flat.clone())
        return flat

    monkeypatch.setattr(flat_buffers, "_flatten", keeping)
    message = refused("trace-memory-kept", flags=SHARDED, world=2)
    assert "keeping" in message and f"{twice[0].nbytes:,} bytes" in message


def test_a_collective_that_only_one_rank_calls(monkeypatch):
    reduce = collectives.all_reduce_
    own = step._agree_on_metrics

    def on_rank_0(run, sums):
        if run.runtime.rank == 0:
            reduce(sums.values, run.runtime.ctx.world)
        own(run, sums)

    monkeypatch.setattr(step, "_agree_on_metrics", on_rank_0)
    traced = Traced(SHORT, 2)
    with pytest.raises(TraceError, match=r"ranks 0 and 1 .*\[trace-collectives-differ\]"):
        check_agreement([traced.rank(0), traced.rank(1)])


def test_a_message_that_nobody_receives(monkeypatch):
    send = pipeline.P2PLinks.send

    def twice(links, action, x):
        send(links, action, x)
        if action.kind == "send_gradient":
            send(links, action, x)

    traced = Traced(with_flags(SHORT, PP, "2"), 2)
    check_agreement([traced.rank(0), traced.rank(1)])
    monkeypatch.setattr(pipeline.P2PLinks, "send", twice)
    with pytest.raises(TraceError, match=r"rank 1\b.* rank 0\b"):
        check_agreement([traced.rank(0), traced.rank(1)])


@pytest.mark.parametrize("missing", [False, True])
def test_a_sum_over_the_wrong_group(monkeypatch, missing):
    """Gradients over ranks with the same samples instead of those with others, or not at all."""
    axes = {}
    built = ddp.GradBuffers.__init__

    def remembering(self, params, ctx, *args, **kwargs):
        axes["tp"] = ctx.tp
        built(self, params, ctx, *args, **kwargs)

    start = reduction.start_all_reduce

    def wrong(x, axis):
        return (lambda: x) if missing else start(x, axes["tp"])

    monkeypatch.setattr(ddp.GradBuffers, "__init__", remembering)
    monkeypatch.setattr(reduction, "start_all_reduce", wrong)
    message = refused("trace-wrong-group", flags=(TP, "2"), world=4)
    assert (" 0 bytes" in message) if missing else (" tp" in message)


def test_the_lines_and_the_file(tmp_path, capsys):
    file = tmp_path / "trace.json"
    flags = with_flags(SHORT, TP, "2", PP, "2")
    words = ["--dry-run", "--world-size", "8", "--trace", "--trace-output", str(file)]
    plot().main([*flags, *words, "--trace-ranks", "all-stages", "1"])
    text = capsys.readouterr().out
    assert " iteration 2 on ranks 0, 1, 4" in text
    content = json.loads(file.read_text())
    assert content["world_size"] == 8 and [one["rank"] for one in content["ranks"]] == [0, 1, 4]
    for one in content["ranks"]:
        assert one["peak"] == sum(one["memory_at_peak"].values())
        over_step = one["memory_over_step"]["bytes"].values()
        assert one["peak"] == max(map(sum, zip(*over_step, strict=True)))
        assert sum(row[-1] for row in one["messages"]) == sum(
            row["calls"] for row in one["collectives"]
        )
    picture = tmp_path / "memory.png"
    assert draw_picture([str(file), str(picture)]) == 0
    assert picture.stat().st_size > 10_000
    file.write_text(file.read_text().replace("memory_over_step", "memory"))
    assert draw_picture([str(file), str(picture)]) == 2


@pytest.mark.parametrize(("word", "found"), [("8", None), ("middle", None), ("last", {7})])
def test_ranks_by_name(word, found):
    traced = Traced(with_flags(FLAGS, TP, "2", PP, "2"), 8)
    if found is None:
        with pytest.raises(ValueError, match="trace-ranks-not-valid"):
            dry_run.chosen_ranks((word,), traced.config, traced.plan)
        return
    assert dry_run.chosen_ranks((word,), traced.config, traced.plan) == found


def test_peers_share_a_group_with_rank_0():
    traced = Traced(with_flags(FLAGS, TP, "2", PP, "2"), 8)
    assert dry_run.chosen_ranks(("peers",), traced.config, traced.plan) == {0, 1, 2}


@pytest.mark.parametrize(
    "flags",
    [
        [],  # numbers without --vocab-size
        ["--tokenizer-type", "GPT2BPETokenizer"],
        ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "/nowhere/t.model"],
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /no --vocab-size 211".split(),
    ],
)
def test_no_file_of_a_tokenizer_is_needed(flags, capsys):
    words = with_flags(SHORT, "--vocab-size")[:-1]
    plot().main([*words, *flags, "--dry-run", "--trace", "--trace-ranks", "0"])
    out = capsys.readouterr().out
    assert "FLOPs" in out and ("[tokenizer-file-missing]" in out or "[flag-missing]" in out)


def test_a_file_that_is_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    with pytest.raises(ValueError) as error:
        plot().main([*with_flags(SHORT, *words), "--dry-run", "--trace", "--trace-ranks", "0"])
    assert str(tmp_path) in str(error.value)


def test_a_script_is_traced_with_its_flags(capsys):
    def doubled(batch, model):
        losses, *rest = plot().forward_step(batch, model)
        return losses * get_args().loss_factor, *rest

    def add_flags(parser):
        parser.add_argument("--loss-factor", type=float, default=1.0)

    argv = [*SHORT, "--dry-run", "--trace", "--loss-factor", "2"]
    plot().main(argv, forward_step=doubled, extra_args_provider=add_flags)
    assert "FLOPs" in capsys.readouterr().out
