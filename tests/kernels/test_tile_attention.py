"""Attention on AMX tiles against the formula in fp64, and where it does not run."""
import sys
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.kernels import tile_attention as module
from megatron.kernels.attention import attention, select_attention
from megatron.kernels.plain import plain_attention

CPU = torch.device("cpu")
needs_amx = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX")


def inputs(s, b, n, g, d, seed=1):
    """q, k and v as views of one fused tensor, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(s, b, g, n // g + 2, d, generator=generator).bfloat16()
    q, k, v = fused.split((n // g, 1, 1), 3)
    q, k, v = (t.detach().requires_grad_() for t in (q.flatten(2, 3), k.squeeze(3), v.squeeze(3)))
    return (q, k, v), torch.randn(b, n, s, d, generator=generator).bfloat16().permute(2, 0, 1, 3)


def results(call, tensors, grad):
    out = call(*tensors)
    return out.detach(), *torch.autograd.grad(out, tensors, grad)


def tiles(q, k, v, scale=0.2):
    return attention(q, k, v, scale=scale, implementation="tiles")


def assert_formula(call, tensors, grad, scale=0.2):
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = results(lambda *t: plain_attention(*t, scale, 0.0, None, None), wide, grad.double())
    for got, wanted in zip(results(call, tensors, grad), exact, strict=True):
        assert got.dtype == torch.bfloat16 and got.shape == wanted.shape
        # Each number is a sum of terms rounded to 8 bits: the error goes with the largest of them.
        largest, wrong = max(1.0, wanted.abs().max().item()), (got.double() - wanted).abs()
        assert wrong.max() < 2**-7 * largest and wrong.mean() < 2**-10 * largest


@needs_amx
@pytest.mark.parametrize("heads, groups, width", [(2, 2, 32), (4, 2, 64), (3, 1, 128), (1, 1, 96)])
@pytest.mark.parametrize("s", [1, 2, 31, 32, 33, 64, 150])
def test_value_and_gradients_are_the_formula(s, heads, groups, width):
    tensors, grad = inputs(s, 2, heads, groups, width)
    assert not tensors[1].is_contiguous() or s == 1
    assert_formula(tiles, tensors, grad)


@needs_amx
def test_long_lines_and_large_scores():
    tensors, grad = inputs(1030, 1, 1, 1, 64)
    assert_formula(tiles, tensors, grad)
    tensors, grad = inputs(70, 1, 2, 1, 64)
    out, *grads = results(lambda *t: tiles(*t, scale=300.0), tensors, grad)
    exact, *_ = results(lambda *t: plain_attention(*t, 300.0, 0.0, None, None), tensors, grad)
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
    assert ((out - exact).abs() < 0.05).float().mean() > 0.97  # one key takes nearly all; ties of rounded scores may differ


@needs_amx
def test_a_later_token_changes_nothing_before_it():
    (q, k, v), _ = inputs(90, 1, 2, 1, 32)
    before = tiles(q, k, v)
    k, v = (torch.cat((t[:50], t[50:] + 1)) for t in (k, v))
    after = tiles(q, k, v)
    assert torch.equal(before[:50], after[:50]) and not torch.equal(before[50:], after[50:])


@needs_amx
def test_threads_strides_and_recompute_change_no_bit(monkeypatch):
    tensors, grad = inputs(100, 3, 4, 2, 64)
    first = results(tiles, tensors, grad)
    plain = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in tensors]
    odd = [t.detach().transpose(0, 3).contiguous().transpose(0, 3).requires_grad_() for t in tensors]
    runs = [results(tiles, plain, grad.contiguous()), results(tiles, odd, grad),
            results(lambda *t: checkpoint(tiles, *t, use_reentrant=False), tensors, grad)]
    for threads in (1, 3, 7):
        monkeypatch.setattr(module.torch, "get_num_threads", lambda threads=threads: threads)
        runs.append(results(tiles, tensors, grad))
    for other in runs:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@needs_amx
def test_it_is_the_choice_for_bf16_and_for_nothing_else(monkeypatch):
    def choice(*asked, head_dim=64, seq_length=256):
        return select_attention(*asked, seq_length=seq_length, head_dim=head_dim)[0]

    assert choice(CPU, torch.bfloat16, 0.0, False) == "tiles"
    others = [choice(CPU, torch.float32, 0.0, False), choice(CPU, torch.float16, 0.0, False),
              choice(CPU, torch.bfloat16, 0.1, False), choice(CPU, torch.bfloat16, 0.0, True),
              choice(torch.device("cuda"), torch.bfloat16, 0.0, False), choice(CPU, torch.bfloat16, 0.0, False, head_dim=40),
              choice(CPU, torch.bfloat16, 0.0, False, seq_length=module.LONGEST + 1)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "tiles" not in [*others, choice(CPU, torch.bfloat16, 0.0, False)]
    with pytest.raises(ValueError, match="'tiles' cannot run: for bf16 on a CPU; use 'auto'"):
        monkeypatch.undo()
        select_attention(CPU, torch.float32, 0.0, False, "tiles")


def test_without_amx_or_the_build_there_is_a_reason(monkeypatch):
    load = module._load.__wrapped__
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert "needs AMX" in load()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    stand_in = types.SimpleNamespace(INTERFACE=module.INTERFACE, tiles_are_there=lambda: False)
    monkeypatch.setattr("megatron.kernels.tiles_cpp", stand_in, raising=False)
    monkeypatch.setitem(sys.modules, "megatron.kernels.tiles_cpp", stand_in)
    assert "no leave" in load()
    stand_in.INTERFACE = 0
    assert "another version" in load()
    monkeypatch.delattr("megatron.kernels.tiles_cpp")
    monkeypatch.setitem(sys.modules, "megatron.kernels.tiles_cpp", None)
    assert "is not built" in load()


@needs_amx
def test_a_lost_scale_is_seen(monkeypatch):
    tensors, grad = inputs(40, 1, 2, 2, 32)
    with pytest.raises(AssertionError):
        assert_formula(lambda *t: tiles(*t, scale=0.22), tensors, grad)
