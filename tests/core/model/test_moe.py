"""Experts, routers and their losses on one rank, against plain formulas."""

import pytest
import torch
from torch.nn.functional import grouped_mm

from megatron.config.moe import parse_layer_pattern
from megatron.kernels import grouped_linear as kernels
from megatron.kernels.cuda import fused_ops  # noqa: F401 (defines the operations)
from megatron.kernels.dropout import jitter
from megatron.kernels.grouped_linear import grouped_linear
from megatron.model.blocks.module import LayerInputs, Recompute
from megatron.model.blocks.moe.module import RouterStep, random_logits
from megatron.parallel.random import DropoutSeeds
from tests.core.model.tiny import tiny_model, tokens

FLAGS = dict(
    num_experts=5,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    swiglu=True,
    add_bias_linear=False,
    moe_aux_loss_coeff=(0.1,),
    moe_z_loss_coeff=0.01,
)


def test_a_layer_equals_a_loop_over_tokens():
    """Each token is computed by its experts alone, weighted by their probabilities."""
    layer = tiny_model(torch.float64, scramble=True, **FLAGS).decoder.layers["1"].mlp
    x = torch.randn(7, 2, 32, dtype=torch.float64)
    probs, experts = layer.router(x)
    rows = []
    for token, weights, numbers in zip(x.flatten(0, 1), probs, experts, strict=True):
        y = 0
        for p, e in zip(weights, numbers, strict=True):
            gate, up = layer.experts.linear_fc1.weight[e] @ token
            y = y + p * layer.experts.linear_fc2.weight[e] @ (torch.nn.functional.silu(gate) * up)
        rows.append(y)
    assert probs.sum(-1).allclose(torch.ones(14, dtype=torch.float64))
    torch.testing.assert_close(layer(x, LayerInputs(), {}), torch.stack(rows).view_as(x))


def clamped(gate, up):
    gate, up = gate.clamp(max=0.1), up.clamp(-0.1, 0.1) + 1
    return gate * torch.sigmoid(1.702 * gate) * up


