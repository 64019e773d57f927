"""Gated delta nets: the rule in chunks by its recurrence in fp64, documents, a whole layer by its
formula, the state that generation keeps, what the flags refuse."""

import math
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from megatron.arguments import config_from
from megatron.config.muon import MuonConfig
from megatron.config.plan.costs import MicroBatchSizes
from megatron.config.plan.muon_matrices import stacks
from megatron.config.plan.parameters import parameter_table
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config
from megatron.inference.cached_model import CachedModel
from megatron.inference.engine import Engine, Request
from megatron.inference.sampling import Sampling
from megatron.kernels.delta_rule import CHUNK, _by_fla, _in_chunks, causal_conv
from megatron.kernels.select import kernel_table
from megatron.model.blocks.module import LayerInputs
from tests.core.config.checks.checked_flags import BASE, checked
from tests.core.model.tiny import DEFAULTS, loss_and_grads, tiny_config, tiny_model, tokens
from tests.live_memory import LiveMemory
from tests.problems import assert_problem

KEYS, VALUES, KEY, VALUE, TAPS, HIDDEN = 2, 4, 6, 5, 4, 32
SIZES = dict(
    experimental_attention_variant="gated_delta_net",
    linear_num_key_heads=KEYS,
    linear_num_value_heads=VALUES,
    linear_key_head_dim=KEY,
    linear_value_head_dim=VALUE,
    linear_conv_kernel_dim=TAPS,
    normalization="RMSNorm",
    add_bias_linear=False,
    position_embedding_type="rope",
)
HYBRID = SIZES | dict(linear_attention_freq="2")  # layers 0 and 2 of 3
ALL = SIZES | dict(linear_attention_freq="[1,1,1]")


