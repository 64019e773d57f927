"""What a training step never holds: a second copy of the logits, and anything of sequence by
sequence."""

import pytest
import torch
import torch.nn.functional as F

from megatron.config.plan.costs import chunk_activations
from megatron.kernels import cross_entropy as loss_module
from megatron.kernels.cpu import native
from megatron.kernels.linear import BLOCK_ELEMENTS
from megatron.parallel import layers
from megatron.parallel.cross_entropy import parallel_cross_entropy
from megatron.training.batch import MicroBatch
from megatron.training.run import Run
from megatron.training.step import train_step
from tests.core.kernels import functional
from tests.core.training.tiny_run import make_run
from tests.live_memory import LiveMemory
from tests.runs import plot

VOCAB = 50304
ROWS = 160
LOGITS = ROWS * VOCAB


def step(**flags) -> tuple[LiveMemory, list[torch.Tensor], Run]:
    """(what a step made, what it kept for backward) of a small model, and the run."""
    length = flags["seq_length"]
    run = make_run(max_position_embeddings=length, global_batch_size=1, micro_batch_size=1, **flags)
    tokens = torch.randint(0, 50, (1, length + 1), generator=torch.Generator().manual_seed(0))
    saved = []
    with (
        LiveMemory() as memory,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        outcome = train_step(run, plot().forward_step, iter([MicroBatch(tokens)]), 1)
    assert outcome.skipped is None and outcome.loss > 0
    return memory, saved, run


def plain_loss(logits, labels, **_):
    return F.cross_entropy(logits.float(), labels, reduction="none")


def loss_memory(dtype, loss) -> int:
    """Bytes beside the logits that forward and backward of a loss hold at once."""
    logits = torch.zeros(ROWS, VOCAB, dtype=dtype).requires_grad_()
    middle = logits.view_as(logits)
    with LiveMemory() as memory:
        torch.autograd.grad(loss(middle, torch.arange(ROWS), vocab_size=VOCAB - 47).sum(), middle)
    return memory.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [False, True])
@pytest.mark.parametrize("built", [False, True])
def test_the_loss_holds_a_chunk_and_a_sixteenth_of_the_logits(monkeypatch, dtype, tp, built):
    if not built:
        monkeypatch.setattr(native, "unavailable_reason", lambda *_: "not built")

    class Two:
        size = 2
        rank = 0

    def loss(logits, labels, **more):
        if not tp:
            return functional.cross_entropy(logits, labels, **more)
        return parallel_cross_entropy(logits, labels, tp=Two, reduce=lambda x, axis, op: x, **more)

    chunk = loss_module.CHUNK_ELEMENTS * 4
    assert chunk * (not built) < loss_memory(dtype, loss) + chunk // 2  # something was seen
    assert loss_memory(dtype, loss) <= chunk + LOGITS * dtype.itemsize // 16
    assert loss_memory(dtype, plain_loss) > LOGITS * dtype.itemsize


@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_holds_the_logits_once(monkeypatch, bf16):
    """Of the whole vocabulary there are the logits and a chunk; they are kept for backward once, as
    they are."""
    flags = dict(
        vocab_size=VOCAB - 47,
        make_vocab_size_divisible_by=128,
        seq_length=ROWS,
        fp64=False,
        bf16=bf16,
    )
    memory, saved, run = step(**flags)
    item = 2 if bf16 else 4
    logits = LOGITS * item
    chunk = loss_module.CHUNK_ELEMENTS * 4
    # and what a layer needs in passing
    passing = chunk_activations(run.config, run.plan, range(2)) + 2**20
    # where bf16 is emulated: an fp32 copy of columns of logits or of weight
    wide = BLOCK_ELEMENTS * 4 if bf16 else 0
    assert logits < memory.peak <= logits + logits // 16 + chunk + passing + wide
    held = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for x in saved
        if x.shape[-1:] == (VOCAB,)
    }
    assert list(held.values()) == [logits]
    if not bf16:
        monkeypatch.setattr(layers, "cross_entropy", plain_loss)
        # the bound sees torch's own loss
        assert step(**flags)[0].peak > logits + logits // 2 + chunk + passing


def squares(memory: LiveMemory, saved: list[torch.Tensor], length: int) -> list[tuple[int, ...]]:
    """Shapes with the sequence in them twice, or as many elements for a head."""
    shapes = memory.shapes | {tuple(x.shape) for x in saved}
    return [shape for shape in shapes if shape.count(length) > 1 or length * length in shape]


CAUSAL = {
    "plain": {},
    "bf16": dict(bf16=True),
    "dropout": dict(attention_dropout=0.1, hidden_dropout=0.1),
    "documents": dict(reset_attention_mask=True, reset_position_ids=True),
    "fp64": dict(fp64=True),
    "recompute": dict(recompute_granularity="selective"),
    "fp8": dict(fp8="hybrid", hidden_size=32),
    "rotary, GQA": dict(
        position_embedding_type="rope", group_query_attention=True, num_query_groups=1
    ),
}


# 544: in blocks of rows
@pytest.mark.parametrize("name, length", [*((name, 352) for name in CAUSAL), ("plain", 544)])
def test_a_step_makes_nothing_of_sequence_by_sequence(name, length):
    memory, saved, _ = step(seq_length=length, **{"fp64": False, **CAUSAL[name]})
    assert saved and squares(memory, saved, length) == []


def test_a_matrix_of_scores_would_be_seen():
    memory, saved, _ = step(seq_length=352, fp64=False, attention_backend="unfused")
    assert (2, 352, 352) in squares(memory, saved, 352)
    assert (2, 352, 352) in {tuple(x.shape) for x in saved}