@pytest.mark.parametrize("groups_on_device", [False, True])
def test_biases_of_router_and_experts(groups_on_device, monkeypatch):
    """gpt-oss' layer: a softmax over the selected experts, whose bias chooses with; each result
    with its bias is weighted."""
    flags = FLAGS | dict(swiglu=False, quick_geglu=True, activation_func_clamp_value=0.1)
    flags |= dict(glu_linear_offset=1.0, add_mlp_bias=True)
    layer = tiny_model(torch.float64, scramble=True, **flags).decoder.layers["1"].mlp
    layer.router.bias.data *= 10
    x = torch.randn(7, 2, 32, dtype=torch.float64)
    probs, experts = layer.router(x)
    one, two = layer.experts.linear_fc1, layer.experts.linear_fc2
    rows = []
    for token in x.flatten(0, 1):
        logits = layer.router.weight @ token + layer.router.bias
        best = logits.topk(2)
        y = 0
        for p, e in zip(best.values.softmax(0), best.indices, strict=True):
            gate, up = one.weight[e] @ token + one.bias[e]
            y = y + p * (two.weight[e] @ clamped(gate, up) + two.bias[e])
        rows.append(y)
    wanted = torch.stack(rows).view_as(x)
    assert not torch.equal(experts, (x.flatten(0, 1) @ layer.router.weight.t()).topk(2).indices)
    if groups_on_device:

        def compute(self, gemms, x, counts, of=None, to=None):
            host = counts.diff(prepend=counts.new_zeros(1)).tolist()
            return gemms.grouped_linear(x, self.weight.flatten(1, -2), host, of=of, to=to)

        monkeypatch.setattr(type(one), "compute", compute)
        one.in_one_call = two.in_one_call = True
    result = layer(x, LayerInputs(), {})
    torch.testing.assert_close(result, wanted)
    moved = list(layer.parameters())
    grad = torch.randn_like(result)
    for got, expected in zip(
        torch.autograd.grad(result, moved, grad),
        torch.autograd.grad(wanted, moved, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("topk", [1, 2])
def test_square_roots_of_softplus_as_scores(topk):
    """Probabilities and the load-balancing loss by their formulas: sqrt(log(1 + exp(logit))),
    divided by their sum, the bias in the selection alone."""
    flags = dict(
        moe_router_score_function="sqrtsoftplus",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=1.5,
        moe_router_topk=topk,
    )
    model = tiny_model(torch.float64, scramble=True, **FLAGS | flags)
    router = model.decoder.layers["1"].mlp.router
    router.expert_bias.data = torch.tensor([0.0, 0.7, -0.7, 0.0, 0.3], dtype=torch.float64)
    x = torch.randn(7, 2, 32, dtype=torch.float64)
    step = RouterStep(None, 1.0)
    probs, experts = router(x, step)
    scores = (x.flatten(0, 1) @ router.weight.t()).exp().log1p().sqrt()
    chosen = (scores + router.expert_bias).argsort(descending=True)[:, :topk]
    assert torch.equal(experts, chosen)
    assert not torch.equal(experts, scores.argsort(descending=True)[:, :topk])
    wanted = scores.gather(1, chosen)
    if topk > 1:
        wanted = wanted / wanted.sum(1, keepdim=True)
    torch.testing.assert_close(probs, 1.5 * wanted)
    loads = torch.bincount(scores.topk(topk).indices.flatten(), minlength=5) / (14 * topk)
    loss = 5 * (loads * (scores / scores.sum(1, keepdim=True)).sum(0)).sum()
    torch.testing.assert_close(step.sums[1][0], loss)


@pytest.mark.parametrize("of_group", [None, 1, 2])
@pytest.mark.parametrize(
    "flags",
    [
        dict(moe_router_topk=2),
        dict(moe_router_topk=2, moe_router_pre_softmax=True),
        dict(moe_router_topk=1, moe_router_score_function="sigmoid"),
        dict(moe_router_topk=2, moe_router_score_function="sigmoid"),
    ],
    ids=str,
)
@pytest.mark.parametrize("normalization", ["auto", "always", "never"])
def test_a_selection_by_its_formulas(flags, of_group, normalization):
    """Softmax or sigmoid scores; in the selection with a bias, of the group whose best `of_group`
    count most; divided by their sum or not."""
    flags = flags | dict(
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=2,
        moe_router_group_topk=1,
        moe_router_group_score_topk=of_group,
        moe_router_normalization=normalization,
        num_experts=6,
    )
    router = tiny_model(torch.float64, scramble=True, **FLAGS | flags).decoder.layers["1"].mlp
    router = router.router
    router.expert_bias.data = torch.tensor([0.0, 0.5, -0.5, 0.3, 0.0, 0.3], dtype=torch.float64)
    x = torch.randn(40, 2, 32, dtype=torch.float64)
    probs, experts = router(x)
    topk = flags["moe_router_topk"]
    softmax = "moe_router_score_function" not in flags
    plain = 0
    for token, found, numbers in zip(x.flatten(0, 1), probs, experts, strict=True):
        logits = router.weight @ token
        scores = logits.softmax(0) if softmax else logits.sigmoid()
        biased = (scores + router.expert_bias).tolist()
        sums = [sum(sorted(part)[-(of_group or topk) :]) for part in (biased[:3], biased[3:])]
        first = 3 * (sums[1] > sums[0])
        chosen = sorted(range(first, first + 3), key=lambda e: -biased[e])[:topk]
        assert numbers.tolist() == chosen
        plain += chosen == scores.argsort(descending=True)[:topk].tolist()
        after = softmax and not flags.get("moe_router_pre_softmax")
        divides = {"auto": topk > 1, "always": True, "never": False}[normalization]
        wanted = scores[chosen]
        if after or (divides and not softmax):
            wanted = wanted / wanted.sum()
        torch.testing.assert_close(found, wanted)
    assert plain < 60


def test_dropped_tokens_are_not_computed():
    """The layer is the sum over the experts that are left, with unchanged probabilities; in
    training and its evaluations (a step without a scale), not in inference (without a step)."""
    flags = FLAGS | {"moe_expert_capacity_factor": 0.5}
    layer = tiny_model(torch.float64, scramble=True, **flags).decoder.layers["1"].mlp
    x = torch.randn(7, 2, 32, dtype=torch.float64)
    step = RouterStep(None, None)
    probs, experts = layer.router(x, step)
    assert torch.equal(experts, layer.router(x, RouterStep(None, 1.0))[1]) and not step.sums
    assert torch.bincount(experts.flatten(), minlength=6)[:5].max() == 3  # of 14 2 / 5 0.5
    assert (experts == 5).any() and (layer.router(x)[1] < 5).all()
    rows = []
    for token, weights, numbers in zip(x.flatten(0, 1), probs, experts, strict=True):
        y = torch.zeros(32, dtype=torch.float64)
        for p, e in zip(weights, numbers, strict=True):
            if e < 5:
                gate, up = layer.experts.linear_fc1.weight[e] @ token
                inner = torch.nn.functional.silu(gate) * up
                y = y + p * layer.experts.linear_fc2.weight[e] @ inner
        rows.append(y)
    torch.testing.assert_close(
        layer(x, LayerInputs(router_step=step), {}), torch.stack(rows).view_as(x)
    )


def test_input_jitter_is_a_function_of_the_seed():
    """Of the router's input alone, in training alone."""
    router = tiny_model(moe_input_jitter_eps=0.2, **FLAGS).decoder.layers["1"].mlp.router
    x = torch.randn(7, 2, 32)
    found = [
        router(x, RouterStep(None, 1.0, seeds=DropoutSeeds(3, iteration, 0)))[0]
        for iteration in (1, 1, 2)
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2]) and not torch.equal(found[0], router(x)[0])
    factors = jitter(torch.ones(10000, dtype=torch.float64), 0.2, 7)
    assert 0.8 <= factors.min() < 0.801 and 1.199 < factors.max() <= 1.2
    assert abs(factors.mean() - 1) < 0.005


def test_random_selection_loads_experts_evenly():
    """In training alone; logits get the gradient of the random numbers in their place."""
    flags = {**FLAGS, "num_experts": 8, "moe_router_force_load_balancing": True}
    router = tiny_model(**flags).decoder.layers["1"].mlp.router
    x = torch.randn(1, 1, 32, dtype=router.weight.dtype).expand(4000, 1, 32)
    probs, experts = router(x, RouterStep(None, 1.0, seeds=DropoutSeeds(3, 1, 0)))
    shares = torch.bincount(experts.flatten(), minlength=8) / experts.numel()
    assert (shares - 1 / 8).abs().max() < 0.02
    assert torch.equal(experts, router(x, RouterStep(None, 1.0, seeds=DropoutSeeds(3, 1, 0)))[1])
    assert (router(x)[1] == router(x)[1][0]).all()
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    noise = random_logits(logits, 7)
    noise.backward(torch.arange(40.0, dtype=torch.float64).view(5, 8))
    assert torch.equal(logits.grad, torch.arange(40.0, dtype=torch.float64).view(5, 8))
    again = random_logits(torch.zeros(5, 8, dtype=torch.float64), 7)
    torch.testing.assert_close(noise.detach(), again)


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 7], [0, 0, 0]])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_products_of_groups(counts, accumulate):
    n = sum(counts)
    x = torch.randn(n, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    total = torch.ones_like(weight) if accumulate else None
    arrived = []
    weight.register_post_accumulate_grad_hook(lambda p: arrived.append(p))
    y = grouped_linear(x, weight, counts, total)
    parts = [r @ w.t() for r, w in zip(x.split(counts), weight, strict=True)]
    torch.testing.assert_close(y, torch.cat(parts))
    grads = torch.randn_like(y)
    expected = torch.autograd.grad(
        torch.cat(parts), (x, weight), grads, retain_graph=True, materialize_grads=True
    )
    y.backward(grads)
    assert len(arrived) == 1, "the gradient of a step is counted once, rows or none"
    torch.testing.assert_close(x.grad, expected[0])
    torch.testing.assert_close(total - 1 if accumulate else weight.grad, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_gradient_replaces_what_is_there(dtype):
    """In fp32 by the C++, in float64 by the loop."""
    x = torch.randn(7, 6, dtype=dtype)
    weight = torch.randn(3, 5, 6, dtype=dtype, requires_grad=True)
    total = torch.full_like(weight, torch.nan)
    firsts = [True, False]
    y = grouped_linear(x, weight, [3, 0, 4], total, lambda: firsts.pop(0))
    y.sum().backward(retain_graph=True)
    once = total.clone()
    y.sum().backward()
    sums = [rows.sum(0).expand(5, 6) for rows in x.split([3, 0, 4])]
    torch.testing.assert_close(once, torch.stack(sums))
    torch.testing.assert_close(total, 2 * once)


def grouped_gemm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """torch's, which a CPU has too; rows behind the last group are undefined."""
    out = grouped_mm(a, b, offs=offs)
    return (
        out if b.dim() == 2 else out.index_fill_(0, torch.arange(int(offs[-1]), len(a)), torch.nan)
    )


def add_grouped_product(
    total: torch.Tensor,
    rows_out: torch.Tensor,
    rows_in: torch.Tensor,
    ends: torch.Tensor,
    add: bool,
) -> None:
    product = grouped_mm(rows_out.t(), rows_in, offs=ends)
    total.copy_(total + product if add else product)


@pytest.fixture
def on_device(monkeypatch):
    """The operations of a GPU that get the sizes of groups there, on a CPU."""
    monkeypatch.setattr(kernels, "grouped_mm", grouped_gemm)
    monkeypatch.setattr(torch.ops.megatron, "add_grouped_product_", add_grouped_product)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 7]])
