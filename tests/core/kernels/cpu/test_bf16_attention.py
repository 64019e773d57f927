"""Attention in C++ against the formula in fp64: documents, dropout and its masks, and where it does
not run."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.kernels.cpu import bf16_attention as module
from tests.core.kernels.attend import attention, plain_attention, select_attention
from tests.core.kernels.attention_formula import SCALE, formula

CPU = torch.device("cpu")
HERE = Path(__file__).resolve().parent
LOADED = module._load()
REASON = module.unavailable_reason(32, 8)
needs_kernel = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(params=["AVX512_BF16", "AMX"])
def kernel(request, monkeypatch):
    """The C++ with either way to multiply, where the processor has it."""
    if REASON:
        pytest.skip(REASON)
    if request.param == "AMX" and not LOADED.amx:
        pytest.skip("needs a CPU with AMX")
    monkeypatch.setattr(module, "_load", lambda: LOADED._replace(amx=request.param == "AMX"))


def inputs(s, b, n, g, d, seed=1):
    """q, k and v as views of one fused tensor, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(s, b, g, n // g + 2, d, generator=generator).bfloat16()
    q, k, v = fused.split((n // g, 1, 1), 3)
    q *= 0.5  # scores of about 1 to 2
    q, k, v = (t.detach().requires_grad_() for t in (q.flatten(2, 3), k.squeeze(3), v.squeeze(3)))
    return (q, k, v), torch.randn(b, n, s, d, generator=generator).bfloat16().permute(2, 0, 1, 3)


def documents(s: int, b: int, lengths=(1, 31, 33, 2, 64, 5)) -> torch.Tensor:
    """Runs of ids that neither rise nor are consecutive; each sample begins at another of the
    lengths."""
    rows = []
    for sample in range(b):
        runs = [lengths[(sample + i) % len(lengths)] for i in range(s)]
        ids = torch.tensor([(7 * i + 3) % 1009 for i in range(s)])
        rows.append(ids.repeat_interleave(torch.tensor(runs))[:s])
    return torch.stack(rows)


def results(call, tensors, grad):
    out = call(*tensors)
    return out.detach(), *torch.autograd.grad(out, tensors, grad)


def tiles(q, k, v, scale=SCALE, **options):
    return attention(q, k, v, scale=scale, implementation="cpp_bf16", **options)


def assert_near(call, reference, tensors, grad):
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = results(reference, wide, grad.double())
    for got, wanted in zip(results(call, tensors, grad), exact, strict=True):
        assert got.dtype == torch.bfloat16 and got.shape == wanted.shape
        # Each number is a sum of terms rounded to 8 bits: the error goes with the largest of them.
        largest = max(1.0, wanted.abs().max().item())
        wrong = (got.double() - wanted).abs()
        assert wrong.max() < 2**-6 * largest and wrong.mean() < 2**-10 * largest


@pytest.mark.parametrize("heads, groups, width", [(2, 2, 32), (4, 2, 64), (3, 1, 128), (1, 1, 96)])
@pytest.mark.parametrize("s", [1, 2, 31, 32, 33, 64, 150])
def test_value_and_gradients_are_the_formula(kernel, s, heads, groups, width):
    tensors, grad = inputs(s, 2, heads, groups, width)
    assert not tensors[1].is_contiguous() or s == 1
    assert_near(tiles, formula, tensors, grad)


def test_long_lines_and_large_scores(kernel):
    tensors, grad = inputs(1030, 1, 1, 1, 64)
    assert_near(tiles, formula, tensors, grad)
    tensors, grad = inputs(70, 1, 2, 1, 64)
    out, *grads = results(lambda *t: tiles(*t, scale=300.0), tensors, grad)
    exact, *_ = results(lambda *t: plain_attention(*t, 300.0, 0.0, None, None), tensors, grad)
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
    # one key takes nearly all; ties of rounded scores may differ
    assert ((out - exact).abs() < 0.05).float().mean() > 0.97


@pytest.mark.parametrize("heads, groups, width", [(4, 2, 32), (2, 2, 64), (3, 1, 160)])
@pytest.mark.parametrize("s", [1, 33, 64, 150, 260])
def test_document_masks_are_the_formula(kernel, s, heads, groups, width):
    tensors, grad = inputs(s, 2, heads, groups, width)
    ids = documents(s, 2)
    assert_near(lambda *t: tiles(*t, document_ids=ids), lambda *t: formula(*t, ids), tensors, grad)


def test_blocks_of_other_documents_are_not_computed(kernel):
    tensors, grad = inputs(256, 1, 2, 1, 32)
    ids = (torch.arange(256) // 64).view(1, 256)
    whole = results(lambda *t: tiles(*t, document_ids=ids), tensors, grad)
    spoilt = []
    for t in (*tensors, grad):
        spoilt.append(t.detach().clone())
        spoilt[-1][:64], spoilt[-1][192:] = torch.nan, torch.nan
    *spoilt, grad = spoilt
    found = results(
        lambda *t: tiles(*t, document_ids=ids), [t.requires_grad_() for t in spoilt], grad
    )
    for one, two in zip(whole, found, strict=True):
        assert torch.equal(one[64:192], two[64:192])


def test_an_id_that_returns_is_one_document_still():
    tensors, grad = inputs(100, 2, 2, 1, 32)
    ids = documents(100, 2)
    ids[1, -7:] = ids[1, 0]
    assert_near(
        lambda *t: attention(*t, scale=SCALE, document_ids=ids),
        lambda *t: formula(*t, ids),
        tensors,
        grad,
    )


def test_an_id_that_returns_is_one_document(kernel):
    tensors, grad = inputs(8, 1, 1, 1, 32)
    ids = torch.tensor([[1, 1, 2, 2, 1, 1, 3, 3]])
    assert_near(lambda *t: tiles(*t, document_ids=ids), lambda *t: formula(*t, ids), tensors, grad)


@pytest.mark.parametrize("p", [0.1, 0.6])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "s, heads, groups, width", [(9, 1, 1, 32), (45, 4, 2, 32), (150, 2, 1, 64), (97, 1, 1, 256)]
)
def test_dropout_is_the_formula_with_its_mask(kernel, s, heads, groups, width, masked, p):
    tensors, grad = inputs(s, 2, heads, groups, width)
    options = {
        "dropout_p": p,
        "dropout_seed": 2**40 + 17,
        "document_ids": documents(s, 2) if masked else None,
    }
    factors = module.keep_mask(s, 2, heads, p, options["dropout_seed"]).double() / (1.0 - p)
    assert_near(
        lambda *t: tiles(*t, **options),
        lambda *t: formula(*t, options["document_ids"], factors),
        tensors,
        grad,
    )
    with pytest.raises(AssertionError):
        assert_near(
            lambda *t: tiles(*t, **options | {"dropout_seed": 18}),
            lambda *t: formula(*t, options["document_ids"], factors),
            tensors,
            grad,
        )


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "dropout_seed": 4}])
def test_threads_strides_and_recompute_change_no_bit(kernel, monkeypatch, options):
    tensors, grad = inputs(100, 3, 4, 2, 64)
    call = lambda *t: tiles(*t, document_ids=documents(100, 3), **options)  # noqa: E731
    first = results(call, tensors, grad)
    plain = [
        t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in tensors
    ]
    odd = [
        t.detach().transpose(0, 3).contiguous().transpose(0, 3).requires_grad_() for t in tensors
    ]
    runs = [
        results(call, plain, grad.contiguous()),
        results(call, odd, grad),
        results(lambda *t: checkpoint(call, *t, use_reentrant=False), tensors, grad),
    ]
    for threads in (1, 3, 7):
        monkeypatch.setattr(module.torch, "get_num_threads", lambda threads=threads: threads)
        runs.append(results(call, tensors, grad))
    for other in runs:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def philox(counter, key, rounds):
    """Philox 4x32 with integers."""
    c = list(counter)
    k = list(key)
    for _ in range(rounds):
        one = 0xD2511F53 * c[0]
        two = 0xCD9E8D57 * c[2]
        c = [two >> 32 ^ c[1] ^ k[0], two % 2**32, one >> 32 ^ c[3] ^ k[1], one % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@needs_kernel
@pytest.mark.parametrize("p", [0.3, 2**-20, 1 - 2**-16])
def test_the_mask_is_philox_of_head_query_and_key(p):
    # as its authors publish
    assert philox([0] * 4, [0] * 2, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    s = 35
    b = 2
    n = 3
    seed = 0xFEDCBA9876543210
    key = (seed % 2**32, seed >> 32)
    wanted = torch.empty(b * n, s, s, dtype=torch.bool)
    for head in range(b * n):
        for query in range(s):
            below = (round((1 - p) * 2**48) + philox((query, 0, head, 1), key, 7)[0]) >> 32
            for group in range(0, s, 8):
                words = philox((query, group // 8, head, 0), key, 7)
                bits = [half for word in words for half in (word % 2**16, word >> 16)]
                for i, value in enumerate(bits[: s - group]):
                    wanted[head, query, group + i] = value < below
    assert torch.equal(module.keep_mask(s, b, n, p, seed), wanted.view(b, n, s, s))


def test_it_is_the_choice_for_bf16_and_for_nothing_else(kernel, monkeypatch):
    def choice(*asked, head_dim=64, seq_length=256):
        return select_attention(*asked, seq_length=seq_length, head_dim=head_dim)[0]

    for asked in ((0.0, False), (0.1, False), (0.0, True), (0.1, True)):
        assert choice(CPU, torch.bfloat16, *asked) == "cpp_bf16"
    others = [
        choice(CPU, torch.float32, 0.0, False),
        choice(CPU, torch.float16, 0.0, False),
        choice(torch.device("cuda"), torch.bfloat16, 0.0, False),
        choice(CPU, torch.bfloat16, 0.0, False, head_dim=40),
        choice(CPU, torch.bfloat16, 0.0, False, seq_length=module.LONGEST + 1),
    ]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "cpp_bf16" not in [*others, choice(CPU, torch.bfloat16, 0.0, False)]
    with pytest.raises(ValueError, match="'cpp_bf16'"):
        monkeypatch.undo()
        select_attention(CPU, torch.float32, 0.0, False, "cpp_bf16")


@needs_kernel
def test_dropout_without_a_seed_is_refused():
    (q, k, v), _ = inputs(8, 1, 1, 1, 32)
    with pytest.raises(ValueError, match="needs dropout_seed"):
        tiles(q, k, v, dropout_p=0.1)


def test_where_it_cannot_run_there_is_a_reason(monkeypatch):
    load = module._load.__wrapped__
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert "AVX512_BF16" in load()
    stand_in = types.SimpleNamespace(INTERFACE=module.INTERFACE, tiles_are_there=lambda: True)
    monkeypatch.setattr("megatron.kernels.cpu.bf16_attention_cpp", stand_in, raising=False)
    monkeypatch.setitem(sys.modules, "megatron.kernels.cpu.bf16_attention_cpp", stand_in)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert load() == (stand_in, False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert load() == (stand_in, True)
    stand_in.tiles_are_there = lambda: False  # the system does not let the process use AMX
    assert load() == (stand_in, False)
    stand_in.INTERFACE = 0
    assert isinstance(load(), str)
    monkeypatch.delattr("megatron.kernels.cpu.bf16_attention_cpp")
    monkeypatch.setitem(sys.modules, "megatron.kernels.cpu.bf16_attention_cpp", None)
    assert isinstance(load(), str)


@pytest.mark.campaign
@needs_kernel
def test_the_code_for_amx_is_the_formula_with_emulated_tiles(tmp_path, monkeypatch):
    pybind11 = pytest.importorskip("pybind11")
    compiler = shutil.which("g++") or pytest.skip("needs a C++ compiler")
    target = tmp_path / f"bf16_attention_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = [
        "-O2",
        "-march=x86-64-v4",
        "-mavx512bf16",
        "-mamx-tile",
        "-mamx-bf16",
        "-Wno-psabi",
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{pybind11.get_include()}",
        f"-I{sysconfig.get_paths()['include']}",
    ]
    subprocess.run(
        [
            compiler,
            *flags,
            "-include",
            str(HERE / "emulated_tiles.h"),
            "-o",
            str(target),
            str(Path(module.__file__).with_name("bf16_attention.cpp")),
        ],
        check=True,
    )
    spec = importlib.util.spec_from_file_location("bf16_attention_cpp", target)
    emulated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulated)
    tensors, grad = inputs(150, 2, 4, 2, 64)
    ids = documents(150, 2)
    factors = module.keep_mask(150, 2, 4, 0.2, 6).double() / 0.8
    monkeypatch.setattr(module, "_load", lambda: module._Kernel(emulated, True))
    assert_near(tiles, formula, tensors, grad)
    assert_near(
        lambda *t: tiles(*t, document_ids=ids, dropout_p=0.2, dropout_seed=6),
        lambda *t: formula(*t, ids, factors),
        tensors,
        grad,
    )
