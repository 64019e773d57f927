"""Multi-head latent attention: by its formula in fp64, what its flags change, what backward keeps, the
cache of latents."""

import math
import re
from dataclasses import replace

import pytest
import torch

from megatron.config.muon import MuonConfig
from megatron.config.plan.muon_matrices import stacks
from megatron.config.plan.parameters import parameter_table
from megatron.inference.cached_model import CachedModel
from megatron.inference.engine import Engine
from megatron.model.blocks.module import LayerInputs, Recompute
from megatron.training.logging.flops import count_flops
from tests.core.config.checks.checked_flags import BASE, checked
from tests.core.model.tiny import loss_and_grads, tiny_config, tiny_model, tokens
from tests.live_memory import LiveMemory
from tests.problems import assert_problem

HEADS, PLAIN, ROTARY, VALUE, LATENT, HIDDEN = 4, 6, 4, 5, 10, 32
MLA = dict(
    multi_latent_attention=True,
    kv_lora_rank=LATENT,
    qk_head_dim=PLAIN,
    qk_pos_emb_head_dim=ROTARY,
    v_head_dim=VALUE,
    normalization="RMSNorm",
    add_bias_linear=False,
    position_embedding_type="rope",
)
YARN = dict(
    rotary_scaling_factor=4.0,
    original_max_position_embeddings=8,
    mscale=0.7,
    mscale_all_dim=1.3,
    beta_fast=4.0,
)
MODELS = {
    "queries of hidden states": {},
    "latents of queries, norms": dict(q_lora_rank=12, qk_layernorm=True, latent_norm_epsilon=0.1),
    "YaRN": dict(q_lora_rank=12, **YARN),
    "YaRN, scores as they are": dict(**YARN | dict(mscale=1.0, mscale_all_dim=0.0)),
    "values wider than keys": dict(qk_layernorm=True, v_head_dim=PLAIN + ROTARY + 3),
}


