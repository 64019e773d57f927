"""muP against a GPT and an AdamW written here in plain float64, and its initial values."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm

from megatron.arguments import config_from
from megatron.config.plan.parameters import parameter_table
from megatron.features.registry import RunConfig
from megatron.training.step import train_step
from tests.core.training.tiny_run import BASE, make_run, micro_batches, samples
from tests.runs import plot

M = 4.0  # width 16, base 4
HEADS = 2
WIDTH = 16
LAYERS = 2
VOCAB = 53
LR = 0.02
EPS = 1e-3  # large enough to matter
DECAY = 0.1
FLAGS = dict(
    use_mup=True,
    mup_base_hidden_size=4,
    mup_embedding_mult=1.5,
    mup_base_head_dim=2.0,
    lr=LR,
    adam_eps=EPS,
    weight_decay=DECAY,
    lr_decay_style="constant",
)


def plain_losses(w: dict[str, torch.Tensor], tokens: torch.Tensor, output: float) -> torch.Tensor:
    """Losses of GPT-2 with muP's factors; `output` is that on the logits. tokens [b, s+1]."""
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    b, s = ids.shape
    d = WIDTH // HEADS
    x = w["embedding.word_embeddings.weight"][ids]
    x = 1.5 * (x + w["embedding.position_embeddings.weight"][:s])
    causal = torch.ones(s, s, dtype=torch.bool).tril()
    for i in range(LAYERS):
        p = {k.removeprefix(f"decoder.layers.{i}."): v for k, v in w.items()}

        def norm(name, x, p=p):
            return layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"])

        def linear(name, x, p=p):
            return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

        qkv = linear("self_attention.linear_qkv", norm("input_layernorm", x))
        q, k, v = qkv.view(b, s, HEADS, 3, d).permute(3, 0, 2, 1, 4)
        scores = q @ k.mT * (math.sqrt(2.0) / d)
        attention = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
        x = x + linear("self_attention.linear_proj", attention.transpose(1, 2).flatten(2))
        inner = linear("mlp.linear_fc1", norm("pre_mlp_layernorm", x))
        x = x + linear("mlp.linear_fc2", gelu(inner, approximate="tanh"))
    x = layer_norm(
        x, (WIDTH,), w["decoder.final_layernorm.weight"], w["decoder.final_layernorm.bias"]
    )
    head = w.get("output_layer.weight", w["embedding.word_embeddings.weight"])
    logits = x @ head.T * output
    return cross_entropy(logits[..., :VOCAB].flatten(0, 1), labels.flatten())


def plain_adam(w, grads, moments, step: int, decoupled: float | None) -> None:
    """AdamW; matrices that have the width as inputs have lr / M and eps / M."""
    for name, grad in grads.items():
        matrix = w[name].dim() == 2 and not name.startswith("embedding.")
        lr, eps = (LR / M, EPS / M) if matrix else (LR, EPS)
        if decoupled and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            lr = decoupled
        m, v = moments.setdefault(name, (torch.zeros_like(grad), torch.zeros_like(grad)))
        m.mul_(0.9).add_(grad, alpha=0.1)
        v.mul_(0.999).addcmul_(grad, grad, value=0.001)
        with torch.no_grad():
            if w[name].dim() == 2:
                w[name].mul_(1.0 - lr * DECAY)
            root = (v / (1 - 0.999**step)).sqrt()
            w[name].sub_(lr * (m / (1 - 0.9**step)) / (root + eps))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"untie_embeddings_and_output_weights": True},
        {"untie_embeddings_and_output_weights": True, "decoupled_lr": 0.013},
        {"mup_output_mult": 0.7},
    ],
    ids=["tied", "untied", "decoupled", "output factor"],
)
def test_steps_are_those_of_a_plain_model_and_adam(flags):
    run = make_run(**FLAGS, **flags)
    params = {p.sharding.name: p for p in run.model[0].parameters()}
    generator = torch.Generator().manual_seed(0)
    for p in params.values():  # biases and norms have values that matter
        p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    w = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    moments: dict = {}
    for step in range(1, 4):
        rows = samples(seed=step)
        result = run.advance(train_step(run, plot().forward_step, micro_batches(rows, 2), step))
        loss = plain_losses(w, rows, flags.get("mup_output_mult", 1 / M))
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        plain_adam(w, grads, moments, step, flags.get("decoupled_lr"))
        assert result.loss == pytest.approx(loss.item(), rel=1e-10)
        assert result.learning_rate == LR
    for name, p in params.items():
        torch.testing.assert_close(p.detach(), w[name].detach(), rtol=1e-10, atol=1e-12, msg=name)


def stds(**flags) -> dict[str, float]:
    """Standard deviations by name."""
    config = config_from(RunConfig, BASE | dict(untie_embeddings_and_output_weights=True) | flags)
    return {spec.name: spec.std for spec in parameter_table(config.model, 64)}


def test_initial_values_of_hidden_matrices_shrink_with_the_width_and_others_do_not():
    usual = stds(init_method_std=0.02)
    scaled = stds(init_method_std=0.02, use_mup=True, mup_base_hidden_size=4)
    for name, std in usual.items():
        hidden = name.startswith("decoder.layers.") and name.endswith(".weight")
        assert scaled[name] == pytest.approx(std / math.sqrt(M) if hidden else std)
    assert sum(a != scaled[name] for name, a in usual.items()) == 4 * LAYERS


def test_at_the_base_width_only_the_attention_scale_is_another():
    model = config_from(RunConfig, BASE | dict(use_mup=True, mup_base_hidden_size=WIDTH)).model
    assert (model.mup_width, model.logits_divisor, model.embedding_factors) == (1, 1, (1, 1))
    assert model.attention_scale == 1 / 8
    assert stds(use_mup=True, mup_base_hidden_size=WIDTH) == stds()


def test_sgd_scales_what_is_no_matrix():
    run = make_run(use_mup=True, mup_base_hidden_size=4, optimizer="sgd")
    for group in run.optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            matrix = p.dim() == 2 and not name.startswith("embedding.")
            assert group["lr_mult"] == (1 if matrix else M)


def test_muon_has_the_rate_and_adam_beside_it_the_scaled_one():
    run = make_run(
        use_mup=True,
        mup_base_hidden_size=4,
        optimizer="muon",
        muon_momentum=0.95,
        muon_scale_mode="unit_rms_norm",
        untie_embeddings_and_output_weights=True,
    )
    rates = {n: g["lr_mult"] for g in run.optimizer.param_groups for n in g["names"]}
    assert {name for name, rate in rates.items() if rate != 1} == {"output_layer.weight"}
    assert rates["output_layer.weight"] == 1 / M
