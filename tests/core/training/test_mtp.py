"""A step with multi-token prediction against the same arithmetic written out in float64: document by
document, each depth on its own tokens alone."""

import pytest
import torch
import torch.nn.functional as F

from megatron.model.blocks.module import LayerInputs
from megatron.training.run import Run
from megatron.training.step import evaluate, train_step
from tests import problems
from tests.core.training.tiny_run import EOD, make_run, micro_batches, samples
from tests.forkrun import run_ranks
from tests.runs import NO_DROPOUT, SMALL, plot, train, with_flags

FACTOR = 0.7
MTP = dict(
    mtp_num_layers=2,
    mtp_loss_scaling_factor=FACTOR,
    position_embedding_type="rope",
    normalization="RMSNorm",
    untie_embeddings_and_output_weights=True,
)
DOCUMENTS = dict(reset_attention_mask=True, reset_position_ids=True)
CUTS = {
    "whole rows": {},
    "no loss behind a document": dict(eod_mask_loss=True),
    "documents": DOCUMENTS,
    "documents, no loss behind them, tied": dict(
        **DOCUMENTS, eod_mask_loss=True, untie_embeddings_and_output_weights=False
    ),
    "experts": dict(num_experts=4, moe_aux_loss_coeff=(0.0,), add_bias_linear=False),
}


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def pieces(run: Run, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each document, or of each row."""
    found = []
    for row in tokens:
        inputs, labels = row[:-1], row[1:]
        ends = [i + 1 for i, token in enumerate(inputs.tolist()) if token == EOD]
        ends = [*(ends if run.rules.reset_attention_mask else ()), len(inputs)]
        start = 0
        for end in ends:
            if end > start:
                found.append((inputs[start:end], labels[start:end]))
            start = end
    return found


def by_formula(run: Run, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """(sum of losses, tokens that count, of these those that this depth and all before it predict) of
    the loss and of each depth."""
    model = run.model[0]
    table = model.embedding.word_embeddings.weight
    sums = [[table.new_zeros(()), table.new_zeros(()), 0] for _ in range(3)]
    for inputs, labels in pieces(run, tokens):
        counts = inputs != EOD if run.rules.eod_mask_loss else torch.ones_like(inputs, dtype=bool)
        x = F.embedding(inputs, table).unsqueeze(1)
        state = model.decoder(x, LayerInputs(), len(inputs))
        right = torch.ones_like(inputs, dtype=bool)
        for k in range(3):
            size = len(inputs) - k
            if size < 1:
                break
            if k:
                m = model.mtp.layers[k - 1]
                later = rms(F.embedding(inputs[k:], table).unsqueeze(1), m.enorm.weight)
                both = torch.cat((later, rms(state[:size], m.hnorm.weight)), -1)
                rotary = model.mtp.rotary(size, None)
                state = m.transformer_layer(both @ m.eh_proj.weight.T, LayerInputs(rotary), {})
                state = rms(state, m.final_layernorm.weight)
            logits = (state @ model.output_layer.weight.T)[:, 0, : model.vocab_size]
            losses = F.cross_entropy(logits, labels[k:], reduction="none")
            keep = counts[k:]
            if k:
                right = right[:size] & (logits.argmax(-1) == labels[k:])
            for at, value in enumerate(((losses * keep).sum(), keep.sum(), (right & keep).sum())):
                sums[k][at] = sums[k][at] + value
    return [tuple(one) for one in sums]


@pytest.mark.parametrize("micro_batch", [1, pytest.param(4, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("flags", CUTS.values(), ids=CUTS)
def test_a_step_by_the_formula(flags, micro_batch):
    """The mean loss and, for the gradients alone, the factor times the mean of the means of the
    depths, each over its own tokens of the whole batch."""
    run = make_run(**MTP | flags, micro_batch_size=micro_batch)
    tokens = samples()
    main, *depths = by_formula(run, tokens)
    means = [total / count for total, count, _ in depths]
    run.buffers.zero()
    (main[0] / main[1] + FACTOR * sum(means) / 2).backward()
    norm = run.buffers.flat.norm().item()
    got = train_step(run, plot().forward_step, micro_batches(tokens, micro_batch), 1)
    assert got.loss == pytest.approx((main[0] / main[1]).item(), rel=1e-12)
    assert got.grad_norm == pytest.approx(norm, rel=1e-11)
    for k, (mean, (_, count, right)) in enumerate(zip(means, depths, strict=True), 1):
        assert got.metrics[f"mtp_{k} loss"] == pytest.approx(mean.item(), rel=1e-12)
        assert got.metrics[f"mtp_{k} acceptance"] == pytest.approx((right / count).item())


def test_an_evaluation_is_without_it():
    with_it, without = make_run(**MTP), make_run(**MTP | dict(mtp_num_layers=None))
    results = [
        evaluate(run, plot().forward_step, micro_batches(samples(8), 2), 4, lambda text: None)
        for run in (with_it, without)
    ]
    assert results[0] == results[1] and list(results[0]) == ["lm loss"]


def step_of_rank(rank: int, world: int, layout: dict) -> tuple:
    run = make_run(rank, world, **MTP, **DOCUMENTS, eod_mask_loss=True, **layout)
    rows = samples().split(4 // run.plan.data_parallel_size)
    size = run.config.training.micro_batch_size
    batches = micro_batches(rows[run.runtime.ctx.dp.rank], size)
    got = train_step(run, plot().forward_step, batches, 1)
    return got.loss, got.grad_norm, *(got.metrics[name] for name in sorted(got.metrics))


@pytest.mark.parametrize(
    "layout",
    [
        dict(pipeline_model_parallel_size=2),
        dict(micro_batch_size=1),
        dict(context_parallel_size=2),
        dict(tensor_model_parallel_size=2, sequence_parallel=True),
    ],
    ids=["pp2", "dp2", "cp2", "tp2 sp"],
)
def test_ranks_count_the_tokens_of_all(layout):
    """Documents of unequal length on each."""
    first, second = run_ranks(2, step_of_rank, layout)
    assert first == second
    assert first == pytest.approx(step_of_rank(0, 1, {}), rel=1e-11)


def without_extras(batch, model):
    return model(batch.tokens, labels=batch.labels).sum(), batch.tokens.numel()


def test_a_forward_step_that_forgets_the_depths_is_told():
    with problems.raises(ValueError, "extras-missing", "--mtp-num-layers"):
        train_step(make_run(**MTP), without_extras, micro_batches(samples(), 2), 1)


@pytest.mark.campaign
def test_modules_that_a_checkpoint_lacks_start_from_initial_values(tmp_path):
    """The rest goes on where it was saved, with the optimizer; one module is kept of two."""
    flags = [
        *with_flags(SMALL, "--lr-decay-style", "constant", "--lr-warmup-iters", "0"),
        *(*NO_DROPOUT, "--mock-data", "--position-embedding-type", "rope"),
        *("--save-interval", "2"),
    ]
    for depths, train_iters, load in (((), 2, None), (("1",), 4, "0"), (("2",), 6, "1")):
        folder = tmp_path / f"run{''.join(depths) or 0}"
        words = [*flags, "--train-iters", str(train_iters), "--save", str(folder / "save")]
        words += ["--mtp-num-layers", *depths] if depths else []
        words += ["--load", str(tmp_path / f"run{load}/save")] if load else []
        run = train(folder, words)
        assert run.rows[-1]["iteration"] == train_iters
        new = f"mtp.layers.{int(depths[0]) - 1}" if depths else None
        said = [
            f"mtp.layers.{k}" for k in range(2) if f"has no mtp.layers.{k}:" in run.first_rank_log
        ]
        assert said == ([new] if new else [])
