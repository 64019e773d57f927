"""Tokens, losses and right labels of each data set of a blend: names, counts, layouts."""

import functools
import math
from collections import Counter

import numpy as np
import pytest

from megatron.data.subsets import shortened
from megatron.training import build_data
from tests import recorder
from tests.core.config.checks.checked_flags import checked
from tests.core.parity.layouts import CP, DISTRIBUTED, PP, TP
from tests.problems import code_of
from tests.runs import NO_DROPOUT, SMALL, allow_workers, train, with_flags, write_text


def test_names_are_what_the_prefixes_have_of_their_own():
    assert shortened(["/d/en/text", "/d/cn/text"]) == ["en/text", "cn/text"]
    assert shortened(["/d/en_text", "/d/cn_text"]) == ["en_text", "cn_text"]
    assert shortened(["/d/a", "/d/a", "/d/deep/a"]) == ["a", "a#2", "deep/a"]
    assert shortened(["/d/one"]) == ["one"] and shortened(["--mock-data"]) == ["mock-data"]


def test_accuracy_is_counted_where_subsets_are():
    [problem] = checked("--log-accuracy")[0]
    assert problem.startswith("--log-accuracy") and code_of(problem) == "flag-needs-other-flag"
    assert checked("--log-accuracy --log-subsets")[0] == []


@pytest.fixture(scope="module")
def blend(tmp_path_factory) -> list[str]:
    """Two corpora that differ in what is easy to learn, in unequal parts."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "en").mkdir()
    (folder / "cn").mkdir()
    return [
        "0.7",
        write_text(folder / "en/text", 300),
        "0.3",
        write_text(folder / "cn/text", 200, seed=3),
    ]


def argv(blend: list[str], *more: str) -> list[str]:
    words = [
        *SMALL,
        *NO_DROPOUT,
        "--data-path",
        *blend,
        "--split",
        "90,10,0",
        "--train-iters",
        "5",
        "--fp64",
        "--eod-mask-loss",
        "--log-subsets",
        "--log-accuracy",
        "--lr",
        "0.02",
    ]
    return with_flags(words, *more)


def note_samples(path: str) -> None:
    """Write down which data set each sample of the run is of."""
    make = build_data.build_data

    def made(*args):
        data = make(*args)
        np.save(path, [data.train.source(index)[0] for index in range(40)])
        return data

    build_data.build_data = made


@pytest.fixture(scope="module")
def alone(blend, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    hook = functools.partial(note_samples, str(folder / "sources.npy"))
    return train(folder, argv(blend), hook=hook), folder


@pytest.mark.campaign
def test_the_parts_are_the_step_and_go_to_the_right_data_set(alone):
    run, folder = alone
    sources = np.load(folder / "sources.npy")
    for row, mine in zip(run.rows, sources.reshape(5, 8), strict=True):
        tokens = [row[f"tokens/{name}"] for name in ("en/text", "cn/text")]
        for number, count in enumerate(tokens):
            samples = int((mine == number).sum())
            # ends have no loss
            assert 32 * samples * 0.8 < count <= 32 * samples and (count == 0) == (samples == 0)
        total = sum(
            (row[f"loss/{name}"] or 0.0) * count
            for name, count in zip(("en/text", "cn/text"), tokens, strict=True)
        )
        assert (
            total / sum(tokens)
            == pytest.approx(row["lm_loss"], rel=1e-12)
            == row["loss_from_metric"]
        )
        assert row["perplexity"] == pytest.approx(math.exp(row["lm_loss"]), rel=1e-12)
    assert run.rows[-1]["acc"] > 0.0 and "num_samples_in_batch" not in run.rows[0]


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout",
    [
        (2, DISTRIBUTED),
        (2, (TP, "2")),
        (2, (CP, "2")),
        (2, (PP, "2")),
        (1, ("--num-workers", "1")),
    ],
    ids=lambda x: " ".join(x[1]),
)
def test_every_layout_counts_alike(layout, blend, alone, tmp_path):
    world, words = layout
    run = train(
        tmp_path / "run",
        argv(blend, *words),
        world,
        hook=allow_workers,
    )
    for row, other in zip(run.rows, alone[0].rows, strict=True):
        for name in ("en/text", "cn/text"):
            assert (
                row[f"tokens/{name}"] == other[f"tokens/{name}"]
                and row[f"acc/{name}"] == other[f"acc/{name}"]
            )
            assert row[f"loss/{name}"] == pytest.approx(other[f"loss/{name}"], rel=1e-10)
        assert row["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-10)


@pytest.mark.campaign
def test_counting_changes_no_number(blend, alone, tmp_path):
    words = [
        word
        for word in argv(blend, "--exit-interval", "3")
        if word not in ("--log-subsets", "--log-accuracy")
    ]
    plain = train(tmp_path / "plain", words)
    assert plain.series("lm_loss", "grad_norm") == alone[0].series("lm_loss", "grad_norm")[:3]
    assert not any("/" in key for key in plain.rows[0])


@pytest.mark.campaign
@pytest.mark.parametrize("layout", [DISTRIBUTED, (TP, "2"), (PP, "2")], ids=" ".join)
def test_no_collective_of_their_own(layout, blend, tmp_path):
    """As many of each kind with as without; numbers travel in those that are there."""
    seen = []
    for name, counted in (("plain", False), ("counted", True)):
        words = argv(blend, *layout, "--exit-interval", "2")
        words = [word for word in words if counted or not word.startswith(("--log-s", "--log-a"))]
        train(tmp_path / name, words, 2, hook=recorder.watch)
        calls = [recorder.read(tmp_path / name, rank)[1] for rank in range(2)]
        seen.append([Counter((call.operation, call.ranks) for call in each) for each in calls])
    assert seen[0] == seen[1] and all(seen[0])
