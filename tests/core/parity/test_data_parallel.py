"""The same numbers in every layout: data-parallel ranks and micro-batch sizes against one process,
in float64."""

import pytest

from tests.runs import NO_DROPOUT, SMALL, train, write_text

STEPS = 5
LAYOUTS = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]


def argv(data: str, micro_batch: int, extra: list[str]) -> list[str]:
    return [
        *SMALL,
        *NO_DROPOUT,
        "--fp64",
        "--data-path",
        data,
        "--split",
        "90,10,0",
        "--train-iters",
        str(STEPS),
        "--micro-batch-size",
        str(micro_batch),
        *extra,
    ]


MASKED = ["--eod-mask-loss", "--reset-attention-mask", "--reset-position-ids"]


@pytest.mark.parametrize(
    ("extra", "layouts"),
    [
        pytest.param([], LAYOUTS, id="plain", marks=pytest.mark.campaign),
        pytest.param(MASKED, [(2, 1)], id="masked loss"),
        pytest.param(MASKED, [(4, 2)], id="masked loss, 4 ranks", marks=pytest.mark.campaign),
    ],
)
def test_layouts_agree_in_float64(tmp_path, extra, layouts):
    data = write_text(tmp_path / "text", 400)
    reference = train(tmp_path / "one", argv(data, 2, extra)).series(
        "lm_loss", "grad_norm", "consumed_samples"
    )
    assert len(reference) == STEPS
    for world, micro_batch in layouts:
        got = train(tmp_path / f"{world}x{micro_batch}", argv(data, micro_batch, extra), world)
        for (loss, norm, consumed), (other_loss, other_norm, other) in zip(
            reference, got.series("lm_loss", "grad_norm", "consumed_samples"), strict=True
        ):
            assert other_loss == pytest.approx(loss, rel=1e-10), (world, micro_batch)
            assert other_norm == pytest.approx(norm, rel=1e-10), (world, micro_batch)
            assert other == consumed
