"""The GPT: what it computes, what each option changes, recompute, document masks, the loss, its
parameters."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.config.plan.parameters import count_parameters, parameter_table
from megatron.config.precision import PrecisionConfig
from megatron.model.blocks.module import Recompute
from megatron.model.gpt import hidden_dtype
from megatron.parallel.random import DropoutSeeds
from tests.core.model.tiny import (
    PADDED,
    SEEDS,
    VOCAB,
    loss_and_grads,
    tiny_config,
    tiny_model,
    tokens,
)
from tests.problems import raises

LLAMA = dict(
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    group_query_attention=True,
    num_query_groups=2,
)
EVERYTHING = dict(
    LLAMA,
    qk_layernorm=True,
    add_qkv_bias=True,
    add_mlp_bias=True,
    rotary_percent=0.5,
    apply_layernorm_1p=True,
)
DROPOUT = dict(attention_dropout=0.1, hidden_dropout=0.1)


def logits_of(model, **forward):
    with torch.no_grad():
        return model(tokens()[0], **forward)


def test_shapes_and_number_formats():
    model = tiny_model()
    (ids, labels) = tokens()
    assert model(ids).shape == (2, 16, VOCAB)
    assert model(ids, labels=labels).shape == (2, 16)
    for dtype, loss in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64,) * 2,
    ):
        model = tiny_model(dtype)
        assert model(ids).dtype == dtype
        assert model(ids, labels=labels).dtype == loss
    half = tiny_model(
        torch.float16, precision=PrecisionConfig(fp16=True, fp16_lm_cross_entropy=True)
    )
    assert half(ids, labels=labels).dtype == torch.float16


@pytest.mark.parametrize("flags", [{}, LLAMA, EVERYTHING], ids=["gpt2", "llama", "everything"])
def test_parameters_are_the_table(flags):
    model = tiny_model(**flags)
    table = parameter_table(tiny_config(**flags), PADDED, VOCAB)
    assert [name for name, _ in model.named_parameters()] == [
        p.sharding.name for p in model.parameters()
    ]
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {
        spec.name: spec.shape for spec in table
    }
    assert sum(p.numel() for p in model.parameters()) == count_parameters(table)


def explicit_gpt2(params, ids, heads, residual_after_norm=False):
    """The same network in float64, spelled out position by position: no shared code, no
    cleverness."""
    p = {name: value.detach().double() for name, value in params}

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], p[name + ".weight"], p[name + ".bias"], 1e-5)

    x = (
        p["embedding.word_embeddings.weight"][ids]
        + p["embedding.position_embeddings.weight"][: ids.shape[1]]
    )
    b, s, h = x.shape
    d = h // heads
    for i in range(3):
        at = f"decoder.layers.{i}."
        y = norm(x, at + "input_layernorm")
        qkv = (
            y @ p[at + "self_attention.linear_qkv.weight"].T
            + p[at + "self_attention.linear_qkv.bias"]
        )
        mixed = torch.zeros(b, s, h, dtype=torch.double)
        for head in range(heads):
            q, k, v = (qkv[..., (3 * head + j) * d : (3 * head + j + 1) * d] for j in range(3))
            for t in range(s):
                weights = (q[:, t : t + 1] @ k[:, : t + 1].transpose(1, 2) / math.sqrt(d)).softmax(
                    -1
                )
                mixed[:, t, head * d : (head + 1) * d] = (weights @ v[:, : t + 1])[:, 0]
        x = y if residual_after_norm else x
        x = (
            x
            + mixed @ p[at + "self_attention.linear_proj.weight"].T
            + p[at + "self_attention.linear_proj.bias"]
        )
        y = norm(x, at + "pre_mlp_layernorm")
        x = y if residual_after_norm else x
        y = y @ p[at + "mlp.linear_fc1.weight"].T + p[at + "mlp.linear_fc1.bias"]
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ p[at + "mlp.linear_fc2.weight"].T + p[at + "mlp.linear_fc2.bias"]
    return norm(x, "decoder.final_layernorm") @ p["embedding.word_embeddings.weight"][:VOCAB].T


@pytest.mark.parametrize("residual_after_norm", [False, True])
def test_equals_the_network_spelled_out(residual_after_norm):
    model = tiny_model(
        torch.float64, scramble=True, apply_residual_connection_post_layernorm=residual_after_norm
    )
    expected = explicit_gpt2(model.named_parameters(), tokens()[0], 4, residual_after_norm)
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("flags", [{}, LLAMA], ids=["gpt2", "llama"])
def test_loss_is_the_plain_formula(flags):
    """Also with padded columns that would matter, and in the gradient: dummy rows get none."""
    model = tiny_model(torch.float64, scramble=True, **flags)
    (ids, labels) = tokens()
    losses, grads = loss_and_grads(model)
    logits = model(ids)
    expected = logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    model.zero_grad()
    expected.mean().backward()
    for p in model.parameters():
        torch.testing.assert_close(grads[p.sharding.name], p.grad, rtol=1e-9, atol=1e-12)
    head = grads["output_layer.weight" if flags else "embedding.word_embeddings.weight"]
    assert not head[VOCAB:].any() and head[:VOCAB].any(1).all()


ROPE = dict(position_embedding_type="rope", kv_channels=16)


@pytest.mark.parametrize(
    "flags",
    [
        dict(rotary_base=100),
        dict(rotary_percent=0.5),
        dict(rotary_interleaved=True),
        dict(rotary_seq_len_interpolation_factor=4),
        dict(rotary_ntk_alpha=4.0),
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_each_rotary_option_changes_the_output(flags):
    before, after = (logits_of(tiny_model(scramble=True, **ROPE, **f)) for f in ({}, flags))
    assert (before - after).abs().max() > 1e-4


def test_two_spellings_of_rotary():
    alias = logits_of(tiny_model(use_rotary_position_embeddings=True))
    assert torch.equal(alias, logits_of(tiny_model(position_embedding_type="rope")))


@pytest.mark.parametrize("flag", ["add_qkv_bias", "add_attention_output_bias", "add_mlp_bias"])
def test_each_bias_is_added(flag):
    model = tiny_model(add_bias_linear=False, **{flag: True})
    before = logits_of(model)
    moved = [
        p for name, p in model.named_parameters() if ".linear_" in name and name.endswith(".bias")
    ]
    assert moved
    for p in moved:
        p.data += torch.linspace(-1, 1, p.numel()).view(p.shape)
    assert (before - logits_of(model)).abs().max() > 1e-4


def test_the_embedding_is_scaled_in_the_dtype_of_its_weights():
    """Gemma's factor: the root of 3,072 is 55.5 in bf16."""
    for dtype, factor in ((torch.bfloat16, 55.5), (torch.float64, 3072**0.5)):
        plain, scaled = (
            tiny_model(dtype, position_embedding_type="rope", **flags).embedding(tokens()[0])
            for flags in ({}, dict(embedding_multiplier=3072**0.5))
        )
        assert torch.equal(scaled, plain * torch.tensor(factor, dtype=dtype))