def yarn_angles(flags: dict) -> tuple[torch.Tensor, float, float]:
    """Frequencies [ROTARY / 2], what cosines and sines are multiplied by, and what scores are."""
    factor = flags.get("rotary_scaling_factor", 1.0)
    freqs = 10000.0 ** (-2 * torch.arange(ROTARY // 2, dtype=torch.float64) / ROTARY)

    def channel(turns: float) -> float:
        length = flags["original_max_position_embeddings"]
        return ROTARY * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    if factor == 1.0:
        return freqs, 1.0, 1.0
    low = max(0, math.floor(channel(flags["beta_fast"])))
    high = min(ROTARY - 1, math.ceil(channel(1.0)))
    for i in range(ROTARY // 2):
        slow = min(1.0, max(0.0, (i - low) / (high - low if high > low else 0.001)))
        freqs[i] *= slow / factor + 1 - slow
    of_angles = 1 + 0.1 * flags["mscale"] * math.log(factor)
    of_scores = 1 + 0.1 * flags["mscale_all_dim"] * math.log(factor)
    return freqs, of_angles / of_scores, of_scores**2


def by_formula(attention: torch.nn.Module, x: torch.Tensor, flags: dict) -> torch.Tensor:
    """x [s, h] -> [s, h], head by head and query by query."""
    p = {name: value.detach() for name, value in attention.named_parameters()}
    freqs, length, sharper = yarn_angles(flags)
    value = flags.get("v_head_dim", VALUE)
    eps = flags.get("latent_norm_epsilon", 1e-5)

    def normed(name: str, latents: torch.Tensor) -> torch.Tensor:
        if not flags.get("qk_layernorm"):
            return latents
        return latents * torch.rsqrt(latents.square().mean(-1, keepdim=True) + eps) * p[name]

    def rotated(rows: torch.Tensor) -> torch.Tensor:
        """Neighbours are the real and the imaginary part."""
        angles = torch.arange(len(rows)).double()[:, None] * freqs
        turns = torch.polar(torch.full_like(angles, length), angles)
        return torch.view_as_real(
            torch.view_as_complex(rows.unflatten(1, (-1, 2))) * turns
        ).flatten(1)

    if "q_lora_rank" in flags:
        queries = normed("q_layernorm.weight", x @ p["linear_q_down_proj.weight"].T)
        queries = queries @ p["linear_q_up_proj.weight"].T
    else:
        queries = x @ p["linear_q_proj.weight"].T
    down = x @ p["linear_kv_down_proj.weight"].T
    latents = normed("kv_layernorm.weight", down[:, :LATENT].contiguous())
    shared = rotated(down[:, LATENT:].contiguous())
    up = (latents @ p["linear_kv_up_proj.weight"].T).unflatten(1, (HEADS, -1))
    results = []
    for head, q in enumerate(queries.unflatten(1, (HEADS, -1)).unbind(1)):
        q = torch.cat((q[:, :PLAIN], rotated(q[:, PLAIN:].contiguous())), 1)
        k = torch.cat((up[:, head, :PLAIN], shared), 1)
        rows = []
        for i in range(len(x)):
            scores = k[: i + 1] @ q[i] * sharper / math.sqrt(PLAIN + ROTARY)
            rows.append(scores.softmax(0) @ up[: i + 1, head, PLAIN : PLAIN + value])
        results.append(torch.stack(rows))
    return torch.cat(results, 1) @ p["linear_proj.weight"].T


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_by_the_formula(flags):
    model = tiny_model(torch.float64, scramble=True, **MLA | flags)
    x = torch.randn(9, 2, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    attention = model.decoder.layers["0"].self_attention
    inputs = LayerInputs(model.decoder.rotary[0](9, None))
    got = attention(x, inputs, {})
    for sample in (0, 1):
        want = by_formula(attention, x[:, sample], flags)
        torch.testing.assert_close(got[:, sample], want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_gradients_are_differences(flags):
    """Of a few numbers of each weight, by differences of the loss."""
    model = tiny_model(torch.float64, num_layers=1, scramble=True, **MLA | flags)
    _, grads = loss_and_grads(model)
    ids, labels = tokens()
    step = 1e-5
    with torch.no_grad():
        for p in model.decoder.layers["0"].self_attention.parameters():
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


@pytest.mark.parametrize("core", [(), ("core_attn",)])
def test_what_is_made_of_latents_is_made_again(core):
    """The same gradients, and less is kept."""
    sizes = MLA | dict(q_lora_rank=12, qk_layernorm=True, qk_head_dim=64, v_head_dim=48)
    again = Recompute("selective", modules=("mla_up_proj", *core))
    models = [
        tiny_model(torch.float64, recompute=recompute, **sizes)
        for recompute in (Recompute("selective", modules=core), again)
    ]
    results = [loss_and_grads(model) for model in models]
    assert torch.equal(results[0][0], results[1][0])
    for name, grad in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], grad, rtol=1e-13, atol=1e-16)
    live = []
    ids, labels = tokens()
    for model in models:
        with LiveMemory() as memory:
            losses = model(ids, labels=labels)
        live.append(memory.live())
        del losses
    numbers = HEADS * (2 * (64 + ROTARY) + 48) - ROTARY  # the rotated key is kept instead
    assert live[0] - live[1] == 3 * ids.numel() * 8 * numbers


def test_documents_and_dropout():
    """In chunks: positions of other documents change nothing."""
    model = tiny_model(torch.float64, scramble=True, **MLA)
    ids, _ = tokens()
    other = ids.clone()
    other[:, :6] = (ids[:, :6] + 1) % 50
    documents = (torch.arange(16) >= 6).int().expand(2, -1)
    with torch.no_grad():
        first, second = (model(t, document_ids=documents)[:, 6:] for t in (ids, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("absorbs", [True, False], ids=["absorbed", "keys and values"])
def test_generation_from_latents(flags, absorbs, monkeypatch):
    """Equal to the full pass: a prompt, more of it, single tokens, unequal lengths; whichever way the
    latents are used."""
    model = tiny_model(torch.float64, scramble=True, **MLA | flags)
    ids, _ = tokens()
    with torch.no_grad():
        expected = model(ids)
    cached = CachedModel(model, 2, 16)
    for layer in model.decoder.layers.values():
        attention = layer.self_attention
        monkeypatch.setattr(attention, "absorbs", lambda count: absorbs)
        (kept,) = attention.cache._tensors.values()
        assert kept.shape == (2, 16, LATENT + ROTARY)
    got = cached.forward([ids[0, :3].tolist(), ids[1, :5].tolist()], [0, 0])
    torch.testing.assert_close(got, torch.stack((expected[0, 2], expected[1, 4])))
    got = cached.forward([ids[0, 3:7].tolist(), ids[1, 5:7].tolist()], [3, 5])
    torch.testing.assert_close(got, expected[:, 6])
    for n in range(7, 16):
        got = cached.forward(ids[:, n : n + 1].tolist(), [n, n])
        torch.testing.assert_close(got, expected[:, n])


def test_bytes_of_the_cache():
    """Layers x rows x length x (latent + rotary key) x 4, as docs/serving.md says; the tensors have them,
    and the engine reports them."""
    heads = 2 * 4 * (PLAIN + ROTARY)  # of keys and values whose heads are as wide
    for flags, per_token in ((MLA, LATENT + ROTARY), (dict(kv_channels=PLAIN + ROTARY), heads)):
        model = tiny_model(**flags)
        engine = Engine(model, 3, 12)
        layers = model.decoder.layers.values()
        tensors = [t for each in layers for t in each.self_attention.cache._tensors.values()]
        assert sum(t.nbytes for t in tensors) == len(layers) * 3 * 12 * per_token * 4
        nbytes = f"{len(layers) * 3 * 12 * per_token * 4:,}"
        assert re.findall(r"\d[\d,]*\d|\d", engine.size) == ["3", "12", nbytes]


def test_a_long_prompt_in_several_threads():
    """Rotary positions in blocks of rows, which other threads write in inference mode."""
    length = 1024
    sizes = dict(seq_length=length, max_position_embeddings=length, num_layers=1, v_head_dim=8)
    model = tiny_model(scramble=True, **MLA | sizes | dict(qk_pos_emb_head_dim=256))
    ids, _ = tokens(length=length)
    with torch.no_grad():
        expected = model(ids)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = CachedModel(model, 2, length).forward(ids.tolist(), [0, 0])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, expected[:, -1], rtol=1e-4, atol=1e-4)


def test_few_tokens_are_absorbed():
    """As many as make the products with queries and results cheaper than keys and values."""
    flags = dict(kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    model = tiny_model(num_layers=1, **MLA | flags)
    attention = model.decoder.layers["0"].self_attention
    assert [attention.absorbs(count) for count in (1, 170, 171, 4096)] == [True, True, False, False]


def test_matrices_and_replicated_weights():
    """Muon's are those of Megatron-LM: each weight is one. Weights to latents are whole on every
    tensor-parallel rank, and partial where ranks see other tokens."""
    model = tiny_config(**MLA, q_lora_rank=12, qk_layernorm=True)
    table = {
        spec.name.removeprefix("decoder.layers.0.self_attention."): spec
        for spec in parameter_table(model, 64)
        if spec.name.startswith("decoder.layers.0.self_attention.")
    }
    assert {name: spec.shape for name, spec in table.items()} == {
        "linear_q_down_proj.weight": (12, HIDDEN),
        "q_layernorm.weight": (12,),
        "linear_q_up_proj.weight": (HEADS * (PLAIN + ROTARY), 12),
        "linear_kv_down_proj.weight": (LATENT + ROTARY, HIDDEN),
        "kv_layernorm.weight": (LATENT,),
        "linear_kv_up_proj.weight": (HEADS * (PLAIN + VALUE), LATENT),
        "linear_proj.weight": (HIDDEN, HEADS * VALUE),
    }
    for name, spec in table.items():
        split = "up_proj" in name or name == "linear_proj.weight"
        assert bool(spec.splits) == split
        assert spec.partial_axes(True) == (() if split else ("tp",))
        assert spec.partial_axes(False) == ()
        matrices = stacks(MuonConfig(), spec.matrices, spec.shape)
        assert matrices == ([] if "norm" in name else [(1, *spec.shape)])


def test_flops():
    """Of a token: the products of attention."""
    model = tiny_config(**MLA, q_lora_rank=12)
    mixer = model.layer(0).mixer
    assert mixer.core_flops() == 2 * 16 * HEADS * (PLAIN + ROTARY + VALUE)
    assert count_flops(model, 64).core == 3 * mixer.core_flops()


NAMES = "--multi-latent-attention --position-embedding-type rope"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("", None),
        ("--context-parallel-size 2", None),
        ("--tensor-model-parallel-size 2", None),
        ("--rope-type rope", None),
        ("--rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1", None),
        ("--qk-pos-emb-head-dim 7", "rotary-channels-odd"),
        ("--kv-lora-rank 0", "value-out-of-range"),
        ("--rope-type longrope", "flags-exclude-each-other"),
        ("--rotary-interleaved", "flags-exclude-each-other"),
        ("--rotary-percent 0.5", "flags-exclude-each-other"),
        ("--no-rope-freq 2", "flags-exclude-each-other"),
        ("--window-size 7 0", "flags-exclude-each-other"),
        ("--softmax-type learnable", "flags-exclude-each-other"),
        ("--attn-logit-softcapping 5", "flags-exclude-each-other"),
        ("--softmax-scale 0.1", "flags-exclude-each-other"),
        ("--use-mup", "flags-exclude-each-other"),
        ("--num-attention-heads 3 --tensor-model-parallel-size 2", "tensor-parallel-does-not"),
    ],
)
def test_the_flags(flags, code):
    problems, _ = checked(f"{NAMES} {flags}", 2, base=f"{BASE} --min-lr 0 --attention-dropout 0")
    assert bool(problems) == (code is not None), problems
    if code is not None:
        assert any(code in problem for problem in problems), problems


def test_flags_without_effect():
    """Of other attention, and of latents without them."""
    _, notes = checked(f"{NAMES} --kv-channels 16", base=BASE)
    assert_problem(
        next(n for n in notes if "kv-channels" in n), "flag-has-no-effect", "--kv-channels"
    )
    _, notes = checked("--q-lora-rank 8", base=BASE)
    assert_problem(next(n for n in notes if "q-lora" in n), "flag-has-no-effect", "--q-lora-rank")
    model = tiny_config(**MLA, rotary_scaling_factor=1.0, mscale_all_dim=1.0)
    assert model.yarn is None and model.has_yarn
    assert replace(model, rope_type="rope").has_yarn is False
