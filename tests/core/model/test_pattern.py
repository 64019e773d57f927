"""Layers of one block, and output gates of attention, against the formulas in float64."""

import pytest
import torch
import torch.nn.functional as F

from megatron.config.plan.pipeline_layout import deal
from tests.core.model.tiny import MODELS, tiny_config, tiny_model, tokens

HEADS, GROUPS, TOPK = 4, 2, 2
FLAGS = dict(
    swiglu=True,
    normalization="RMSNorm",
    add_bias_linear=False,
    position_embedding_type="none",
    group_query_attention=True,
    num_query_groups=GROUPS,
    attention_output_gate=True,
    num_layers=None,
)
EXPERTS = dict(
    num_experts=4,
    moe_router_topk=TOPK,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=16,
    moe_shared_expert_gate=True,
)


def attention(x, w, at):
    """Of a group's rows the query heads, their gates, a key and a value."""
    rows = (x @ w[at + "linear_qkv.weight"].T).unflatten(-1, (GROUPS, -1, 8))
    causal = torch.ones(x.shape[1], x.shape[1]).tril().bool()
    heads = []
    for head in range(HEADS):
        of_group, n = divmod(head, HEADS // GROUPS)
        q, gate, k, v = (rows[:, :, of_group, i] for i in (n, n + HEADS // GROUPS, -2, -1))
        scores = (q @ k.mT / 8**0.5).where(causal, -torch.inf)
        heads.append(scores.softmax(-1) @ v * torch.sigmoid(gate))
    return torch.cat(heads, -1) @ w[at + "linear_proj.weight"].T


def mlp(x, fc1, fc2):
    return (F.silu(x @ fc1[0].T) * (x @ fc1[1].T)) @ fc2.T


def experts(x, w, at):
    logits = x @ w[at + "router.weight"].T
    best, chosen = logits.topk(TOPK)
    shares = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
    shared = at + "shared_experts."
    y = mlp(x, w[shared + "linear_fc1.weight"], w[shared + "linear_fc2.weight"])
    y = y * torch.sigmoid(x @ w[shared + "gate_weight"].T)
    fc1, fc2 = (w[f"{at}experts.linear_fc{n}.weight"] for n in (1, 2))
    return y + sum(shares[..., n, None] * mlp(x, fc1[n], fc2[n]) for n in range(len(fc1)))


def spelled_out(w, ids, pattern):
    x = w["embedding.word_embeddings.weight"][ids]
    for number, symbol in enumerate(pattern):
        at = f"decoder.layers.{number}."
        norm = w[at + ("input_layernorm" if symbol == "*" else "pre_mlp_layernorm") + ".weight"]
        y = F.rms_norm(x, x.shape[-1:], norm, 1e-5)
        if symbol == "*":
            y = attention(y, w, at + "self_attention.")
        elif symbol == "E":
            y = experts(y, w, at + "mlp.")
        else:
            y = mlp(y, w[at + "mlp.linear_fc1.weight"], w[at + "mlp.linear_fc2.weight"])
        x = x + y
    x = F.rms_norm(x, x.shape[-1:], w["decoder.final_layernorm.weight"], 1e-5)
    return x @ w["embedding.word_embeddings.weight"].T


@pytest.mark.parametrize("pattern", ["**", "--", "EE", "*-E**"])
def test_values_and_gradients_are_those_of_the_formula(pattern):
    flags = FLAGS | (EXPERTS if "E" in pattern else {}) | dict(hybrid_layer_pattern=pattern)
    model = tiny_model(torch.float64, scramble=True, padded=61, **flags)
    weights = {p.sharding.name: p for p in model.parameters()}
    (ids, _) = tokens()
    ours, theirs = model(ids), spelled_out(weights, ids, pattern)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    found, expected = (
        torch.autograd.grad(logits.logsumexp(-1).mean(), weights.values())
        for logits in (ours, theirs)
    )
    for name, mine, want in zip(weights, found, expected, strict=True):
        assert want.any(), name
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-12, msg=name)


def test_a_pattern_of_pairs_is_a_gpt():
    """Rotary positions, windows by layer and initial values of the same number of blocks."""
    gpt = tiny_model(torch.float64, **MODELS["llama"])
    flags = MODELS["llama"] | dict(num_layers=None, hybrid_layer_pattern="*-*-*-")
    pairs = tiny_model(torch.float64, **flags)
    ours = {p.sharding.name: p for p in pairs.parameters()}
    for p in gpt.parameters():
        head, number, rest = (*p.sharding.name.split(".", 3)[1:], "", "")[:3]
        name = p.sharding.name
        if head == "layers":
            layer = 2 * int(number) + (rest.startswith(("mlp", "pre_mlp")))
            name = f"decoder.layers.{layer}.{rest}"
        with torch.no_grad():
            mine = ours.pop(name)
            if p.sharding.name.startswith("decoder.layers.0.self"):
                torch.testing.assert_close(mine.std(), p.std(), rtol=0.2, atol=0)
            mine.copy_(p)
    assert not ours
    assert torch.equal(pairs(tokens()[0]), gpt(tokens()[0]))


def test_borders_and_prediction_modules_of_a_pattern():
    config = tiny_config(
        **FLAGS | EXPERTS, hybrid_layer_pattern="*E-|**/*E/*E", mtp_num_layers=None
    )
    assert (config.num_layers, config.mtp_num_layers) == (5, 2)
    assert config.layer_symbols == "*E-**" and config.moe_layers == [1, 5, 6]
    assert [len(config.layer(number).blocks) for number in range(7)] == [1] * 5 + [2, 2]
    assert deal([3, 2, 1, 1], 2, "") == (
        (range(3), range(5, 6)),
        (range(3, 5), range(6, 7)),
    )
