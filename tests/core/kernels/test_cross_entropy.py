"""Cross entropy against the formula in fp64: padding, chunks, split vocabularies, formats,
memory."""

import threading
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels import cross_entropy as module
from megatron.kernels.cpu import native
from megatron.kernels.cross_entropy import RowOutputs
from megatron.parallel.cross_entropy import parallel_cross_entropy
from tests.core.kernels.functional import cross_entropy

ROWS = 11
COLUMNS = 16
VOCAB = 13


@pytest.fixture(
    autouse=True, params=[1 << 19, 3 * COLUMNS, None], ids=["one chunk", "many chunks", "C++"]
)
def chunk_elements(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param)
        monkeypatch.setattr(native, "unavailable_reason", lambda *_: "not built")


def inputs(dtype: torch.dtype = torch.float64, spread: float = 2.0):
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64) * spread).to(
        dtype
    )
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[0], labels[1] = 0, VOCAB - 1
    weights = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return logits, labels, weights


def formula(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, smoothing: float = 0.0
):
    """Loss of each row and the gradient of the weighted sum, in fp64, by softmax minus (smoothed)
    one-hot."""
    real = logits.double()[:, :VOCAB]
    target = F.one_hot(labels, VOCAB).double() * (1.0 - smoothing) + smoothing / VOCAB
    loss = real.exp().sum(-1).log() - (real * target).sum(-1)
    grad = torch.zeros(logits.shape, dtype=torch.float64)
    grad[:, :VOCAB] = (real.exp() / real.exp().sum(-1, keepdim=True) - target) * weights[:, None]
    return loss, grad


def run(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    loss_of=cross_entropy,
    **options,
):
    """Loss and gradient through a copy that is nobody's leaf."""
    leaf = logits.clone().requires_grad_()
    loss = loss_of(leaf.clone(), labels, vocab_size=VOCAB, **options)
    loss.backward(weights.to(loss.dtype))
    return loss.detach(), leaf.grad


def test_loss_and_gradient_are_the_formula():
    logits, labels, weights = inputs()
    for actual, exact in zip(
        run(logits, labels, weights), formula(logits, labels, weights), strict=True
    ):
        torch.testing.assert_close(actual, exact, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    "dtype, options, near, unit",
    [
        (torch.float32, {}, 1e-6, 2e-7),
        (torch.bfloat16, {}, 1e-6, 2.0**-8),
        (torch.float16, {}, 1e-6, 2.0**-11),
        (torch.float16, {"dtype": torch.float16}, 3e-3, 1e-2),
    ],
)
def test_low_precision_logits_have_a_loss_in_fp32_or_the_dtype_asked_for(
    dtype, options, near, unit
):
    logits, labels, weights = inputs(dtype)
    loss, grad = run(logits, labels, weights, **options)
    exact_loss, exact_grad = formula(logits, labels, weights)
    assert loss.dtype == options.get("dtype", torch.float32) and grad.dtype == dtype
    torch.testing.assert_close(loss.double(), exact_loss, rtol=near, atol=near)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1.01 * unit, atol=near)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_padding_columns_do_not_count_and_have_no_gradient(dtype):
    logits, labels, weights = inputs(dtype)
    loss, grad = run(logits, labels, weights)
    logits[:, VOCAB:] = 100.0
    other_loss, other_grad = run(logits, labels, weights)
    assert torch.equal(loss, other_loss) and torch.equal(grad, other_grad)
    assert torch.equal(grad[:, VOCAB:], torch.zeros(ROWS, COLUMNS - VOCAB, dtype=dtype))


def plain_z_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, coeff: float):
    """Log Z of each row, and the gradient of the weighted sum of losses with z-loss, in fp64 by
    torch's autograd."""
    leaf = logits.double().clone().requires_grad_()
    log_z = leaf[:, :VOCAB].logsumexp(-1)
    loss = F.cross_entropy(leaf[:, :VOCAB], labels, reduction="none") + coeff * log_z.square()
    loss.backward(weights)
    return log_z.detach(), leaf.grad