def test_gelu_forms():
    """tanh with Megatron's fusion (needs biases) or --openai-gelu, otherwise exact."""
    fused = {}
    exact = dict(bias_gelu_fusion=False)
    openai = dict(bias_gelu_fusion=False, openai_gelu=True)
    outputs = [logits_of(tiny_model(scramble=True, **flags)) for flags in (fused, exact, openai)]
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])
    bare = dict(add_bias_linear=False)
    outputs = [
        logits_of(tiny_model(scramble=True, **bare, **flags)) for flags in (fused, exact, openai)
    ]
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def test_neutral_options_are_neutral():
    for flags in (dict(apply_query_key_layer_scaling=True), dict(attention_softmax_in_fp32=True)):
        assert torch.equal(logits_of(tiny_model(**flags)), logits_of(tiny_model()))


def test_zero_centered_norms_start_as_the_identity_scale():
    plain = tiny_model()
    centered = tiny_model(apply_layernorm_1p=True)
    assert torch.equal(logits_of(plain), logits_of(centered))
    assert not centered.decoder.final_layernorm.weight.any()


def test_fp32_residual_keeps_small_updates():
    exact = logits_of(tiny_model(torch.float64, num_layers=12)).double()
    errors = [
        (
            logits_of(
                tiny_model(torch.bfloat16, num_layers=12, fp32_residual_connection=flag)
            ).double()
            - exact
        )
        .abs()
        .mean()
        for flag in (False, True)
    ]
    assert errors[1] < 0.8 * errors[0]


def test_dropout_sites():
    """Each probability alone changes training and leaves evaluation; the stream is a function of
    its arguments."""
    quiet = logits_of(tiny_model())
    for flags in (dict(attention_dropout=0.1), dict(hidden_dropout=0.1)):
        model = tiny_model(**flags)
        assert torch.equal(logits_of(model), quiet)
        first = logits_of(model, dropout_seeds=SEEDS)
        assert not torch.equal(first, quiet)
        assert torch.equal(first, logits_of(model, dropout_seeds=DropoutSeeds(1234, 1, 0)))
        for other in (
            DropoutSeeds(1235, 1, 0),
            DropoutSeeds(1234, 2, 0),
            DropoutSeeds(1234, 1, 1),
            DropoutSeeds(1234, 1, 0, 1),
        ):
            assert not torch.equal(first, logits_of(model, dropout_seeds=other))


