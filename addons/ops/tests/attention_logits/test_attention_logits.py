"""--log-max-attention-logit and --qk-clip: the largest scores by the formula, what the clip makes of
them, and both in layouts of several ranks."""

import pytest
import torch

from megatron.addons.ops.attention_logits.logits import METRIC, AttentionLogits
from megatron.arguments import config_from
from megatron.features.registry import RunConfig
from megatron.kernels.attention_spec import AttentionSpec
from megatron.kernels.block_attention import KeyBlock, block_maxima
from megatron.model.blocks.mtp.module import Depths, rolled
from megatron.parallel.context import ParallelContext
from tests.core.config.checks.checked_flags import BASE, checked
from tests.core.kernels.attention_formula import SCALE, documents, inputs
from tests.core.model.tiny import DEFAULTS, tiny_model, tokens
from tests.core.parity.differences import largest_difference, weight_difference
from tests.core.parity.layouts import (
    CP,
    DISTRIBUTED,
    FULL,
    GATHER,
    HEADS,
    LLAMA,
    MLA,
    MTP,
    MUON,
    OVERLAP,
    PP,
    SP,
    TP,
    UP_AGAIN,
    argv,
    saved,
)
from tests.problems import assert_problem
from tests.runs import train, write_text

LATENT = dict(
    multi_latent_attention=True,
    kv_lora_rank=10,
    qk_head_dim=6,
    qk_pos_emb_head_dim=4,
    v_head_dim=5,
    position_embedding_type="rope",
    normalization="RMSNorm",
)
KINDS = {
    "latents of queries": LATENT | dict(q_lora_rank=12, qk_layernorm=True),
    "queries of hidden states": LATENT,
    "grouped queries, biases": dict(group_query_attention=True, num_query_groups=2),
    "heads": dict(position_embedding_type="rope"),
    "output gates": dict(
        group_query_attention=True, num_query_groups=2, attention_output_gate=True
    ),
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("ids", [None, documents(150)])
def test_the_largest_scores_by_the_formula(window, ids):
    q, k, v, _ = inputs(150)
    spec = AttentionSpec.of(q, k, v, SCALE, window=window, documents=ids is not None, softcap=0.1)
    keys = k.repeat_interleave(2, 2)
    scores = torch.einsum("ibnd,jbnd->bnij", q, keys) * SCALE
    i = torch.arange(150)
    hidden = i[None] > i[:, None]
    if window:
        hidden = hidden | (i[:, None] - i >= window)
    if ids is not None:
        hidden = hidden | (ids[:, None, :, None] != ids[:, None, None])
    expected = scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    with torch.no_grad():
        got = block_maxima(q, k, KeyBlock(spec, True, ids, ids))
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("alpha", [0.5, 0.2])
@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_scores_of_clipped_heads_are_the_threshold(flags, alpha):
    """Of one layer, whose input does not change: a key head's largest score becomes the threshold if
    it was above, all else is left alone."""
    model = tiny_model(torch.float64, num_layers=1, scramble=True, **flags)
    ids, labels = tokens()
    model(ids, labels=labels)  # without records
    base = DEFAULTS | flags | dict(num_layers=1, qk_clip=True, qk_clip_alpha=alpha)
    found = []
    for threshold in (1e9, None):
        limit = dict(qk_clip_threshold=threshold or found[0].median())
        config = config_from(RunConfig, base | limit)
        clipped = config.LogitsConfig.qk_clip_threshold
        logits = AttentionLogits(
            config,
            [model],
            ParallelContext(config.parallel),
            "cpu",
            threshold=clipped,
            alpha=alpha,
        )
        with torch.no_grad():
            model(ids, labels=labels)
        assert logits._largest.isneginf().all(), "evaluations are not recorded"
        model(ids, labels=labels)
        found.append(logits._largest[0].clone().view(config.model.query_groups, -1).amax(1))
        logits.close(torch.empty(0))
        assert logits.logged() == {METRIC: found[-1].max().item()}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            logits.rescale(p, p.data)
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        if threshold:
            assert not changed
    assert (found[0] > clipped).any() and (found[0] < clipped).any() or len(found[0]) == 2
    assert {name.rsplit(".", 2)[1] for name in changed} <= {
        *("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
    }
    model(ids, labels=labels)
    after = logits._largest[0].view(len(found[0]), -1).amax(1)
    torch.testing.assert_close(after, found[0].clamp(max=clipped), rtol=1e-6, atol=1e-7)


def test_layers_of_multi_token_prediction_are_clipped_too():
    """Their input does not change where the decoder is left alone."""
    flags = dict(position_embedding_type="rope", mtp_num_layers=1, num_layers=1)
    model = tiny_model(torch.float64, scramble=True, **flags)
    config = config_from(RunConfig, DEFAULTS | flags | dict(qk_clip=True))
    ids, labels = tokens()
    ranks = ParallelContext(config.parallel)
    limit, before = 0.0, torch.empty(0)
    for _ in range(2):
        logits = AttentionLogits(config, [model], ranks, "cpu", threshold=limit, alpha=0.5)
        depths = Depths([(depth, 0.1) for depth in rolled(ids, labels, None, None, 1)])
        model(ids, labels=labels, depths=depths)
        largest = logits._largest[1].clone()
        if limit:
            torch.testing.assert_close(largest, before.clamp(max=limit), rtol=1e-6, atol=1e-7)
            continue
        before, limit = largest, largest.median().item()
        logits._threshold = limit
        logits.close(torch.empty(0))
        for name, p in model.named_parameters():
            if name.startswith("mtp."):
                logits.rescale(p, p.data)
    assert (before > limit).any()


def test_powers_of_the_parts_of_a_latent_head():
    """As published: without rotary positions both sides by powers that add up to 1, with them the
    queries alone; values not."""
    config = config_from(RunConfig, DEFAULTS | KINDS["latents of queries"])
    assert config.model.layer(0).mixer.clipped(0.3) == {
        "linear_q_up_proj.weight": ((6, 0.3), (4, 1.0)),
        "linear_kv_up_proj.weight": ((6, 0.7), (5, 0.0)),
    }


def test_powers_of_the_rows_of_a_query_group():
    """Not of gates and values."""
    config = config_from(RunConfig, DEFAULTS | KINDS["output gates"])
    rows = ((16, 0.3), (16, 0.0), (8, 0.7), (8, 0.0))
    assert set(config.model.layer(0).mixer.clipped(0.3).values()) == {rows}


CLIP = ("--qk-clip", "--qk-clip-threshold", "0.004", "--qk-clip-alpha", "0.3")
LAYOUTS = {
    "tp2 sp": (2, (TP, "2", SP)),
    "cp2": (2, (CP, "2")),
    "cp2 a2a": (2, (CP, "2", *HEADS)),
    "dp2, distributed optimizer, overlap": (2, OVERLAP),
    "tp2, up projections again": (2, (TP, "2", *UP_AGAIN)),
    "pp2, full recompute": (2, (PP, "2", *FULL)),
    "cp2 tp2 sp, all_gather, distributed optimizer": (
        4,
        (CP, "2", TP, "2", SP, *GATHER, *DISTRIBUTED),
    ),
}
MODELS = {
    "latent attention, Muon": ((*MLA, *MUON), LAYOUTS),
    "grouped queries, Adam": ((*LLAMA,), LAYOUTS),
    "multi-token prediction": (MTP, ("tp2 sp", "pp2, full recompute")),
}
CASES = [
    pytest.param(
        model,
        layout,
        marks=()
        if (model[:6], layout)
        in (("latent", "tp2 sp"), ("groupe", "dp2, distributed optimizer, overlap"))
        else (
            pytest.mark.sweep
            if model.startswith("grouped") and layout != "cp2 a2a"
            else pytest.mark.campaign,
        ),
    )
    for model, (_, layouts) in MODELS.items()
    for layout in layouts
    if model.startswith("latent") or "up projections" not in layout
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process, clipped and not, of each model."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_text(folder / "text", 400)
    found = {}

    def run(model, clip):
        key = model, clip
        if key not in found:
            flags = argv(data, (*MODELS[model][0], *clip), 4, "--fp64")
            at = folder / f"{len(found)}"
            found[key] = flags, train(at, [*flags, *saved(at)])
        return found[key]

    return run


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_layout_clips_alike(runs, model, layout, tmp_path):
    flags, one = runs(model, CLIP)
    world, more = LAYOUTS[layout]
    run = train(tmp_path / "run", [*flags, *more, *saved(tmp_path / "run")], world)
    for key in ("lm_loss", "grad_norm", METRIC):
        assert largest_difference(run, one, key) < 1e-10
    assert weight_difference(run, one) < 1e-10


@pytest.mark.campaign
@pytest.mark.parametrize("model", MODELS)
def test_scores_are_logged_without_a_clip(runs, model):
    """They change nothing, and are larger than clipped ones."""
    _, clipped = runs(model, CLIP)
    _, logged = runs(model, ("--log-max-attention-logit",))
    _, plain = runs(model, ())
    assert logged.series("lm_loss", "grad_norm") == plain.series("lm_loss", "grad_norm")
    assert METRIC not in plain.rows[0]
    assert logged.rows[0][METRIC] == clipped.rows[0][METRIC]
    assert logged.rows[-1][METRIC] > 1.05 * clipped.rows[-1][METRIC]


def test_the_flags():
    (problem,), _ = checked("--qk-clip --qk-layernorm")
    assert_problem(problem, "flags-exclude-each-other", "--qk-clip", "--qk-layernorm")
    latent = "--multi-latent-attention --position-embedding-type rope --qk-layernorm"
    assert checked(f"--qk-clip {latent}")[0] == []
    (note,) = checked("--qk-clip-alpha 0.3")[1]
    assert_problem(note, "flag-has-no-effect", "--qk-clip-alpha", "--qk-clip")


def test_scores_are_clipped_where_there_are_some():
    clip = (
        "--experimental-attention-variant gated_delta_net --normalization RMSNorm --qk-clip "
        "--optimizer muon --muon-momentum 0.95 --linear-attention-freq "
    )
    assert checked(f"{clip} 2", base=BASE)[0] == []
    problems, _ = checked(f"{clip} [1,1]", base=BASE)
    assert_problem(problems[0], "flags-exclude-each-other", "--qk-clip")