@pytest.mark.parametrize("coeff", [1e-2, 3.0])
@pytest.mark.parametrize(
    "dtype, unit", [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2.0**-8)]
)
def test_the_z_loss_is_in_the_gradient_alone(dtype, unit, coeff):
    logits, labels, weights = inputs(dtype)
    logits -= 3.0  # log Z of both signs
    log_z = torch.zeros(ROWS, dtype=torch.promote_types(dtype, torch.float32))
    loss, grad = run(logits, labels, weights, z_loss=coeff, outputs=RowOutputs(log_z=log_z))
    exact_log_z, exact_grad = plain_z_loss(logits, labels, weights, coeff)
    assert exact_log_z.min() < 0 < exact_log_z.max()
    assert torch.equal(loss, run(logits, labels, weights)[0])
    torch.testing.assert_close(log_z.double(), exact_log_z, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        grad.double(), exact_grad, rtol=1.01 * unit, atol=2e-6 if unit > 1e-9 else 1e-13
    )


@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1}, {"z_loss": 0.5}])
@pytest.mark.parametrize(
    "dtype, unit", [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 2.0**-8)]
)
def test_capped_logits(dtype, unit, options):
    """As of logits that are capped in fp64, by torch's autograd; the logits stay as they are until
    backward, and the slope of a cap that is reached is 0."""
    logits, labels, weights = inputs(dtype)
    logits[2, 3] = 60.0
    leaf = logits.clone().double().requires_grad_()
    real = 1.5 * torch.tanh(leaf[:, :VOCAB] / 1.5)
    smoothing, z_loss = options.get("smoothing", 0.0), options.get("z_loss", 0.0)
    exact = F.cross_entropy(real, labels, reduction="none", label_smoothing=smoothing)
    (exact + z_loss * real.logsumexp(-1).square()).backward(weights)
    log_z = torch.zeros(ROWS, dtype=torch.promote_types(dtype, torch.float32))
    more = RowOutputs(log_z=log_z)
    loss, grad = run(logits, labels, weights, softcap=1.5, outputs=more, **options)
    close = dict(rtol=1.01 * unit, atol=2e-6 if unit > 1e-9 else 1e-13)
    torch.testing.assert_close(log_z.double(), real.logsumexp(-1).detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss.double(), exact.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), leaf.grad, **close)
    assert grad[2, 3] == 0.0
    alone = module.soft_cap(logits, 1.5)[:, :VOCAB]
    assert alone.dtype == dtype
    torch.testing.assert_close(alone.double(), real.detach(), rtol=1.01 * unit, atol=0)


def test_which_labels_are_first():
    logits, labels, weights = inputs()
    labels[3] = logits[3, :VOCAB].argmax()
    right = torch.zeros(ROWS, dtype=torch.bool)
    logits[:, VOCAB:] = 100.0  # padding is never first
    loss, _ = run(logits, labels, weights, outputs=RowOutputs(correct=right))
    assert (
        torch.equal(right, logits[:, :VOCAB].argmax(-1) == labels) and right[3] and not right.all()
    )
    assert torch.equal(loss, run(logits, labels, weights)[0])


