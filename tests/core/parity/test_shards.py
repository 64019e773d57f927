"""Shards of the optimizer in whole runs: exact resumes, checkpoints that any layout reads, overlap
that changes no bit."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.parity.layouts import (
    BUCKETS,
    CP,
    DISTRIBUTED,
    DROPOUT,
    ETP,
    EXACT,
    GPT2,
    INSTANCES,
    LAST,
    LLAMA,
    OVERLAP,
    PP,
    SP,
    STOP,
    STOPPED,
    TP,
    UNTIED,
    WHOLE,
    ZERO2,
    ZERO3,
    argv,
    saved,
)
from tests.runs import Finished, same_tensors, train, with_flags, write_text

EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.01 --disable-bias-linear".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


@pytest.mark.parametrize(
    "layout",
    [
        (2, OVERLAP),
        pytest.param((4, (*OVERLAP, *INSTANCES, "--bf16")), marks=pytest.mark.campaign),
        pytest.param((2, (*OVERLAP, *WHOLE, "--bf16")), marks=pytest.mark.sweep),
        pytest.param(
            (4, (TP, "2", SP, *DISTRIBUTED, "--fp16", "--initial-loss-scale", "1024")),
            marks=pytest.mark.sweep,
        ),
        pytest.param((2, (*EXPERTS, ETP, "1", TP, "2", SP, *OVERLAP)), marks=pytest.mark.campaign),
    ],
    ids=lambda x: " ".join(x[1]),
)
def test_a_resume_of_shards_is_exact(layout, data, tmp_path):
    """The distributed optimizer with dropout, stopped in the middle: bit for bit the run that was
    not."""
    world, more = layout
    flags = with_flags(argv(data, UNTIED, LAST, *more), *DROPOUT)
    straight = train(tmp_path / "a", [*flags, *saved(tmp_path / "a")], world)
    train(tmp_path / "b", [*flags, *saved(tmp_path / "b"), *STOPPED], world)
    resumed = train(
        tmp_path / "b", [*flags, *saved(tmp_path / "b"), "--load", str(tmp_path / "b/save")], world
    )
    assert resumed.resumes[-1] == STOP
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())


SHARDED = {
    "one": (1, ()),
    "dp4": (4, BUCKETS),
    "dp2": (2, (*DISTRIBUTED, "--ddp-bucket-size", "1000")),
    "tp2": (2, (TP, "2", SP)),
    "tp2 dp2": (4, (TP, "2", *OVERLAP)),
    "instances": (4, (*DISTRIBUTED, *INSTANCES)),
    "whole dp2": (2, (*DISTRIBUTED, *WHOLE, "--ddp-bucket-size", "1000")),
    "whole dp4": (4, (*OVERLAP, *WHOLE)),
    "pp2 dp2": (4, (PP, "2", *OVERLAP)),
    "cp2 dp2": (4, (CP, "2", *DISTRIBUTED)),
    "zero2 dp2": (2, ZERO2),
    "zero3 dp4": (4, ZERO3),
    "zero3 pp2 dp2": (4, (PP, "2", *ZERO3)),
    "zero3 tp2 instances": (8, (TP, "2", SP, *ZERO3, *INSTANCES)),
}


@pytest.fixture(scope="module")
def unsharded(data, tmp_path_factory) -> Finished:
    """The run of one process that was not stopped."""
    folder = tmp_path_factory.mktemp("one")
    return train(folder, [*argv(data, GPT2, LAST, "--fp64"), *saved(folder)])


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory) -> Callable[[str], Path]:
    """The checkpoint of a run in one of these layouts that stopped after STOP steps."""

    @functools.cache
    def checkpoint(name: str) -> Path:
        world, layout = SHARDED[name]
        folder = tmp_path_factory.mktemp("stopped")
        flags = [*argv(data, GPT2, LAST, "--fp64"), *layout, *saved(folder)]
        return train(folder, [*flags, *STOPPED], world).save

    return checkpoint


@pytest.mark.campaign
@pytest.mark.parametrize(
    "path",
    [
        ("dp4", "one"),
        pytest.param(("dp4", "dp2"), marks=pytest.mark.sweep),
        pytest.param(("dp4", "instances"), marks=pytest.mark.sweep),
        ("one", "dp4"),
        ("tp2 dp2", "dp4"),
        ("whole dp4", "whole dp2"),
        pytest.param(("whole dp2", "dp4"), marks=pytest.mark.sweep),
        ("pp2 dp2", "cp2 dp2"),
        ("zero2 dp2", "zero3 pp2 dp2"),
        ("zero3 dp4", "one"),
        pytest.param(("zero3 pp2 dp2", "zero3 dp4"), marks=pytest.mark.sweep),
        pytest.param(("zero3 tp2 instances", "dp2"), marks=pytest.mark.sweep),
        pytest.param(("tp2 dp2", "zero3 tp2 instances"), marks=pytest.mark.sweep),
    ],
    ids=" to ".join,
)
def test_shards_are_read_in_every_other_layout(path, data, unsharded, stopped, tmp_path):
    """Stopped in one layout and gone on with in another: the numbers, weights and optimizer state
    of one process."""
    before, after = path
    world, layout = SHARDED[after]
    flags = [*argv(data, GPT2, LAST, "--fp64"), *layout, *saved(tmp_path / "run")]
    run = train(tmp_path / "run", [*flags, "--load", str(stopped(before))], world)
    assert [row["iteration"] for row in run.rows] == [*range(STOP + 1, LAST + 1)]
    for row, expected in zip(run.rows, unsharded.rows[STOP:], strict=True):
        assert row["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-10)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)
    tensors = run.tensors()
    whole = unsharded.tensors()
    assert tensors.keys() == whole.keys()
    for name, tensor in whole.items():
        rows = 211 if name.endswith("embedding.word_embeddings.weight") else len(tensor)
        assert tensors[name][:rows].allclose(tensor[:rows], rtol=1e-7, atol=1e-12), name


@pytest.mark.campaign
@pytest.mark.parametrize(
    "precision",
    [
        ("--bf16",),
        ("--fp16", "--initial-loss-scale", "1024", "--accumulate-allreduce-grads-in-fp32"),
    ],
    ids=" ".join,
)
def test_shards_change_no_bit_of_a_run_in_half_precision(precision, data, tmp_path):
    """Two ranks with and without the distributed optimizer and its overlap: without clipping, the
    very same run."""
    flags = with_flags(argv(data, LLAMA, 5, *precision), "--clip-grad", "0")
    runs = [
        train(
            tmp_path / str(n),
            [*flags, *more, "--save", str(tmp_path / str(n) / "save"), "--save-interval", "5"],
            2,
        )
        for n, more in enumerate(((), DISTRIBUTED, OVERLAP))
    ]
    for run in runs[1:]:
        assert run.series("iteration", "lm_loss", "loss_scale") == runs[0].series(
            "iteration", "lm_loss", "loss_scale"
        )
        same_tensors(run.tensors(), runs[0].tensors())


@pytest.mark.parametrize(
    "world, more",
    [
        pytest.param(2, (), marks=pytest.mark.sweep),
        pytest.param(4, DISTRIBUTED, marks=pytest.mark.sweep),
        pytest.param(4, (*DISTRIBUTED, *INSTANCES), marks=pytest.mark.campaign),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else None,
)
def test_overlap_changes_no_bit_in_fp32(world, more, data, tmp_path):
    """... nor does another try; nor another size of buckets, without clipping (shards cut otherwise
    round the norm otherwise) and with shards (four ranks without them sum in an order that depends
    on the bucket)."""
    gather = ("--overlap-param-gather",) if more else ()
    overlap = ("--overlap-grad-reduce", *gather)
    small = ("--ddp-bucket-size", "3000")
    sets = (
        ((), (), overlap),
        (small, (*small, *overlap)),
        (("--clip-grad", "0"), ("--clip-grad", "0", *small, *overlap)),
    )
    for number, ways in enumerate(sets):
        runs = [
            train(
                tmp_path / f"{number}{n}",
                with_flags(
                    argv(data, UNTIED, 4, *more),
                    *way,
                    "--save-interval",
                    "4",
                    "--save",
                    str(tmp_path / f"{number}{n}/save"),
                ),
                world,
            )
            for n, way in enumerate(ways)
        ]
        for run in runs[1:]:
            same_tensors(run.tensors(), runs[0].tensors())
            assert run.series("iteration", "lm_loss", "grad_norm") == runs[0].series(
                "iteration", "lm_loss", "grad_norm"
            )