def test_attention_and_both_branches_drop_in_every_layer():
    seeds = DropoutSeeds(1, 1, 0)
    used = []

    class Watched(DropoutSeeds):
        def seed(self, layer, site, part=0):
            used.append((layer, site))
            return seeds.seed(layer, site, part)

    tiny_model(**DROPOUT)(tokens()[0], dropout_seeds=Watched(1, 1, 0))
    sites = ("attention", "attention_output", "mlp_output")
    assert used == [(-1, "embedding"), *((layer, site) for layer in range(3) for site in sites)]


RECOMPUTE = [
    Recompute("selective"),
    Recompute("full", "uniform", 1),
    Recompute("full", "uniform", 2),
    Recompute("full", "block", 2),
    Recompute("full", "block", 9),
]


@pytest.mark.parametrize("flags", [DROPOUT, {**LLAMA, **DROPOUT}], ids=["gpt2", "llama"])
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
def test_recompute_gives_the_same_bits(recompute, flags):
    losses, grads = loss_and_grads(tiny_model(**flags), dropout_seeds=SEEDS)
    again_losses, again = loss_and_grads(
        tiny_model(recompute=recompute, **flags), dropout_seeds=SEEDS
    )
    assert torch.equal(losses, again_losses)
    for name, grad in grads.items():
        assert torch.equal(grad, again[name]), name


