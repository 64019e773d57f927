"""Attention sinks and soft caps in a model: the losses, logits and parameters of their flags."""

import pytest
import torch
import torch.nn.functional as F

from megatron.config.plan.parameters import parameter_table
from megatron.optimizer.param_groups import has_weight_decay
from tests.core.config.checks.checked_flags import BASE, checked
from tests.core.model.tiny import tiny_config, tiny_model, tokens
from tests.problems import assert_problem

CAP = 0.3


def test_losses_and_logits_have_the_same_cap():
    """Losses by their own kernel, in training and in evaluation; logits by autograd."""
    flags = dict(final_logit_softcapping=CAP, attn_logit_softcapping=0.5, scramble=True)
    model = tiny_model(torch.float64, softmax_type="learnable", **flags)
    ids, labels = tokens()
    logits = model(ids)
    with torch.no_grad():
        plain = model(ids, labels=labels)
    exact = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    losses = model(ids, labels=labels)
    for got in (losses, plain):
        torch.testing.assert_close(got.flatten(), exact, rtol=1e-13, atol=1e-13)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(exact.sum(), parameters)
    for got, want in zip(torch.autograd.grad(losses.sum(), parameters), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)
    assert 0.9 * CAP < logits.abs().max() < CAP
    model.softcap = None
    torch.testing.assert_close(CAP * torch.tanh(model(ids) / CAP), logits, rtol=1e-12, atol=1e-13)


def test_a_sink_is_a_parameter_of_each_head():
    """Cut with its heads; neither decayed nor a matrix."""
    model = tiny_config(softmax_type="learnable")
    sinks = [spec for spec in parameter_table(model, 64) if "softmax_offset" in spec.name]
    assert [spec.name for spec in sinks] == [
        f"decoder.layers.{i}.self_attention.core_attention.softmax_offset" for i in range(3)
    ]
    for spec in sinks:
        assert spec.shape == (4,) and spec.local_shape({"tp": 2}) == (2,)
        assert spec.matrices is None and not has_weight_decay(spec.name, spec.shape)
        assert spec.partial_axes(sequence_parallel=True) == ()
    built = dict(tiny_model(softmax_type="learnable").named_parameters())
    assert {spec.name for spec in sinks} <= built.keys()
    for other in ("off-by-one", "vanilla"):
        table = parameter_table(tiny_config(softmax_type=other), 64)
        assert not [spec for spec in table if "softmax_offset" in spec.name]


def test_a_score_of_zero_is_a_sink_of_zero():
    ids, _ = tokens()
    learnable = tiny_model(torch.float64, softmax_type="learnable", scramble=True)
    zero = tiny_model(torch.float64, softmax_type="off-by-one", scramble=True)
    with torch.no_grad():
        own = dict(learnable.named_parameters())
        for name, p in zero.named_parameters():
            p.copy_(own[name])
        for layer in learnable.decoder.layers.values():
            layer.self_attention.sinks.zero_()
        assert torch.equal(learnable(ids), zero(ids))
        for layer in learnable.decoder.layers.values():
            layer.self_attention.sinks.fill_(2.0)
        assert not torch.allclose(learnable(ids), zero(ids))


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--softmax-type learnable --attention-backend unfused", None),
        ("--attn-logit-softcapping 50 --attention-backend local", None),
        ("--softmax-type learnable --attn-logit-softcapping 50 --context-parallel-size 2", None),
        ("--softmax-type learnable --attention-backend fused", "flags-exclude-each-other"),
        ("--attn-logit-softcapping 50 --attention-backend fused", "flags-exclude-each-other"),
        ("--attn-logit-softcapping 0", "value-out-of-range"),
        ("--final-logit-softcapping -1", "value-out-of-range"),
    ],
)
def test_the_flags(flags, code):
    problems, _ = checked(flags, 2, base=f"{BASE} --min-lr 0 --attention-dropout 0")
    assert len(problems) == (code is not None), problems
    if code is not None:
        assert_problem(problems[0], code, "--")