def test_the_products_of_groups_in_one_call(counts, accumulate, on_device):
    """As the loop, where sizes are a tensor; rows behind the last group change nothing."""
    made = []
    for groups in (counts, torch.tensor(counts).cumsum(0, dtype=torch.int32)):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(9, 16, generator=generator)[: 9 if torch.is_tensor(groups) else 7]
        weight = torch.randn(3, 24, 16, generator=generator).requires_grad_()
        grad = torch.randn(9, 24, generator=generator)[: len(x)]
        total = torch.full_like(weight, torch.nan) if accumulate else None
        firsts = iter([True, False])
        y = grouped_linear(x.requires_grad_(), weight, groups, total, firsts.__next__)
        y.backward(grad, retain_graph=accumulate)
        if accumulate:
            y.backward(grad)
        made.append((y.detach()[:7], x.grad[:7], weight.grad if total is None else total))
    torch.testing.assert_close(*made)


@pytest.mark.parametrize("capacity", [None, 0.5, 1.0])
def test_a_layer_whose_host_knows_no_counts(capacity, on_device):
    """Results and all gradients are those of the layer that reads them."""
    flags = FLAGS | {"moe_expert_capacity_factor": capacity, "moe_ffn_hidden_size": 32}
    made = []
    for in_one_call in (False, True):
        layer = tiny_model(torch.float32, scramble=True, **flags).decoder.layers["1"].mlp
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
            linear.in_one_call = in_one_call
            linear.weight.main_grad = torch.ones_like(linear.weight)
        x = torch.randn(7, 2, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()
        y = layer(x, LayerInputs(router_step=RouterStep(None, 1.0)), {})
        y.square().sum().backward()
        grads = [getattr(p, "main_grad", p.grad) for p in layer.parameters()]
        made.append([y.detach(), x.grad, *grads])
    torch.testing.assert_close(*made)


def test_only_tokens_that_train_count_in_the_losses_of_routers():
    """Masked positions may hold anything."""
    router = tiny_model(scramble=True, **FLAGS).decoder.layers["0"].mlp.router
    x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 6)
    mask[1, 2:] = 0
    found = []
    for noise in (0.0, 100.0):
        router.zero_grad()
        step = RouterStep(mask, 1.0)
        probs, _ = router(x + noise * torch.randn_like(x) * (1 - mask.t().unsqueeze(-1)), step)
        (probs * 0).sum().backward()
        found.append((step.sums[0], router.weight.grad))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0][[0, 3]].min() > 0 and found[0][1].abs().max() > 0