@pytest.mark.parametrize(
    "recompute, layer_runs, core_runs",
    [
        (Recompute(), [1, 1, 1], [1, 1, 1]),
        (Recompute("selective"), [1, 1, 1], [2, 2, 2]),
        (Recompute("full", "uniform", 2), [2, 2, 2], [2, 2, 2]),
        (Recompute("full", "block", 2), [2, 2, 1], [2, 2, 1]),
    ],
    ids=str,
)
def test_recompute_runs_what_it_says(recompute, layer_runs, core_runs):
    """Times each layer and each core attention runs in one step, and once in evaluation."""
    model = tiny_model(recompute=recompute)
    layers = [0, 0, 0]
    cores = [0, 0, 0]

    def counted(function, counts, i):
        def call(*args):
            counts[i] += 1
            return function(*args)

        return call

    for i, layer in enumerate(model.decoder.layers.values()):
        layer.mlp.register_forward_pre_hook(counted(lambda *_: None, layers, i))
        layer.self_attention.core = counted(layer.self_attention.core, cores, i)
    loss_and_grads(model)
    assert (layers, cores) == (layer_runs, core_runs)
    logits_of(model)
    assert layers == [n + 1 for n in layer_runs]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        LLAMA,
        dict(position_embedding_type="rope", rotary_interleaved=True),
        dict(position_embedding_type="none"),
    ],
    ids=["learned", "llama", "interleaved", "none"],
)
def test_documents_are_as_if_alone(flags):
    """With reset positions and masks a packed row equals its documents run one by one."""
    model = tiny_model(torch.float64, scramble=True, **flags)
    (ids, _) = tokens()
    cuts = [(0, 5, 16), (0, 11, 12, 16)]
    positions = torch.zeros(2, 16, dtype=torch.long)
    documents = torch.zeros(2, 16, dtype=torch.long)
    for row, bounds in enumerate(cuts):
        for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            positions[row, start:stop] = torch.arange(stop - start)
            documents[row, start:stop] = number
    packed = logits_of(model, position_ids=positions, document_ids=documents)
    for row, bounds in enumerate(cuts):
        for start, stop in zip(bounds, bounds[1:], strict=False):
            alone = model(ids[row : row + 1, start:stop])[0]
            torch.testing.assert_close(packed[row, start:stop], alone, rtol=1e-11, atol=1e-11)
    assert (packed - logits_of(model)).abs().max() > 1e-3


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_takes_positions_per_sample(interleaved):
    """Positions 4 i divided by 4 are positions i; each row has its own."""
    flags = dict(
        position_embedding_type="rope", rotary_interleaved=interleaved, max_position_embeddings=64
    )
    plain = tiny_model(torch.float64, scramble=True, **flags)
    stretched = tiny_model(
        torch.float64, scramble=True, rotary_seq_len_interpolation_factor=4, **flags
    )
    positions = torch.stack((4 * torch.arange(16), torch.arange(16)))
    packed = logits_of(stretched, position_ids=positions)
    expected = logits_of(plain)
    torch.testing.assert_close(packed[0], expected[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(packed[1], logits_of(stretched)[1], rtol=1e-11, atol=1e-11)
    assert (packed[1] - expected[1]).abs().max() > 1e-3


def test_tied_output_is_one_parameter():
    model = tiny_model(torch.float64)
    assert model.output_layer.weight is model.embedding.word_embeddings.weight
    _, tied = loss_and_grads(model)
    untied = tiny_model(torch.float64, untie_embeddings_and_output_weights=True)
    with torch.no_grad():
        untied.output_layer.weight.copy_(untied.embedding.word_embeddings.weight)
    _, two = loss_and_grads(untied)
    name = "embedding.word_embeddings.weight"
    torch.testing.assert_close(
        tied[name], two[name] + two["output_layer.weight"], rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize("flags", [{}, dict(LLAMA, add_mlp_bias=True)], ids=["tied", "gated"])
def test_gradients_may_go_straight_into_a_buffer(flags):
    """With `main_grad` in place matrices add to it themselves and the rest arrives as .grad:
    together the same."""
    _, expected = loss_and_grads(tiny_model(**flags))
    model = tiny_model(**flags)
    (ids, labels) = tokens()
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    for _ in range(2):
        model(ids, labels=labels).mean().backward()
    for p in model.parameters():
        total = p.main_grad if p.grad is None else p.main_grad + p.grad
        torch.testing.assert_close(total / 2, expected[p.sharding.name], rtol=1e-4, atol=1e-7)
    assert model.decoder.layers["0"].mlp.linear_fc1.weight.grad is None


@pytest.mark.parametrize("flags", [{}, LLAMA], ids=["gpt2", "llama"])
def test_too_long_a_sequence_is_refused(flags):
    with pytest.raises(ValueError, match=r"\b17 .*\b16 .*--max-position-embeddings"):
        tiny_model(**flags)(tokens(1, 17)[0])


def test_stages_hold_global_layer_numbers_and_chain():
    """Chunks of a model, each built alone, give the loss of the whole."""
    for flags in ({}, LLAMA):
        whole = tiny_model(num_layers=4, **flags)
        first, middle, last = (
            tiny_model(num_layers=4, layers=layers, **flags)
            for layers in (range(0, 1), range(1, 3), range(3, 4))
        )
        assert list(middle.decoder.layers) == ["1", "2"] and list(last.decoder.layers) == ["3"]
        assert [chunk.embedding is not None for chunk in (first, middle, last)] == [
            True,
            False,
            False,
        ]
        assert [chunk.output_layer is not None for chunk in (first, middle, last)] == [
            False,
            False,
            True,
        ]
        assert last.output_layer.weight.sharding.partial == (() if flags else ("ends",))
        ids, labels = tokens()
        chained = last(None, labels=labels, hidden=middle(ids, hidden=first(ids)))
        assert torch.equal(chained, whole(ids, labels=labels))


def test_a_chunk_without_embedding_needs_hidden_states():
    with raises(ValueError, "extras-missing"):
        tiny_model(layers=range(1, 2))(tokens()[0])


def test_an_attention_mask_is_refused():
    """It would be ignored: attention is causal, inside documents where these are given."""
    ids, labels = tokens()
    model = tiny_model()
    losses = model(ids, None, None, labels=labels)
    assert torch.equal(losses, model(ids, labels=labels))
    with raises(ValueError, "attention-mask-given", "document_ids"):
        model(ids, None, torch.ones(2, 1, 16, 16, dtype=torch.bool), labels=labels)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        dict(fp32_residual_connection=True),
        dict(fp32_residual_connection=True, apply_residual_connection_post_layernorm=True),
    ],
    ids=str,
)
def test_the_number_format_between_chunks(flags):
    hidden = tiny_model(torch.bfloat16, layers=range(0, 2), **flags)(tokens()[0])
    assert hidden.dtype == hidden_dtype(tiny_config(**flags), torch.bfloat16)
    assert hidden.dtype == (torch.float32 if len(flags) == 1 else torch.bfloat16)


def test_what_was_built_is_checked(monkeypatch):
    from tests.core.model import tiny

    monkeypatch.setattr(
        tiny,
        "parameter_table",
        lambda model, padded, vocab: [
            *parameter_table(model, padded, vocab),
            *parameter_table(tiny_config(num_layers=1, qk_layernorm=True), padded, vocab)[5:7],
        ],
    )
    with pytest.raises(AssertionError, match=r"q_layernorm\.weight"):
        tiny_model()
