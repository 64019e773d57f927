"""Logits, losses and gradients equal those of transformers' GPT-2 and Llama with the same
weights."""

import pytest
import torch

from tests.core.model.tiny import tiny_config, tiny_model, tokens
from tests.peers.huggingface import gpt2_state, llama_state

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

VOCAB = 61
PADDED = 64
SIZE = dict(
    hidden_size=64, num_attention_heads=8, num_layers=3, seq_length=16, max_position_embeddings=32
)


def gpt2_pair(activation, **flags):
    ours = tiny_model(scramble=True, **SIZE, **flags)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=64,
        n_layer=3,
        n_head=8,
        activation_function=activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-5,
        attn_implementation="eager",
    )
    return ours, load(transformers.GPT2LMHeadModel(config), gpt2_state, ours, flags)


def llama_pair(**flags):
    flags = dict(
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        ffn_hidden_size=176,
        untie_embeddings_and_output_weights=True,
        **{"add_bias_linear": False, **flags},
    )
    ours = tiny_model(scramble=True, **SIZE, **flags)
    model = tiny_config(**SIZE, **flags)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=model.query_groups,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": float(model.rotary_base)},
        attention_bias=model.qkv_bias,
        mlp_bias=model.mlp_bias,
        head_dim=model.head_dim,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return ours, load(transformers.LlamaForCausalLM(config), llama_state, ours, flags)


def load(theirs, state, ours, flags):
    params = {name: p.detach() for name, p in ours.named_parameters()}
    theirs.load_state_dict(state(params, tiny_config(**SIZE, **flags), VOCAB))
    return theirs


def check_equal(ours, theirs, state, flags):
    """Logits within 1e-5; and gradients, ours carried through the same map as the weights."""
    ids, labels = tokens()
    logits = ours(ids)
    expected = theirs(ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    ours(ids, labels=labels).mean().backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    grads = state(
        {name: p.grad for name, p in ours.named_parameters()}, tiny_config(**SIZE, **flags), VOCAB
    )
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(
            grads[name], p.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    "activation, flags",
    [
        ("gelu_new", {}),
        ("gelu", dict(bias_gelu_fusion=False)),
        ("gelu_new", dict(bias_gelu_fusion=False, openai_gelu=True)),
    ],
    ids=["tanh", "erf", "openai"],
)
def test_gpt2(activation, flags):
    ours, theirs = gpt2_pair(activation, **flags)
    check_equal(ours, theirs, gpt2_state, flags)


LLAMAS = {
    "grouped": dict(group_query_attention=True, num_query_groups=2),
    "multi-query": dict(group_query_attention=True, num_query_groups=1),
    "multi-head": {},
    "base": dict(group_query_attention=True, num_query_groups=4, rotary_base=500),
    "head width": dict(group_query_attention=True, num_query_groups=2, kv_channels=24),
    "biases": dict(add_qkv_bias=True, add_attention_output_bias=True, add_mlp_bias=True),
}


@pytest.mark.parametrize("flags", LLAMAS.values(), ids=LLAMAS)
def test_llama(flags):
    ours, theirs = llama_pair(**flags)
    check_equal(ours, theirs, llama_state, flags)


def test_the_document_mask_of_a_left_padded_batch():
    """transformers' attention mask hides padding; our document ids do the same for the real
    tokens."""
    ours, theirs = llama_pair(group_query_attention=True, num_query_groups=2)
    ids, _ = tokens()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
    logits = ours(ids, position_ids=positions, document_ids=mask)
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)
