"""Routers and their losses equal megatron-core's functions."""

from types import SimpleNamespace

import pytest
import torch

from megatron.config.moe import ROUTER_SUMS
from megatron.model.blocks.module import RouterStep
from megatron.training import routers
from tests.core.model.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.peers

VOCAB = 61
EXPERTS = 6
TOPK = 2
SIZE = dict(
    hidden_size=64,
    num_attention_heads=8,
    num_layers=3,
    seq_length=16,
    max_position_embeddings=32,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    ffn_hidden_size=88,
    moe_ffn_hidden_size=40,
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
    num_experts=EXPERTS,
    moe_router_topk=TOPK,
)
ROUTERS = {
    "softmax": {},
    "softmax first": dict(moe_router_pre_softmax=True),
    "softmax first, one expert": dict(moe_router_pre_softmax=True, moe_router_topk=1),
    "sigmoid": dict(moe_router_score_function="sigmoid"),
    "sigmoid, scaled": dict(
        moe_router_score_function="sigmoid", moe_router_topk=3, moe_router_topk_scaling_factor=2.5
    ),
    "softmax, groups": dict(
        moe_router_pre_softmax=True, moe_router_num_groups=3, moe_router_group_topk=2
    ),
    "sigmoid, groups, bias": dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=3,
        moe_router_group_topk=1,
    ),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("flags", ROUTERS.values(), ids=ROUTERS)
def test_a_router_and_its_losses_equal_those_of_megatron_core(flags, masked):
    """Probabilities, both losses, and the gradients of all three."""
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    model = tiny_model(
        **SIZE | flags, moe_aux_loss_coeff=(0.03,), moe_z_loss_coeff=0.02, scramble=True
    )
    router = model.decoder.layers["1"].mlp.router
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = router.weight
    mask = torch.ones(2, 16)
    if masked:
        mask[0, 5:9] = 0
    step = RouterStep(mask if masked else None, 0.5)
    probs, experts = router(x, step)
    out_grad = torch.randn(32, EXPERTS, generator=torch.Generator().manual_seed(2))
    dense = torch.zeros(32, EXPERTS).scatter(1, experts, probs)
    ours = torch.autograd.grad((dense * out_grad).sum(), (x, weight))

    topk = flags.get("moe_router_topk", TOPK)
    score = flags.get("moe_router_score_function", "softmax")
    logits = x.flatten(0, 1) @ weight.t()
    padding = mask.t().flatten() == 0
    expected, _ = theirs.topk_routing_with_score_function(
        logits,
        topk,
        use_pre_softmax=flags.get("moe_router_pre_softmax", False),
        scaling_factor=flags.get("moe_router_topk_scaling_factor"),
        score_function=score,
        num_groups=flags.get("moe_router_num_groups"),
        group_topk=flags.get("moe_router_group_topk"),
        expert_bias=router.expert_bias,
    )
    torch.testing.assert_close(dense, expected, rtol=1e-6, atol=1e-6)
    chosen, scores = theirs.compute_routing_scores_for_aux_loss(
        logits, topk, score, padding_mask=padding
    )
    tokens_that_train = int(mask.sum())
    aux = theirs.switch_load_balancing_loss_func(
        scores, chosen.sum(0), tokens_that_train, topk, EXPERTS, 1.0
    )
    z = theirs.z_loss_func(logits, 1.0, padding_mask=padding)
    found = step.sums[1][[0, 3]] / tokens_that_train
    torch.testing.assert_close(found.float(), torch.stack((aux, z)), rtol=1e-6, atol=1e-6)
    # what Megatron multiplies the losses by where gradients are divided by the number of tokens
    loss = (expected * out_grad).sum() + 0.5 * tokens_that_train * (0.03 * aux + 0.02 * z)
    for mine, other in zip(ours, torch.autograd.grad(loss, (x, weight)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_the_loss_of_sequences_equals_that_of_megatron_core():
    """Of which Megatron makes the experts of each sequence experts of one batch."""
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    flags = dict(moe_router_load_balancing_type=("seq_aux_loss",), moe_aux_loss_coeff=(0.03,))
    router = tiny_model(**SIZE | flags, scramble=True).decoder.layers["1"].mlp.router
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(1))
    step = RouterStep(None, 1.0)
    probs, _ = router(x, step)
    found = torch.autograd.grad((probs * 0).sum(), router.weight)[0]
    logits = x.flatten(0, 1) @ router.weight.t()
    chosen, scores = theirs.compute_routing_scores_for_aux_loss(logits, TOPK, "softmax")
    aux = theirs.switch_load_balancing_loss_func(
        scores.reshape(16, -1), chosen.reshape(16, -1).sum(0), 16, TOPK, EXPERTS, 1.0
    )
    torch.testing.assert_close(step.sums[1][1].float() / 32, aux / 2, rtol=1e-6, atol=1e-6)
    expected = torch.autograd.grad(0.03 * 32 * aux / 2, router.weight)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("factor", [0.3, 0.8, 1.5])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_dropped_tokens_are_those_of_megatron_core(policy, factor):
    """By position megatron-core takes any of equal rank, so there its numbers of tokens."""
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    flags = dict(moe_expert_capacity_factor=factor, moe_token_drop_policy=policy)
    router = tiny_model(**SIZE | flags, scramble=True).decoder.layers["1"].mlp.router
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(1))
    probs, experts = router(x, RouterStep(None, None))
    kept = torch.zeros(32, EXPERTS + 1).scatter(1, experts, probs)[:, :EXPERTS]
    logits = x.flatten(0, 1) @ router.weight.t()
    scores, selected = theirs.topk_routing_with_score_function(logits, TOPK)
    expected, _ = theirs.apply_router_token_dropping(
        scores, selected, TOPK, capacity_factor=factor, drop_policy=policy
    )
    if policy == "probs":
        torch.testing.assert_close(kept, expected, rtol=1e-6, atol=1e-6)
        return
    for e in range(EXPERTS):
        count = int((expected[:, e] > 0).sum())
        assert (
            kept[:, e].nonzero().flatten().tolist()
            == (selected[:, e].nonzero().flatten().tolist()[:count])
        )