def test_large_logits_neither_overflow_nor_lose_the_loss():
    logits, labels, weights = inputs(torch.float32, spread=1.0)
    loss, grad = run(logits + 3e4, labels, weights)
    assert torch.isfinite(loss).all() and torch.isfinite(grad).all()
    torch.testing.assert_close(
        loss, run((logits + 3e4) - 3e4, labels, weights)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_lies_where_the_logits_lay(dtype):
    logits, labels, weights = inputs(dtype)
    leaf = logits.clone().requires_grad_()
    middle = leaf.clone()
    seen = []
    middle.register_hook(lambda grad: seen.append(grad.data_ptr()))
    loss = cross_entropy(middle, labels, vocab_size=VOCAB)
    assert torch.equal(middle.detach(), logits)  # forward has not touched them
    loss.sum().backward()
    assert seen == [middle.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_second_backward_over_the_overwritten_logits_is_an_error(dtype):
    logits, labels, _ = inputs(dtype)
    loss = cross_entropy(logits.requires_grad_().clone(), labels, vocab_size=VOCAB).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@dataclass(frozen=True)
class Part:
    """An axis of threads: what the kernel and the reduction below need of it."""

    size: int
    rank: int


class Reduction:
    """All-reduce between threads, and how often it was called by each."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.slots = [None] * size
        self.calls = [0] * size

    def __call__(self, tensor: torch.Tensor, axis: Part, op: str) -> torch.Tensor:
        self.calls[axis.rank] += 1
        self.slots[axis.rank] = tensor.clone()
        self.barrier.wait(20)
        stacked = torch.stack(self.slots)
        self.barrier.wait(20)
        return stacked.amax(0) if op == "max" else stacked.sum(0)


# with 4 the last part holds three columns of padding and one real one
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("padding_part", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.5)])
def test_a_split_vocabulary_gives_the_same(size, padding_part, dtype, smoothing, z_loss, softcap):
    logits, labels, weights = inputs(dtype)
    parts = list(logits.split(COLUMNS // size, dim=1))
    if padding_part:  # one more rank whose columns are all padding
        parts.append(torch.full_like(parts[0], 7.0))
    reduction = Reduction(len(parts))
    results = [None] * len(parts)
    labels[3] = logits[3, :VOCAB].double().argmax()
    right = [torch.zeros(ROWS, dtype=torch.bool) for _ in parts]
    wide = torch.promote_types(dtype, torch.float32)
    plain = [torch.zeros(ROWS, dtype=wide) for _ in parts]
    log_z = [torch.zeros(ROWS, dtype=wide) for _ in parts]

    def work(rank: int) -> None:
        results[rank] = run(
            parts[rank],
            labels,
            weights,
            parallel_cross_entropy,
            tp=Part(len(parts), rank),
            reduce=reduction,
            smoothing=smoothing,
            z_loss=z_loss,
            softcap=softcap,
            outputs=RowOutputs(
                right[rank] if smoothing else None,
                plain[rank] if smoothing else None,
                log_z[rank] if z_loss else None,
            ),
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    slopes = torch.ones_like(logits, dtype=torch.float64)
    if softcap:
        logits = softcap * torch.tanh(logits.double() / softcap)
        slopes -= (logits / softcap).square()
    loss, grad = formula(logits, labels, weights, smoothing)
    if z_loss:
        exact_log_z, grad = plain_z_loss(logits, labels, weights, z_loss)
        for of_rank in log_z:
            torch.testing.assert_close(of_rank.double(), exact_log_z, rtol=1e-6, atol=1e-6)
    if smoothing:
        assert (
            all(
                torch.equal(
                    one,
                    logits[:, :VOCAB].gather(1, labels[:, None]).squeeze(1)
                    == logits[:, :VOCAB].amax(-1),
                )
                for one in right
            )
            and right[0][3]
        )
        for one in plain:
            assert torch.allclose(
                one.double(), formula(logits, labels, weights)[0].double(), rtol=1e-5, atol=1e-6
            )
    close = (
        dict(rtol=1e-12, atol=1e-13)
        if dtype == torch.float64
        else dict(rtol=2.0**-8 * 1.01, atol=1e-6)
    )
    for result in results:
        torch.testing.assert_close(
            result[0].double(), loss, rtol=1e-6 if dtype != torch.float64 else 1e-12, atol=1e-6
        )
    torch.testing.assert_close(
        torch.cat([r[1] for r in results], 1)[:, :COLUMNS].double(), grad * slopes, **close
    )
    if padding_part:
        assert not results[-1][1].any()
    assert reduction.calls == [2] * len(parts)
