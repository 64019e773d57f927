"""The z-loss of the output logits in whole runs: the same in every layout, against the formula, and in
the gradient alone."""

from pathlib import Path

import pytest

from megatron.training.step import train_step
from tests.core.parity.layouts import CP, OVERLAP, PP, SP, TP, UNTIED, argv
from tests.core.training.tiny_run import make_run, micro_batches, samples
from tests.problems import raises
from tests.runs import Finished, plot, train, write_text

COEFF = 0.05
FLAGS = ("--z-loss-coeff", str(COEFF), "--fp64")
LAYOUTS = {
    "tp2": (TP, "2"),
    "tp2 sp": (TP, "2", SP),
    "cp2": (CP, "2"),
    "pp2": (PP, "2"),
    "dp2, distributed optimizer, overlap": OVERLAP,
}
LOGGED = ("lm_loss", "output_z_loss", "grad_norm")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


@pytest.fixture(scope="module")
def one(data, tmp_path_factory) -> Finished:
    return train(tmp_path_factory.mktemp("one"), argv(data, UNTIED, 4, *FLAGS))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "tp2" else pytest.mark.campaign) for n in LAYOUTS],
)
def test_a_layout_gives_the_numbers_of_one_process(name, data, one, tmp_path: Path):
    run = train(tmp_path, argv(data, UNTIED, 4, *FLAGS, *LAYOUTS[name]), 2)
    for ours, expected in zip(run.series(*LOGGED), one.series(*LOGGED), strict=True):
        assert ours == pytest.approx(expected, rel=1e-10)
    assert [loss for *_, loss in run.evaluations] == pytest.approx(
        [loss for *_, loss in one.evaluations], rel=1e-10
    )


def test_the_first_loss_is_the_one_without_and_the_gradient_another(data, one, tmp_path):
    plain = train(tmp_path, argv(data, UNTIED, 4, "--fp64"))
    assert "output_z_loss" not in plain.rows[0] and "output_z_loss" in one.log
    assert plain.rows[0]["lm_loss"] == one.rows[0]["lm_loss"]
    assert abs(plain.rows[0]["grad_norm"] - one.rows[0]["grad_norm"]) > 1e-3


def test_a_step_is_that_of_torchs_logsumexp():
    """Tokens that do not count have no z-loss either."""
    run = make_run(z_loss_coeff=COEFF, eod_mask_loss=True)
    results = train_step(run, plot().forward_step, micro_batches(samples(), 2), 1)

    other = make_run(eod_mask_loss=True)

    def forward_step(batch, model):
        logits = model(batch.tokens, batch.position_ids, **batch.extras)
        log_z = logits.logsumexp(-1)
        losses = log_z - logits.gather(-1, batch.labels[..., None])[..., 0]
        z_loss = (log_z.square() * batch.loss_mask).sum()
        lm_loss = (losses * batch.loss_mask).sum()
        tokens = batch.loss_mask.sum()
        report = {"lm loss": (lm_loss, tokens), "output_z_loss": (z_loss, tokens)}
        return lm_loss + COEFF * z_loss, tokens, report

    expected = train_step(other, forward_step, micro_batches(samples(), 2), 1)
    assert results.loss == pytest.approx(expected.loss, rel=1e-12)
    assert results.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
    assert results.metrics == pytest.approx(expected.metrics, rel=1e-12)
    theirs = dict(other.model[0].named_parameters())
    for name, weight in run.model[0].named_parameters():
        assert (weight - theirs[name]).abs().max() < 1e-12, name


def test_a_loss_of_the_logits_has_no_z_loss():
    run = make_run(z_loss_coeff=COEFF)

    def forward_step(batch, model):
        logits = model(batch.tokens, batch.position_ids, **batch.extras)
        return logits.sum(), logits.numel()

    with raises(ValueError, "extras-missing", "--z-loss-coeff"):
        train_step(run, forward_step, micro_batches(samples(), 2), 1)