MODULES = [("moe",), ("moe_act",), ("moe", "core_attn"), ("shared_experts", "moe_act")]
SELECTIVE = [Recompute("selective", modules=modules) for modules in MODULES]


@pytest.mark.parametrize("again", [None, Recompute("full", "uniform", 1), *SELECTIVE], ids=str)
@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_recomputation_repeats_the_losses_of_routers(again, kind):
    flags = FLAGS | {"moe_router_load_balancing_type": (kind,)}
    model = tiny_model(torch.float64, recompute=again, **flags)
    ids, labels = tokens()
    earlier = {layer: torch.arange(5, dtype=torch.float64) for layer in range(3)}
    step = RouterStep(None, 1.0, earlier)
    loss = model(ids, labels=labels, router_step=step).sum()
    first = dict(step.sums)
    loss.backward()
    assert sorted(first) == [0, 1, 2]
    for layer in first:
        assert torch.equal(first[layer], step.sums[layer])


@pytest.mark.parametrize("again", SELECTIVE, ids=str)
def test_selective_recomputation_gives_the_same_bits(again):
    flags = FLAGS | dict(moe_shared_expert_intermediate_size=16, moe_shared_expert_gate=True)
    ids, labels = tokens()
    found = []
    for recompute in (None, again):
        model = tiny_model(recompute=recompute, **flags)
        loss = model(ids, labels=labels, router_step=RouterStep(None, 1.0)).sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_losses_of_routers_have_the_factor_of_the_loss():
    """Their gradient is that of the sum of all losses, times the factor."""
    model = tiny_model(torch.float64, scramble=True, **FLAGS)
    ids, labels = tokens()
    step = RouterStep(None, 0.25)
    (model(ids, labels=labels, router_step=step).sum() * 0.25).backward()
    got = model.decoder.layers["2"].mlp.router.weight.grad.clone()
    model.zero_grad()
    weight = model.decoder.layers["2"].mlp.router.weight
    seen = {}
    model.decoder.layers["2"].mlp.router.register_forward_pre_hook(
        lambda module, args: seen.update(x=args[0])
    )
    main = model(ids, labels=labels).sum()
    logits = seen["x"].flatten(0, 1) @ weight.t()
    scores = logits.softmax(-1)
    share = torch.bincount(logits.topk(2).indices.flatten(), minlength=5) / (2 * len(logits))
    aux = 5 * (share * scores.sum(0)).sum()
    z = logits.logsumexp(-1).square().sum()
    (main * 0.25 + 0.25 * (0.1 * aux + 0.01 * z)).backward()
    torch.testing.assert_close(got, weight.grad)


@pytest.mark.parametrize(
    "text, layers",
    [
        ("[1]*3", [1, 1, 1]),
        ("([0]*1+[1]*2)", [0, 1, 1]),
        ("([1]*3+[0]*1)*3", [1, 1, 1, 0] * 3),
        ("[0,1]*2 + [1]", [0, 1, 0, 1, 1]),
        ("([1]*2)+([0])", [1, 1, 0]),
    ],
)
def test_layer_patterns(text, layers):
    assert parse_layer_pattern(text) == [bool(one) for one in layers]


@pytest.mark.parametrize("text", ["[2]", "[1]*x", "1,0", "[1]*[2]", "__import__('os')", "[1]**2"])
def test_layer_patterns_that_are_none(text):
    with pytest.raises(ValueError, match="not a list of 0 and 1"):
        parse_layer_pattern(text)