def draw(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def problem(s: int, b: int = 2, keys: int = 2, values: int = 4, d: int = 6, e: int = 5):
    """q, k, v, g, beta as the rule takes them; decays from next to none to almost all."""
    g = -torch.exp(3 * draw(b, s, values, seed=4) - 2)
    q, k, v = draw(b, s, keys, d, seed=5), draw(b, s, keys, d, seed=6), draw(b, s, values, e)
    return [t.requires_grad_() for t in (q, k, v, g, draw(b, s, values, seed=7).sigmoid())]


def recurrence(q, k, v, g, beta, document_ids=None, state=None):
    """Token by token, as in the paper: S = a S (I - beta k k^T) + beta v k^T, of each head."""
    (b, s, n, d), (m, e) = q.shape, v.shape[2:]
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(m // n, 2) for t in (q, k))
    S = torch.zeros(b, m, e, d, dtype=q.dtype) if state is None else state.flatten(1, 2).mT
    rows = []
    for t in range(s):
        if document_ids is not None and t:
            same = document_ids[:, t] == document_ids[:, t - 1]
            S = S * same.view(b, 1, 1, 1)
        write = beta[:, t, :, None, None]
        erased = torch.eye(d, dtype=q.dtype) - write * k[:, t, :, :, None] * k[:, t, :, None]
        S = g[:, t, :, None, None].exp() * S @ erased
        S = S + write * v[:, t, :, :, None] * k[:, t, :, None]
        rows.append((S @ q[:, t, :, :, None]).squeeze(-1) / math.sqrt(d))
    return torch.stack(rows, 1), S.mT.unflatten(1, (n, m // n))


def ids_of(*borders: int, s: int) -> torch.Tensor:
    """Two samples of documents; the second's begin 3 tokens later."""
    positions = torch.arange(s)
    ends = torch.tensor(borders).unsqueeze(1)
    return torch.stack([(positions >= ends + shift).sum(0) for shift in (0, 3)])


LENGTHS = {
    "1": (1, None),
    "odd": (37, None),
    "a chunk": (CHUNK, None),
    "a chunk and one": (CHUNK + 1, None),
    "documents": (29, (1, 2, 11, 20)),
    "documents over chunks": (2 * CHUNK + 21, (5, CHUNK - 3, CHUNK, CHUNK + 40, 2 * CHUNK)),
    "a document of chunks": (2 * CHUNK + 7, (9, 2 * CHUNK + 2)),
}


@pytest.mark.parametrize(("s", "borders"), LENGTHS.values(), ids=LENGTHS)
def test_chunks_are_the_recurrence(s, borders):
    """Values, the last state and all gradients, from a state before the first token too."""
    inputs = problem(s)
    ids = None if borders is None else ids_of(*borders, s=s)
    state = None if borders else draw(2, 2, 2, 6, 5, seed=8).requires_grad_()
    y, last = _in_chunks(*inputs, ids, state)
    want, want_last = recurrence(*inputs, ids, state)
    torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-10)
    of = inputs + ([] if state is None else [state])
    into = draw(*y.shape, seed=9)
    outputs, sums = [y], [into]
    if borders is None:
        torch.testing.assert_close(last, want_last, rtol=1e-10, atol=1e-10)
        outputs, sums = [y, last], [into, draw(*last.shape, seed=10)]
        wanted = torch.autograd.grad([want, want_last], of, sums)
    else:
        wanted = torch.autograd.grad([want], of, sums)
    for got, expected in zip(torch.autograd.grad(outputs, of, sums), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_heads_and_strong_decays():
    """As many value heads as key heads, one key head, and decays whose products vanish."""
    for keys, values in ((3, 3), (1, 4)):
        inputs = problem(70, keys=keys, values=values)
        torch.testing.assert_close(
            _in_chunks(*inputs)[0], recurrence(*inputs)[0], rtol=1e-10, atol=1e-10
        )
    q, k, v, g, beta = problem(70)
    y, state = _in_chunks(q, k, v, 300 * g, beta)
    torch.testing.assert_close(y, recurrence(q, k, v, 300 * g, beta)[0], rtol=1e-10, atol=1e-10)
    assert all(t.isfinite().all() for t in torch.autograd.grad(y.sum() + state.sum(), (q, k, g)))


def by_formula(net: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """x [s, b, h] -> the same, with the convolution as loops."""
    p = {name: value.detach() for name, value in net.named_parameters()}
    r = VALUES // KEYS
    rows = (x @ p["in_proj.weight"].T).transpose(0, 1).unflatten(-1, (KEYS, -1))
    parts = rows.split((KEY, KEY, r * VALUE, r * VALUE, r, r), -1)
    mixed = torch.cat(parts[:3], -1).flatten(2)
    conv = torch.zeros_like(mixed)
    for sample in range(mixed.shape[0]):
        for t in range(mixed.shape[1]):
            for back in range(min(TAPS, t + 1)):
                if ids is None or ids[sample, t] == ids[sample, t - back]:
                    weight = p["conv1d.weight"][:, TAPS - 1 - back]
                    conv[sample, t] += weight * mixed[sample, t - back]
    q, k, v = F.silu(conv).unflatten(-1, (KEYS, -1)).split((KEY, KEY, r * VALUE), -1)
    v, z = (t.reshape(*v.shape[:2], VALUES, VALUE) for t in (v, parts[3]))
    b, a = (t.reshape(*v.shape[:2], VALUES) for t in parts[4:])
    g = -p["A_log"].exp() * F.softplus(a + p["dt_bias"])
    y, _ = recurrence(q, k, v, g, b.sigmoid(), ids)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * p["out_norm.weight"]
    return ((y * F.silu(z)).flatten(2) @ p["out_proj.weight"].T).transpose(0, 1)


@pytest.mark.parametrize("borders", [None, (1, 3, 8)], ids=["one document", "documents"])
def test_a_layer_by_its_formula(borders):
    model = tiny_model(torch.float64, scramble=True, apply_layernorm_1p=True, **HYBRID)
    ids = None if borders is None else ids_of(*borders, s=13)
    net = model.decoder.layers["0"].self_attention
    x = draw(13, 2, HIDDEN)
    got = net(x, LayerInputs(document_ids=ids), {})
    torch.testing.assert_close(got, by_formula(net, x, ids), rtol=1e-10, atol=1e-12)
    assert hasattr(model.decoder.layers["1"].self_attention, "linear_qkv")


def test_documents_do_not_see_each_other():
    """Neither by the convolution nor by the state; only roundings differ."""
    ids = ids_of(6, s=16)
    model = tiny_model(torch.float64, scramble=True, **ALL)
    text, _ = tokens()
    other = torch.where(ids == 0, (text + 1) % 50, text)
    with torch.no_grad():
        first, second = (model(t, document_ids=ids) for t in (text, other))
    torch.testing.assert_close(first[ids == 1], second[ids == 1], rtol=0, atol=1e-13)
    x = draw(16, 2, HIDDEN).requires_grad_()
    y = model.decoder.layers["0"].self_attention(x, LayerInputs(document_ids=ids), {})
    (grad,) = torch.autograd.grad(y.transpose(0, 1)[ids == 1].square().sum(), x)
    assert grad.transpose(0, 1)[ids == 0].abs().max() < 1e-13 < grad.abs().max()


def stand_in(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    """flash-linear-attention's chunk_gated_delta_rule, by the recurrence; states by value head."""
    assert scale is None and use_qk_l2norm_in_kernel and output_final_state
    assert len({t.dtype for t in (q, k, v, beta)}) == 1 and g.dtype in (
        torch.float32,
        torch.float64,
    )
    assert q.shape[2] == v.shape[2] and (cu_seqlens is None or (len(q) == 1 and cu_seqlens[0] == 0))
    ids = None
    if cu_seqlens is not None:
        ids = (torch.arange(q.shape[1]) >= cu_seqlens[1:, None]).sum(0).unsqueeze(0)
    state = None if initial_state is None else initial_state.unsqueeze(2)
    y, last = recurrence(q, k, v, g, beta, ids, state)
    return y, last.squeeze(2)


@pytest.mark.parametrize("borders", [None, (0, 5, 20)], ids=["a state", "documents"])
def test_flash_linear_attention_is_asked_for_the_same(borders, monkeypatch):
    name = "fla.ops.gated_delta_rule"
    for module in ("fla", "fla.ops", name):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    sys.modules[name].chunk_gated_delta_rule = stand_in
    inputs = problem(29)
    ids = None if borders is None else ids_of(*borders, s=29)
    state = None if borders else draw(2, 2, 2, 6, 5, seed=8)
    for got, want in zip(
        _by_fla(*inputs, ids, state), _in_chunks(*inputs, ids, state), strict=True
    ):
        if borders is None or got is not None and got.dim() == 4:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("taps", [1, 2, 5])
def test_the_convolution_is_torchs(taps):
    """In bf16 its sums are fp32: rounded once."""
    x, weight = draw(2, 11, 6), draw(6, taps, seed=4)
    rows = F.pad(x, (0, 0, taps - 1, 0))
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.bfloat16, 8e-3)):
        got = causal_conv(rows.to(dtype), weight.to(dtype))
        conv = F.conv1d(
            rows.to(dtype).double().mT, weight.to(dtype).double().unsqueeze(1), groups=6
        )
        assert got.dtype == dtype
        want = F.silu(conv).mT
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance / 8)


def test_generation_from_a_state():
    """Equal to the full pass: prompts of unequal lengths, more of them, single tokens; what a call
    read is read again; a row begins anew."""
    model = tiny_model(torch.float64, scramble=True, **HYBRID)
    ids, _ = tokens()
    with torch.no_grad():
        expected = model(ids)
    cached = CachedModel(model, 3, 16)
    assert cached.forward([[7, 8, 9]], [0], row=1).isfinite().all()  # of another text
    got = cached.forward([ids[0, :2].tolist(), ids[1, :5].tolist()], [0, 0])
    torch.testing.assert_close(got, torch.stack((expected[0, 1], expected[1, 4])))
    got = cached.forward([ids[0, 2:7].tolist(), ids[1, 5:7].tolist()], [2, 5])
    torch.testing.assert_close(got, expected[:, 6])
    for n in range(7, 11):
        for _ in range(3):
            got = cached.forward(ids[:, n : n + 1].tolist(), [n, n])
            torch.testing.assert_close(got, expected[:, n])
    cached.move(1, 2, 11)
    got = cached.forward([ids[1, 11:].tolist()], [11], row=2)
    torch.testing.assert_close(got, expected[1:, 15])
    assert cached.forward([[1]], [4]).isnan().all()  # no state of so few tokens is there any more


def test_requests_of_an_engine_do_not_wait_for_each_other():
    """Prompts that are read while others are decoded, and rows that are computed for nothing."""
    long = [int(t) for t in torch.arange(700) * 7 % 50]

    def request(prompt: list[int]) -> Request:
        return Request(prompt, 6, Sampling(temperature=0.0))

    sizes = dict(seq_length=800, max_position_embeddings=800, num_layers=3)
    texts = []
    for rows in (1, 3):
        engine = Engine(tiny_model(torch.float64, scramble=True, **HYBRID | sizes), rows)
        results = {}
        for number, generation, _ in engine.run(map(request, (long[:3], long, long[5:40], [4]))):
            results[number] = generation.tokens
        texts.append(results)
    assert texts[0] == texts[1]


def test_the_state_has_a_size_of_its_own():
    """Bytes of all tokens together: two states and what the convolution sees, fp32."""
    sizes = []
    for length in (16, 4096):
        model = tiny_model(torch.bfloat16, **ALL | dict(max_position_embeddings=length))
        sizes.append(CachedModel(model, 3, length).cache_bytes)
    channels = KEYS * 2 * KEY + VALUES * VALUE
    of_row = VALUES * KEY * VALUE + (TAPS - 1) * channels
    assert sizes == [3 * 3 * 2 * 4 * of_row] * 2


@pytest.mark.campaign
def test_two_thousand_tokens_from_a_state():
    length = 2048
    sizes = dict(seq_length=length, max_position_embeddings=length)
    model = tiny_model(torch.float64, scramble=True, **HYBRID | sizes)
    ids, _ = tokens(length=length)
    with torch.no_grad():
        expected = model(ids)
    cached = CachedModel(model, 2, length)
    worst = (cached.forward(ids[:, :700].tolist(), [0, 0]) - expected[:, 699]).abs().max()
    for n in range(700, length):
        got = cached.forward(ids[:, n : n + 1].tolist(), [n, n])
        worst = max(worst, (got - expected[:, n]).abs().max())
    print(f"2,048 tokens: logits {worst:.1e} of {expected.std():.2f}")
    assert worst < 1e-10


def test_gradients_are_differences():
    """Of a few numbers of each weight, by differences of the loss."""
    model = tiny_model(torch.float64, scramble=True, **HYBRID)
    _, grads = loss_and_grads(model)
    ids, labels = tokens()
    step = 1e-5
    with torch.no_grad():
        for p in model.decoder.layers["2"].self_attention.parameters():
            line = p.view(-1)
            for i in (0, len(line) // 2, len(line) - 1):
                before = line[i].clone()
                losses = []
                for value in (before + step, before - step):
                    line[i] = value
                    losses.append(model(ids, labels=labels).double().mean())
                line[i] = before
                slope = (losses[0] - losses[1]) / (2 * step)
                got = grads[p.sharding.name].view(-1)[i]
                torch.testing.assert_close(got, slope, rtol=1e-5, atol=1e-8)


def test_parameters_and_matrices():
    """Muon's are the parts of in_proj, of all heads, and out_proj; initial values are
    Megatron-LM's."""
    config = tiny_config(**HYBRID)
    table = {
        spec.name.removeprefix("decoder.layers.0.self_attention."): spec
        for spec in parameter_table(config, 64)
        if spec.name.startswith("decoder.layers.0.self_attention.")
    }
    channels = KEYS * 2 * KEY + VALUES * VALUE
    rows = channels + VALUES * VALUE + 2 * VALUES
    assert {name: spec.shape for name, spec in table.items()} == {
        "in_proj.weight": (rows, HIDDEN),
        "conv1d.weight": (channels, TAPS),
        "dt_bias": (VALUES,),
        "A_log": (VALUES,),
        "out_norm.weight": (VALUE,),
        "out_proj.weight": (HIDDEN, VALUES * VALUE),
    }
    matrices = {name: stacks(MuonConfig(), s.matrices, s.shape) for name, s in table.items()}
    assert {name for name, found in matrices.items() if found} == {
        "in_proj.weight",
        "out_proj.weight",
    }
    assert sum(count * a * b for count, a, b in matrices["in_proj.weight"]) == rows * HIDDEN
    net = tiny_model(**HYBRID).decoder.layers["0"].self_attention
    assert net.conv1d["weight"].abs().max() <= 1 / math.sqrt(TAPS)
    assert net.conv1d["weight"].std().item() == pytest.approx(1 / math.sqrt(3 * TAPS), rel=0.1)
    assert (net.A_log > 0).all() and (net.A_log < math.log(16)).all()
    assert (net.dt_bias == 1).all() and (net.out_norm.weight == 1).all()
    assert config.layer(0).mixer.core_flops() == 2 * 4 * VALUES * KEY * VALUE


NAMES = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--normalization RMSNorm"
)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("", None),
        ("--linear-attention-freq [1,0]", None),
        ("--tensor-model-parallel-size 2", None),
        ("--recompute-activations", None),
        ("--mtp-num-layers 1 --position-embedding-type rope", None),
        ("--context-parallel-size 2", "flags-exclude-each-other"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "flags-exclude-each-other"),
        ("--normalization LayerNorm", "flag-needs-other-flag"),
        ("--use-mup", "flags-exclude-each-other"),
        ("--bf16 --fp8-format hybrid", "flags-exclude-each-other"),
        ("--linear-attention-freq [1,1,0]", "value-out-of-range"),
        ("--linear-attention-freq 0", "value-out-of-range"),
        ("--linear-num-value-heads 24", "value-out-of-range"),
        ("--linear-num-key-heads 1 --tensor-model-parallel-size 2", "tensor-parallel-does-not"),
    ],
)
def test_the_flags(flags, code):
    problems, _ = checked(f"{NAMES} {flags}", 2, base=f"{BASE} --min-lr 0 --attention-dropout 0")
    assert bool(problems) == (code is not None), problems
    if code is not None:
        assert any(code in problem for problem in problems), problems


@pytest.mark.parametrize("sizes", [(2, 4, 16, 16), (4, 8, 16, 32), (1, 4, 32, 16)])
def test_the_plan_has_what_backward_makes_again(sizes):
    """Per rank, the rest of a layer aside; within 10 %."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    flags = SIZES | {f"linear_{name}": n for name, n in zip(names, sizes, strict=True)}
    length = 4 * CHUNK
    flags |= dict(linear_attention_freq="[1]", num_layers=1, seq_length=length)
    net = tiny_model(**flags).decoder.layers["0"].self_attention
    rows = torch.randn(length, 1, net.facts.projected, requires_grad=True)
    with LiveMemory() as memory:
        y = net.mix(rows, None)
        y.backward(torch.ones_like(y))
    config = config_from(Config, DEFAULTS | flags | dict(micro_batch_size=1, device="cpu"))
    sizes = MicroBatchSizes(config, make_plan(config, 1, 64))
    planned = net.facts.backward(sizes) - sizes.rows * sizes.hidden * sizes.itemsize
    assert planned == pytest.approx(memory.peak, rel=0.1)


def test_the_table_of_kernels_has_the_rule():
    for flags, rules in ((HYBRID, 2), ({}, 0)):
        config = config_from(Config, DEFAULTS | flags | dict(device="cpu"))
        rows = kernel_table(torch.device("cpu"), torch.float32, config)
        found = [row for row in rows if row.operation == "gated delta rule"]
        assert len(found) == rules and (not rules or [row.on for row in found] == [True, False])


PATTERN = "--hybrid-layer-pattern G-*- --normalization RMSNorm"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("", None),
        ("--linear-key-head-dim 64", None),
        ("--normalization LayerNorm", "flag-needs-other-flag"),
        ("--context-parallel-size 2", "flags-exclude-each-other"),
        ("--linear-attention-freq 2", "flags-exclude-each-other"),
    ],
)
def test_the_letter_of_a_pattern(flags, code):
    base = BASE.replace("--num-layers 2 ", "") + " --min-lr 0 --attention-dropout 0"
    problems, notes = checked(f"{PATTERN} {flags}", 2, base=base)
    assert bool(problems) == (code is not None), problems
    assert not notes and all(code in problem for problem in problems), (problems, notes)


def test_a_pattern_is_the_layers_that_it_names():
    """The same parameters and logits as layers of two blocks have."""
    pattern = {k: v for k, v in HYBRID.items() if "attention" not in k}
    one = tiny_model(torch.float64, scramble=True, **HYBRID)
    flags = pattern | dict(hybrid_layer_pattern="G-*-G-", num_layers=6)
    other = tiny_model(torch.float64, **flags)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    with torch.no_grad():
        for p, q in pairs:
            q.copy_(p)
        ids, _ = tokens()
        torch.testing.assert_close(one(ids), other(ids))


def test_flags_that_need_each_other():
    problems, _ = checked(NAMES.replace("--linear-attention-freq 2", ""), base=BASE)
    assert_problem(problems[0], "flag-needs-other-flag", "--experimental-attention-variant")
    _, notes = checked("--linear-key-head-dim 64", base=BASE)
    assert_problem(
        next(n for n in notes if "linear-key" in n), "flag-has-no-effect", "--linear-key-head-dim"
    )
