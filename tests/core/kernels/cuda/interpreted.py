"""The Triton kernels on the CPU, by Triton's interpreter, against the formulas: a program that
test_fused_ops.py starts, because the interpreter is chosen before triton is imported."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from megatron.kernels import cross_entropy, fp8
from megatron.kernels.cuda import fp8_ops, fp8_triton, fused_ops, loss_ops, triton_kernels
from megatron.parallel import cross_entropy as split_cross_entropy
from tests.core.kernels import functional

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}


def same(ours, formula, x: torch.Tensor) -> None:
    """Result and gradient, the formula in fp64."""
    wide = x.detach().double().requires_grad_()
    x = x.detach().requires_grad_()
    got = ours(x)
    wanted = formula(wide)
    grad = torch.randn_like(wanted).to(x.dtype)
    assert got.dtype == x.dtype and got.shape == wanted.shape
    pairs = (
        (got, wanted),
        (torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(wanted, wide, grad.double())[0]),
    )
    close = TOLERANCE[x.dtype]
    for one, two in pairs:
        torch.testing.assert_close(one.double(), two, rtol=close, atol=close)


def swiglu(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 2, 700).to(dtype)
    formula = lambda t: functional.swiglu(t, fused=False)  # noqa: E731
    same(fused_ops.SwiGlu.apply, formula, x)
    same(fused_ops.SwiGlu.apply, formula, x.transpose(0, 1))
    x = torch.randn(6, 2, 2500).to(dtype)  # several blocks
    weights = torch.rand(6, requires_grad=True)
    wide = weights.detach().double().requires_grad_()
    same(
        lambda t: fused_ops.SwiGlu.apply(t, weights),
        lambda t: formula(t) * wide.unsqueeze(1),
        x,
    )
    got = fused_ops.SwiGlu.apply(x, weights)
    wanted = formula(x.double()) * wide.unsqueeze(1)
    grad = torch.randn(6, 2500).to(dtype)
    (of_weights,) = torch.autograd.grad(got, weights, grad)
    (right,) = torch.autograd.grad(wanted, wide, grad.double())
    assert of_weights.dtype == torch.float32
    torch.testing.assert_close(of_weights.double(), right, rtol=1e-4, atol=1e-3)


def sums_of_copies(dtype: torch.dtype) -> None:
    places = torch.tensor([[0, 3], [-1, 2], [-1, -1], [4, 1]])
    for width in (21, 1500):
        x = torch.randn(5, width).to(dtype)
        summed = torch.ops.megatron.sum_rows(x, places)
        right = torch.stack([x.double()[row[row >= 0]].sum(0) for row in places])
        torch.testing.assert_close(summed, right.to(dtype), rtol=TOLERANCE[dtype], atol=1e-6)


def grouped_products(dtype: torch.dtype) -> None:
    """Tiles and steps that nothing fills, groups without rows, rows of no group."""
    counts = [70, 0, 3]
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    for outputs, inputs in ((40, 24), (136, 264)):
        rows_out, rows_in = (torch.randn(80, n).to(dtype) for n in (outputs, inputs))
        rows_out[73:] = rows_in[73:] = torch.nan
        groups = zip(rows_out[:73].split(counts), rows_in[:73].split(counts), strict=True)
        right = torch.stack([a.double().t() @ b.double() for a, b in groups])
        total = torch.full((3, outputs, inputs), torch.nan)
        for add in (False, True):
            torch.ops.megatron.add_grouped_product_(total, rows_out, rows_in, ends, add)
            torch.testing.assert_close(total.double(), right * (1 + add), rtol=1e-5, atol=1e-4)


def rotary(dtype: torch.dtype) -> None:
    for interleaved in (False, True):
        for positions in (7, torch.arange(14).view(2, 7)):
            for x, batch_first in (
                (torch.randn(7, 2, 3, 20), False),
                (torch.randn(7, 2, 3, 60)[..., 20:40], True),
                (torch.randn(7, 2, 3, 16), True),
                (torch.randn(2, 7, 3, 60)[..., 20:40].transpose(0, 1), False),
            ):
                cos, sin = functional.rotary_tables(positions, 16)
                tables = [t.view(7, -1, 1, 8) for t in (cos, sin)]
                same(
                    lambda t, i=interleaved, tables=tables, b=batch_first: fused_ops.Rotary.apply(
                        t, *tables, i, b
                    ),
                    lambda t, i=interleaved, c=cos, s=sin: functional.apply_rotary(
                        t, c, s, interleaved=i, fused=False
                    ),
                    x.to(dtype),
                )


def moves(dtype: torch.dtype) -> None:
    for x in (torch.randn(7, 2, 3, 60)[..., 20:40], torch.randn(2, 7, 5, 136).transpose(0, 1)):
        x = x.to(dtype)
        for batch_first in (False, True):
            moved = torch.ops.megatron.move(x, batch_first)
            assert torch.equal(moved, x)
            assert (moved.transpose(0, 1) if batch_first else moved).is_contiguous()


def dropout(dtype: torch.dtype) -> None:
    p = 0.1
    x = (torch.rand(70, 150) + 1).to(dtype).requires_grad_()
    call = lambda seed: fused_ops.Dropout.apply(x, p, torch.tensor(seed), None)  # noqa: E731
    out = call(2**62 + 5)
    kept = out != 0
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(x))
    factors = kept.double() / (1 - p)
    for got, wanted in ((out, x.double() * factors), (grad, factors)):
        torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE[dtype], atol=0)
    assert abs(kept.double().mean() - (1 - p)) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert torch.equal(call(2**62 + 5), out)
    assert not torch.equal(call(5) != 0, kept)
    assert not torch.equal(kept[0], kept[1])


def philox(seed: int, counters: torch.Tensor) -> torch.Tensor:
    """The first 32 bits of Philox 4x32-10 (Salmon et al. 2011), as numbers of [0, 1) by their size
    without the sign."""
    low, (key, other) = 0xFFFFFFFF, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    a, b, c, d = (counters, *[torch.zeros_like(counters)] * 3)
    for _ in range(10):
        # products of 64 bits in parts that int64 holds
        high_a, low_a = (a >> 16) * 0xD2511F53, (a & 0xFFFF) * 0xD2511F53
        high_c, low_c = (c >> 16) * 0xCD9E8D57, (c & 0xFFFF) * 0xCD9E8D57
        above_a, above_c = high_a + (low_a >> 16), high_c + (low_c >> 16)
        a, b, c, d = (
            above_c >> 16 ^ b ^ key,
            (above_c << 16 | low_c & 0xFFFF) & low,
            above_a >> 16 ^ d ^ other,
            (above_a << 16 | low_a & 0xFFFF) & low,
        )
        key, other = key + 0x9E3779B9 & low, other + 0xBB67AE85 & low
    signed = torch.where(a < 2**31, a, 2**32 - 1 - a)
    return signed.float() * 4.6566127342e-10


def masks(dtype: torch.dtype) -> None:
    """What is dropped is a function of seed and place that no version may change; the result with
    the residual stream is the sum without."""
    x = torch.randn(3, 1000).to(dtype)
    for seed in (7, 2**62 + 5, 2**33):
        out = torch.ops.megatron.drop(x, 0.1, torch.tensor(seed))
        keep = philox(seed, torch.arange(x.numel())).view(x.shape) >= 0.1
        assert torch.equal(out != 0, keep & (x != 0)) and 0.85 < keep.float().mean() < 0.95
        # as where the seed is on the device
        loaded = torch.empty_like(out)
        size = x.numel()
        triton_kernels._drop_kernel[triton_kernels._grid(size)](
            *(x, x, loaded, size, 0.1, 1 / 0.9, torch.tensor(seed)),
            **dict(LOAD=True, ADD=False, WIDE=False, BLOCK=triton_kernels.BLOCK),
        )
        assert torch.equal(loaded, out)
        for wide in {dtype, torch.float32}:
            residual = torch.randn(3, 1000).to(wide)
            leaves = [t.clone().requires_grad_() for t in (x, residual)]
            added = fused_ops.Dropout.apply(leaves[0], 0.1, torch.tensor(seed), leaves[1])
            torch.testing.assert_close(added, out + residual, rtol=0.01, atol=1e-3)
            grad = torch.randn(3, 1000).to(wide)
            of_x, of_residual = torch.autograd.grad(added, leaves, grad)
            again = torch.ops.megatron.drop(grad.to(dtype), 0.1, torch.tensor(seed))
            assert torch.equal(of_x, again) and torch.equal(of_residual, grad)


def norms(dtype: torch.dtype) -> None:
    """Rows that fill no block and several steps of each program; one program's widest and least."""
    fused_ops.PROGRAMS_OF_NORM = fused_ops.PROGRAMS_OF_SUMS = 2
    for rows, width in ((300, 40), (5, 4096), (27, 768)):
        x, grad = (torch.randn(rows, width).to(dtype) for _ in range(2))
        weight, bias = (torch.randn(width).to(dtype) for _ in range(2))
        for parameters in ((weight, bias), (weight,)):
            ours = [t.clone().requires_grad_() for t in (x + 1, *parameters)]
            wide = [t.detach().double().requires_grad_() for t in ours]
            got = fused_ops.FusedNorm.apply(*ours, *[None] * (len(parameters) == 1), 1e-5)
            if len(parameters) == 2:
                wanted = F.layer_norm(wide[0], (width,), *wide[1:], 1e-5)
            else:
                wanted = F.rms_norm(wide[0], (width,), wide[1], 1e-5)
            of_ours = torch.autograd.grad(got, ours, grad)
            of_wide = torch.autograd.grad(wanted, wide, grad.double())
            for one, two in zip((got, *of_ours), (wanted, *of_wide), strict=True):
                assert one.dtype == dtype
                apart = (one.double() - two).abs().max()
                assert apart <= TOLERANCE[dtype] * max(1.0, two.abs().max())
        sums = torch.ops.megatron.column_sums(x)
        assert len(sums) <= 2 and sums.dtype == torch.float32
        torch.testing.assert_close(sums.sum(0).double(), x.double().sum(0), rtol=1e-4, atol=1e-3)