@pytest.mark.parametrize("topk", [1, 2])
def test_the_selection_by_sinkhorn_equals_that_of_megatron_core(topk):
    """Probabilities are not balanced: the softmax over all experts, or the sigmoid of one."""
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    flags = dict(moe_router_load_balancing_type=("sinkhorn",), moe_router_topk=topk)
    router = tiny_model(**SIZE | flags, scramble=True).decoder.layers["1"].mlp.router
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(1))
    logits = x.flatten(0, 1) @ router.weight.t()
    scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    for step, ranked in ((RouterStep(None, 1.0), theirs.sinkhorn(logits)), (None, scores)):
        probs, experts = router(x, step)
        assert torch.equal(experts, ranked.topk(topk).indices)
        torch.testing.assert_close(probs, scores.gather(1, experts), rtol=1e-6, atol=1e-6)
    assert not torch.equal(theirs.sinkhorn(logits).topk(topk).indices, scores.topk(topk).indices)


def test_the_loss_of_all_micro_batches_equals_that_of_megatron_core():
    """Which takes the mean of the counts of the micro-batches so far."""
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    flags = dict(
        moe_router_load_balancing_type=("aux_loss", "global_aux_loss"),
        moe_aux_loss_coeff=(0.2, 0.03),
    )
    router = tiny_model(**SIZE | flags, scramble=True).decoder.layers["1"].mlp.router
    generator = torch.Generator().manual_seed(1)
    latest = {}
    counts = []
    for _ in range(3):
        x = torch.randn(16, 2, 64, generator=generator)
        step = RouterStep(None, 1.0, latest)
        probs, _ = router(x, step)
        found = torch.autograd.grad((probs * 0).sum(), router.weight)[0]
        logits = x.flatten(0, 1) @ router.weight.t()
        chosen, scores = theirs.compute_routing_scores_for_aux_loss(logits, TOPK, "softmax")
        counts.append(chosen.sum(0))
        aux, of_all = (
            theirs.switch_load_balancing_loss_func(scores, mean, 32, TOPK, EXPERTS, 1.0)
            for mean in (counts[-1], sum(counts) / len(counts))
        )
        losses = step.sums[1][[0, 2]].float() / 32
        torch.testing.assert_close(losses, torch.stack((aux, of_all)), rtol=1e-6, atol=1e-6)
        expected = torch.autograd.grad(32 * (0.2 * aux + 0.03 * of_all), router.weight)[0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rate", [1e-3, 0.5])
def test_the_update_of_the_expert_bias_equals_that_of_megatron_core(rate):
    """After one step of a run, from the tokens that were counted in it."""
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    counts = torch.tensor([5.0, 0.0, 9.0, 5.0, 6.0, 5.0])
    model = tiny_model(
        **SIZE, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True
    )
    bias = model.decoder.layers["1"].mlp.router.expert_bias
    config = tiny_config(
        **SIZE, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=rate
    )
    before = bias.detach().clone()
    totals = SimpleNamespace(routers=([0.0] * len(ROUTER_SUMS) + counts.tolist()) * 3)
    routers.update_bias(config, [model], totals)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
        patch.setattr(theirs.parallel_state, "get_tensor_and_data_parallel_group", lambda **_: None)
        expected = theirs.get_updated_expert_bias(counts.clone(), before, rate)
    torch.testing.assert_close(bias.data, expected)