def split_losses(parts: list[torch.Tensor], **options) -> list[torch.Tensor]:
    """`parallel_cross_entropy` of each rank. Its second reduction depends on the result of the
    first, so forward runs until both are known."""
    known: dict[str, torch.Tensor] = {}
    for op in ("max", "sum", "none"):
        seen = []

        def reduce(x: torch.Tensor, axis: SimpleNamespace, kind: str, seen=seen, op=op):
            if kind == op:
                seen.append(x)
            return known[kind].clone() if kind in known else x

        losses = [
            split_cross_entropy.parallel_cross_entropy(
                part, tp=SimpleNamespace(size=len(parts), rank=rank), reduce=reduce, **options
            )
            for rank, part in enumerate(parts)
        ]
        if seen:
            known[op] = torch.stack(seen).amax(0) if op == "max" else torch.stack(seen).sum(0)
    return losses


def losses(dtype: torch.dtype) -> None:
    """Several blocks and one, odd widths, ranks of padding alone, masked logits, ignored tokens."""
    rows = 6
    weights = torch.randn(rows).where(torch.arange(rows) != 2, 0)
    for (width, vocab), smoothing in (((4124, 4101), 0.0), ((4160, 4160), 0.1), ((64, 33), 0.0)):
        logits = (3 * torch.randn(rows, width)).to(dtype)
        logits[1] += 100
        if not smoothing:
            logits[3, : width // 2] = -torch.inf  # all of the first rank
            logits[4, width // 2 :: 3] = -torch.inf
        logits[:, vocab:] = 1000
        labels = vocab - 1 - 2 * torch.arange(rows)
        labels[0] = 0
        labels[5] = logits[5, :vocab].argmax()
        logits[range(rows), labels] = logits[range(rows), labels].clamp(min=-9)
        wide = logits.double().requires_grad_()
        wanted = F.cross_entropy(
            wide[:, :vocab], labels, reduction="none", label_smoothing=smoothing
        )
        wanted_grad = torch.autograd.grad(wanted, wide, weights.double())[0]
        unsmoothed = F.cross_entropy(wide[:, :vocab], labels, reduction="none")
        for ranks in (1, 2, 4) if dtype == torch.float32 and not smoothing else (2,):
            outputs = cross_entropy.RowOutputs(
                torch.empty(rows, dtype=torch.bool), torch.empty(rows)
            )
            options = {
                "labels": labels,
                "vocab_size": vocab,
                "smoothing": smoothing,
                "outputs": outputs,
            }
            parts = [t.contiguous().requires_grad_() for t in logits.chunk(ranks, 1)]
            read = [t * 1 for t in parts]
            found = (
                split_losses(read, **options)
                if ranks > 1
                else [cross_entropy.cross_entropy(read[0], **options)]
            )
            grad = torch.autograd.grad(found, read, [weights] * ranks)
            near = {"rtol": 2e-5, "atol": 2e-5}
            for loss in found:
                torch.testing.assert_close(loss.double(), wanted, **near)
            torch.testing.assert_close(outputs.unsmoothed.double(), unsmoothed, **near)
            first = logits[range(rows), labels] == logits[:, :vocab].amax(1)
            assert torch.equal(outputs.correct, first) and first[5]
            unit = max(torch.finfo(dtype).eps, 2e-5)  # the interpreter truncates
            near = {"rtol": unit, "atol": 1e-6}
            torch.testing.assert_close(torch.cat(grad, 1).double(), wanted_grad, **near)
            assert all(read[r].data_ptr() == grad[r].data_ptr() for r in range(ranks))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))


def fp8_scales(amax: float) -> None:
    for given in (None, torch.tensor(37.0)):
        args = torch.tensor(amax), given, 448.0
        torch.testing.assert_close(
            torch.ops.megatron.fp8_scale(*args),
            tuple(fp8.scale_of(*args)),
            rtol=0,
            atol=0,
            equal_nan=True,
        )


def fp8_casts(shape: tuple[int, ...], x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Numbers of the format, with a scale that leaves them so: the instruction rounds, and the
    interpreter rounds wrongly, and loses NaN. And numbers beyond it."""
    scale = torch.tensor(0.25)
    x = fp8.quantize(torch.randn(shape) * 20, dtype, torch.tensor(1.0)).to(x_dtype) * 4
    beyond = 32768.0 if x_dtype == torch.float16 else 1e6
    x[..., 0, 1] = beyond
    x[..., -1, -1] = -beyond
    for one in (x, x.mT.contiguous().mT):
        wanted = fp8.cast(one, dtype, fp8.TensorScale(scale, scale))
        for rows, columns in ((True, True), (True, False), (False, True)):
            found = torch.ops.megatron.fp8_cast(one, scale, dtype, rows, columns)
            for got, expected, there in zip(found, wanted, (rows, columns), strict=False):
                if there:
                    same_bits(got, expected)
                else:
                    assert got.numel() == 0


def fp8_maxima(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20000).to(dtype)
    x[1, 777] = -9
    for worst in (None, -torch.inf, torch.nan):
        if worst is not None:
            x[2, 19990] = worst
        amax = torch.zeros(())
        torch.ops.megatron.fp8_amax_(amax, x)
        assert torch.equal(amax.nan_to_num(-1), fp8.largest_magnitude(x).nan_to_num(-1))


def fp8_kernels() -> None:
    for operation, run in fp8_triton.RUNS.items():
        fp8_ops.LIBRARY.impl(operation, run, "CPU")
    for amax in (0.0, 1e-44, 1e-38, 13.6875, 3e38, float("inf"), float("nan")):
        fp8_scales(amax)
    for x_dtype in TOLERANCE:
        fp8_maxima(x_dtype)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            fp8_casts((144, 272), x_dtype, dtype)
            fp8_casts((2, 48, 16), x_dtype, dtype)


if __name__ == "__main__":
    torch.manual_seed(1)
    for name, run in triton_kernels.RUNS.items():
        loss_ops.LIBRARY.impl(name, run, "CPU")
    for module in (cross_entropy, split_cross_entropy):
        module.one_pass = lambda *_: loss_ops
    for dtype in TOLERANCE:
        swiglu(dtype)
        sums_of_copies(dtype)
        if dtype != torch.bfloat16:  # whose bits the interpreter multiplies as integers
            grouped_products(dtype)
        rotary(dtype)
        moves(dtype)
        dropout(dtype)
        masks(dtype)
        norms(dtype)
    for dtype in (torch.float32, torch.bfloat16):  # they load either, and fp16, into fp32
        losses(dtype)
    fp8_kernels()
