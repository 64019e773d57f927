"""The same numbers in every layout: whole runs of pretrain_gpt.main on gloo ranks against one
process, step by step."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron.checkpoint import reading
from megatron.config.moe import ROUTER_SUMS
from megatron.inference.load_model import open_trained_model
from megatron.parallel import ddp
from megatron.training import routers
from tests.core.parity.differences import PADDED, largest_difference, weight_difference
from tests.core.parity.layouts import (
    A2A,
    CAMPAIGN,
    CASES,
    CHUNKS,
    CP,
    DEEP,
    DELTA_MOE,
    DELTA_PATTERN,
    DISTRIBUTED,
    DOCUMENTS,
    DROPOUT,
    EP,
    EP_MOE,
    ETP,
    EXACT,
    FULL,
    GATHER,
    GEMMA,
    GPT2,
    GPT_OSS,
    LAST,
    LAYOUT,
    LAYOUTS,
    MLA_MOE,
    MOE,
    MTP,
    OVERLAP,
    PP,
    RARE,
    SCORES,
    SELECTIVE,
    SP,
    STOP,
    STOPPED,
    SWEEP,
    TP,
    UNTIED,
    WINDOWS,
    Case,
    argv,
    saved,
)
from tests.forkrun import ROOT
from tests.runs import Finished, same_tensors, train, with_flags, write_text

ROW = "| {} | {} | {} |{}\n"
PAGE = ROOT / "docs/parity.md"
HEAD = """# Numerical parity of parallel layouts

Largest relative difference from a single-process run, over all steps of complete runs of `pretrain_gpt.py` on gloo ranks
(float64 unless noted). Abbreviations: tp tensor, sp sequence, cp context, pp pipeline, dp data parallelism; vpp virtual
pipeline stages; the number is the size.

`pytest -m "" tests/core/parity/test_layouts.py` writes this page; `make test` and `make test-ci` run some of the layouts,
`make test-all` these and more (`RARE` and `SWEEP` in tests/core/parity/layouts.py). They fail if a difference exceeds 1e-10
(float32: 1e-5 for the loss, 1e-3 for the gradient norm).

| layout | ranks | steps | loss | gradient norm |
|---|---|---|---|---|
"""
EXPERTS = """
## Models with experts

These models have balancing losses, a z-loss and a gated shared expert; where `ep` (expert) or `etp` (expert-tensor
parallelism) is in the name also an expert bias and group-limited routing. Router losses: balancing losses and z-loss, of each
layer and their means. Weights: after the last step, with the optimizer state, relative to the largest value of each tensor.
The tests also compare the number of tokens of each expert in each step, which is equal in float64.

| layout | ranks | steps | loss | router losses | gradient norm | weights |
|---|---|---|---|---|---|---|
"""
# relative, of loss and gradient norm
TOLERANCE = {"--fp64": (1e-10, 1e-10), "": (1e-5, 1e-3)}

ROUTER_METRICS = {
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
    "dropped_share",
    "max_expert_load",
}

Reference = Callable[[Case], Finished]


class Differences(NamedTuple):
    """The largest relative differences from one process: of all steps, and of the weights after the
    last one. Without experts the last two are None."""

    loss: float
    norm: float
    router_losses: float | None
    weights: float | None

    def cells(self) -> str:
        """The numbers as cells of a table."""
        numbers = (self.loss, self.router_losses, self.norm, self.weights)
        return "".join(f" {number:.0e} |" for number in numbers if number is not None)


Table = dict[str, Differences]

# of add-ons, in the page and by their mark
ADDED: dict[str, Case] = {}
for _file in sorted(ROOT.glob("addons/*/tests/parity_cases.py")):
    _name = ".".join(_file.relative_to(ROOT).with_suffix("").parts)
    ADDED |= importlib.import_module(_name).CASES


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


@pytest.fixture(scope="module")
def reference(data, tmp_path_factory) -> Reference:
    """The run of one process that a case is compared with; those that agree share it."""
    found: dict[tuple, Finished] = {}

    def run(case: Case) -> Finished:
        key = (case.model, case.steps, case.precision)
        if key not in found:
            folder = tmp_path_factory.mktemp("one")
            flags = argv(data, case.model, case.steps, *case.precision.split())
            found[key] = train(folder, [*flags, *records(case, folder)], hook=count_tokens)
        return found[key]

    return run


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """The differences by layout; those of all that CI has make the page."""
    found: Table = {}
    yield found
    often = CASES | CAMPAIGN | RARE | ADDED
    if found.keys() >= often.keys():
        tables = {False: HEAD, True: EXPERTS}
        for name, case in often.items():
            cells = found[name].cells()
            row = ROW.format(name.replace("|", "\\|"), case.world, case.steps, cells)
            tables[has_experts(case)] += row
        PAGE.write_text("".join(tables.values()))


def has_experts(case: Case) -> bool:
    """Has the model experts?"""
    return "--num-experts" in case.model


def records(case: Case, folder: Path) -> tuple[str, ...]:
    """Flags that save the last step of models with experts, and where the case says so."""
    if not has_experts(case) and not case.saves:
        return ()
    return ("--save", str(folder / "save"), "--save-interval", str(case.steps))


def count_tokens() -> None:
    """Hook: rank 0 writes the number of tokens of each expert, a line for each step."""

    def metrics(model, totals):
        if os.environ["RANK"] == "0":
            size = len(ROUTER_SUMS) + model.num_experts
            rows = [totals.routers[at : at + size] for at in range(0, len(totals.routers), size)]
            file = Path(sys.stdout.name).with_name("tokens.jsonl")  # next to this rank's log
            with file.open("a") as out:
                out.write(json.dumps([row[len(ROUTER_SUMS) :] for row in rows]) + "\n")
        return of_step(model, totals)

    of_step = routers.metrics
    routers.metrics = metrics


def tokens_of_experts(run: Finished) -> list[list[list[float]]]:
    """Of each step, of each MoE layer, the number of tokens of each expert."""
    return [json.loads(line) for line in (run.folder / "tokens.jsonl").read_text().splitlines()]


# their gradients are 0 but for rounding, which may make any of them exactly 0
KEY_BIASES = 2 * 32


def check(
    case: Case,
    folder: Path,
    data: str,
    reference: Reference,
) -> Differences:
    """Assert that the layout trains like one process; the differences."""
    one = reference(case)
    flags = argv(data, case.model, case.steps, *case.precision.split(), *case.layout, *case.only)
    run = train(
        folder / "run", [*flags, *records(case, folder / "run")], case.world, hook=count_tokens
    )
    assert [row["iteration"] for row in run.rows] == list(range(1, case.steps + 1))
    losses, norms = (largest_difference(run, one, key) for key in ("lm_loss", "grad_norm"))
    limit, norm_limit = TOLERANCE[case.precision]
    found = Differences(losses, norms, None, None)
    names = [name for name in one.rows[0] if name.startswith("mtp_")]
    assert bool(names) == ("--mtp-num-layers" in case.model)
    for row, expected in zip(run.rows, one.rows, strict=True):
        told, wanted = ([each[name] for name in names] for each in (row, expected))
        assert told == pytest.approx(wanted, rel=limit)
    if has_experts(case):
        found = Differences(losses, norms, *check_experts(case, run, one))
        assert found.router_losses <= limit and found.weights <= norm_limit, found
    elif case.saves:
        assert weight_difference(run, one) <= limit
    print(f"largest relative differences over {case.steps} steps: {found}")
    assert losses <= limit and norms <= norm_limit
    assert one.rows[0]["grad_norm"] > 0.25, "clipping must be on"
    assert run.series("consumed_samples", "learning_rate") == one.series(
        "consumed_samples", "learning_rate"
    )
    if case.precision == "--fp64":
        evaluated, expected = ([loss for *_, loss in each.evaluations] for each in (run, one))
        assert evaluated == pytest.approx(expected, rel=limit) and evaluated
        zeros = [
            (float(a["zeros"]), float(b["zeros"]))
            for a, b in zip(run.lines, one.lines, strict=True)
        ]
        assert zeros and max(abs(a - b) for a, b in zeros) <= KEY_BIASES, (
            "a wrong count is off by a row at least"
        )
    return found


def check_experts(case: Case, run: Finished, one: Finished) -> tuple[float, float]:
    """Assert that each expert has the tokens that it has in one process; the largest differences of
    router losses and of weights."""
    names = {name for name in one.rows[0] if name in ROUTER_METRICS or name.startswith("moe/")}
    assert len(names) >= 5
    if case.precision == "--fp64":
        tokens = tokens_of_experts(run)
        assert len(tokens) == case.steps and tokens == tokens_of_experts(one)
    losses = max(largest_difference(run, one, name) for name in names)
    return losses, weight_difference(run, one)


# what make test has: each kind of parallelism, each optimizer
QUICK = (
    "tp2 sp dp2, rotary swiglu RMSNorm GQA",
    "dp2, distributed optimizer",
    "cp2, untied, masked documents",
    "pp2",
    "ep2 tp2 sp, all-to-all, experts, latent attention",
    "dp2, experts",
    "etp2 dp2, experts, distributed optimizer, overlap",
    "pp2 vpp2, experts, three balancing losses",
    "tp2 sp, Muon",
)


def mark(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """The tier of a layout."""
    if name in RARE | SWEEP:
        return (pytest.mark.sweep,)
    return () if name in QUICK else (pytest.mark.campaign,)


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in LAYOUTS | ADDED])
def test_a_layout_gives_the_numbers_of_one_process(name, tmp_path, data, reference, table):
    table[name] = check((LAYOUTS | ADDED)[name], tmp_path, data, reference)


@pytest.mark.campaign
def test_a_vocabulary_that_pads_otherwise_on_every_number_of_ranks(tmp_path):
    """50257 ids are 50304, 50432 and 50688 rows at TP 1, 2 and 4: dummies are outside the
    softmax."""
    text = write_text(tmp_path / "text", 100, vocab=50256)
    flags = argv(
        text,
        (),
        5,
        "--fp64",
        "--vocab-size",
        "50257",
        "--make-vocab-size-divisible-by",
        "128",
        "--hidden-size",
        "16",
    )
    one = train(tmp_path / "one", flags)
    assert "vocabulary 50,257, padded to 50,304" in one.first_rank_log
    for ranks, padded in ((2, "50,432"), (4, "50,688")):
        run = train(tmp_path / f"tp{ranks}", [*flags, TP, str(ranks), SP], ranks)
        assert f"padded to {padded}" in run.first_rank_log
        worst = [largest_difference(run, one, key) for key in ("lm_loss", "grad_norm")]
        print(f"TP {ranks}: largest relative differences {worst}")
        assert max(worst) <= 1e-10


OVERFLOWING = (
    *("--fp16", "--initial-loss-scale", str(2.0**24)),
    *("--hysteresis", "1", "--loss-scale-window", "2"),
)


@pytest.fixture(scope="module")
def overflowing(data, tmp_path_factory) -> Finished:
    """One process whose loss scale is too large at first."""
    return train(tmp_path_factory.mktemp("overflowing"), argv(data, (), 14, *OVERFLOWING))


@pytest.mark.parametrize(
    "layout",
    [
        *(
            pytest.param(layout, marks=pytest.mark.campaign)
            for layout in ((TP, "2"), (TP, "2", SP), (PP, "2"))
        ),
        OVERLAP,
    ],
    ids="-".join,
)
def test_overflows_are_agreed_upon(layout, data, overflowing, tmp_path):
    """fp16: the same steps are skipped and the loss scales are the same, whichever rank's part
    overflows."""
    one = overflowing
    run = train(tmp_path / "run", argv(data, (), 14, *OVERFLOWING, *layout), 2)
    keys = ("iteration", "loss_scale", "skipped", "skip_reason", "learning_rate")
    assert run.series(*keys) == one.series(*keys)
    skipped = [row["skipped"] for row in one.rows]
    assert skipped[0] == 1 and 0 in skipped and 1 in skipped[skipped.index(0) :], (
        "first many, then one after a rise"
    )
    assert largest_difference(run, one, "lm_loss") < 5e-3


def overflow_on_rank_1() -> None:
    """In the second step one value of what only rank 1 updates is infinite."""
    overflow("1", lambda p: p.sharding.splits or hasattr(p, "span"))


def overflow_on_rank_0() -> None:
    """... of the first layer, which pipeline stage 0 holds."""
    overflow("0", lambda p: p.sharding.name.startswith("decoder.layers.0."))


def overflow(rank: str, where: Callable[[torch.nn.Parameter], object]) -> None:
    """Plant the infinite value."""
    reduce = ddp.GradBuffers.reduce
    steps = []

    def reduced(self: ddp.GradBuffers) -> None:
        reduce(self)
        steps.append(1)
        if len(steps) == 2 and os.environ["RANK"] == rank:
            next(p for p in self.owned if p.numel() and where(p)).main_grad.view(-1)[3] = float(
                "inf"
            )

    ddp.GradBuffers.reduce = reduced


@pytest.mark.parametrize(
    "layout, hook",
    [
        ((TP, "2"), overflow_on_rank_1),
        pytest.param(DISTRIBUTED, overflow_on_rank_1, marks=pytest.mark.campaign),
        pytest.param((PP, "2"), overflow_on_rank_0, marks=pytest.mark.campaign),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout, hook, data, tmp_path):
    """Rank 1 writes the metrics, rank 0 the counters of the checkpoint: both have skipped."""
    flags = argv(
        data, (), 4, "--fp16", "--initial-loss-scale", "1024", "--hysteresis", "1", *layout
    )
    run = train(tmp_path / "run", [*flags, *saved(tmp_path / "run")], 2, hook=hook)
    assert [row["skipped"] for row in run.rows] == [0, 1, 0, 0]
    counters = reading.load(run.save).state.optimizer
    assert counters["step"] == 3 and counters["grad_scaler"]["scale"] == 512


@pytest.mark.campaign
@pytest.mark.parametrize(
    "model, layout", [(UNTIED, (TP, "2", SP)), (DEEP, (PP, "2", CHUNKS, "2")), (UNTIED, (CP, "2"))]
)
def test_a_resume_in_the_same_layout_is_exact(model, layout, data, tmp_path):
    """With dropout, stopped in the middle: bit for bit the run that was not."""
    flags = with_flags(argv(data, model, LAST, *layout), *DROPOUT)
    straight = train(tmp_path / "a", [*flags, *saved(tmp_path / "a")], 2)
    train(tmp_path / "b", [*flags, *saved(tmp_path / "b"), *STOPPED], 2)
    resumed = train(
        tmp_path / "b", [*flags, *saved(tmp_path / "b"), "--load", str(tmp_path / "b/save")], 2
    )
    assert resumed.resumes[-1] == STOP
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())


@pytest.mark.campaign
def test_a_resume_in_another_layout_gives_the_same_numbers(data, tmp_path):
    """Saved at TP 2, where the vocabulary has other padding: gone on with at TP 1, TP 4, and TP 2 x
    DP 2."""
    case = Case(GPT2, 1, (), steps=LAST)
    flags = argv(data, case.model, case.steps, case.precision)
    one = train(tmp_path / "one", [*flags, *saved(tmp_path / "one")])
    train(tmp_path / "two", [*flags, *saved(tmp_path / "two"), *STOPPED, TP, "2", SP], 2)
    padded = "embedding.word_embeddings.weight"
    read = open_trained_model(
        str(tmp_path / "two/save"), device="cpu"
    ).model.embedding.word_embeddings.weight
    written = reading.load(tmp_path / "two/save").reader().read(padded)
    assert (
        len(read) == 216 and len(written) == 224 and torch.equal(read[:211], written[:211].float())
    )
    layouts = ((1, ()), (4, (TP, "4", SP)), (4, (TP, "2")), (4, (TP, "2", SP, CP, "2")))
    go_on(one, flags, tmp_path / "two/save", "2 ranks (tensor 2)", layouts)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "before", "written_by", "layouts"),
    [
        (
            WINDOWS,
            (CP, "2"),
            "2 ranks (context 2)",
            ((1, ()), (4, (TP, "2", SP, CP, "2")), (3, (PP, "3"))),
        ),
        pytest.param(
            UNTIED,
            (CP, "2"),
            "2 ranks (context 2)",
            ((1, ()), (4, (CP, "4")), (2, (TP, "2", SP)), (4, (CP, "2", *GATHER))),
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            SCORES,
            (TP, "2", SP),
            "2 ranks (tensor 2)",
            ((1, ()), (4, (TP, "4", SP)), (2, (CP, "2", *DISTRIBUTED))),
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            MOE,
            (TP, "2", SP),
            "2 ranks (tensor 2)",
            ((1, ()), (4, (TP, "2", SP, PP, "2")), (4, (CP, "2", *DISTRIBUTED))),
            marks=pytest.mark.sweep,
        ),
        (
            EP_MOE,
            (EP, "4", *A2A, *DISTRIBUTED),
            "4 ranks (data 4)",
            ((1, ()), (4, (TP, "2", SP, PP, "2")), (2, (EP, "2", *A2A, *OVERLAP))),
        ),
        pytest.param(
            EP_MOE,
            (ETP, "1", TP, "2", SP, *DISTRIBUTED),
            "2 ranks (tensor 2)",
            ((4, (ETP, "2", EP, "2", *A2A, *DISTRIBUTED)), (4, (ETP, "4", TP, "2", SP))),
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            GPT_OSS,
            (ETP, "2", EP, "2", *DISTRIBUTED),
            "4 ranks (data 4)",
            ((1, ()), (2, (TP, "2", SP)), (2, (CP, "2")), (2, (PP, "2"))),
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            GEMMA,
            (TP, "2", SP),
            "2 ranks (tensor 2)",
            ((1, ()), (3, (PP, "3")), (2, (CP, "2", *DISTRIBUTED))),
            marks=pytest.mark.sweep,
        ),
        (
            MLA_MOE,
            (TP, "2", SP),
            "2 ranks (tensor 2)",
            ((1, ()), (2, (PP, "2")), (4, (CP, "2", EP, "2", *DISTRIBUTED))),
        ),
        (
            (*DELTA_MOE, *DOCUMENTS),
            (TP, "2", SP, ETP, "1"),
            "2 ranks (tensor 2)",
            ((1, ()), (2, (PP, "2")), (2, (EP, "2", *A2A, *DISTRIBUTED))),
        ),
        (
            (*MTP, *DOCUMENTS),
            (PP, "2", LAYOUT, "Ett|mmL"),
            "2 ranks (pipeline 2)",
            ((1, ()), (2, (TP, "2", SP)), (2, (CP, "2", *DISTRIBUTED))),
        ),
        (DELTA_PATTERN, (TP, "2", SP), "2 ranks (tensor 2)", ((2, (PP, "2")),)),
    ],
    ids=[
        "windows",
        "masked documents",
        "sinks, caps",
        "tp",
        "ep",
        "etp",
        "gpt-oss",
        "Gemma 3",
        "latent attention",
        "gated delta nets",
        "multi-token prediction",
        "a pattern of blocks",
    ],
)
def test_a_run_saved_in_one_layout_resumes_in_another(
    model, before, written_by, layouts, data, tmp_path
):
    flags = argv(data, model, LAST, "--fp64")
    one = train(tmp_path / "one", [*flags, *saved(tmp_path / "one")])
    stopped = (*saved(tmp_path / "two"), *STOPPED, *before)
    train(tmp_path / "two", [*flags, *stopped], int(written_by[0]))
    go_on(one, flags, tmp_path / "two/save", written_by, layouts)


def go_on(
    one: Finished, flags: list[str], checkpoint: Path, written_by: str, layouts: tuple
) -> None:
    """Assert that in each of the layouts a checkpoint of step STOP trains on as one process
    did."""
    for world, layout in layouts:
        folder = checkpoint.parent.parent / f"on-{world}{''.join(layout)}"
        run = train(folder, [*flags, *layout, *saved(folder), "--load", str(checkpoint)], world)
        assert written_by in run.first_rank_log
        rest = one.rows[STOP:]
        assert [row["iteration"] for row in run.rows] == [*range(STOP + 1, LAST + 1)]
        for row, expected in zip(run.rows, rest, strict=True):
            assert row["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-10)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)
        tensors = run.tensors()
        for name, tensor in one.tensors().items():
            rows = 211 if name.endswith(PADDED) else len(tensor)
            assert tensors[name][:rows].allclose(tensor[:rows], rtol=1e-7, atol=1e-12), name
            assert not tensors[name][rows:].any()


@pytest.mark.campaign
@pytest.mark.parametrize(
    "before, after",
    [
        ((PP, "2"), [(1, ()), (2, (TP, "2")), (2, (PP, "2", CHUNKS, "2"))]),
        ((PP, "2", CHUNKS, "2"), [(1, ()), (2, (PP, "2")), (4, (PP, "4"))]),
        pytest.param((TP, "2", SP), [(2, (PP, "2"))], marks=pytest.mark.sweep),
        pytest.param((), [(2, (PP, "2", CHUNKS, "2"))], marks=pytest.mark.sweep),
        (
            (PP, "2", LAYOUT, "E|tt|t|tL"),
            [(1, ()), (2, (PP, "2")), (4, (PP, "4", LAYOUT, "E|(tt|)*2,L"))],
        ),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_a_resume_with_other_stages_gives_the_same_numbers(before, after, data, tmp_path):
    """... and a checkpoint of stages opens as a model; of tied ends one copy is written."""
    flags = argv(data, DEEP, LAST, "--fp64")
    one = train(tmp_path / "one", [*flags, *saved(tmp_path / "one")])
    train(
        tmp_path / "two",
        [*flags, *saved(tmp_path / "two"), *STOPPED, *before],
        2 if before else 1,
    )
    parts = [
        dict(
            open_trained_model(
                str(tmp_path / name / "save"), STOP, device="cpu"
            ).model.named_parameters()
        )
        for name in ("one", "two")
    ]
    assert parts[0].keys() == parts[1].keys() and all(
        p.allclose(parts[1][name], rtol=1e-6, atol=1e-7) for name, p in parts[0].items()
    )
    for world, layout in after:
        folder = tmp_path / f"{world}-{len(layout)}"
        run = train(
            folder, [*flags, *layout, *saved(folder), "--load", str(tmp_path / "two/save")], world
        )
        assert [row["iteration"] for row in run.rows] == [*range(STOP + 1, LAST + 1)]
        for row, expected in zip(run.rows, one.rows[STOP:], strict=True):
            assert row["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-10)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)
        tensors = run.tensors()
        assert tensors.keys() == one.tensors().keys()
        assert all(
            tensors[name].shape[1:] == tensor.shape[1:]
            and tensors[name][:211].allclose(tensor[:211], rtol=1e-7, atol=1e-12)
            for name, tensor in one.tensors().items()
        )


@pytest.mark.campaign
def test_a_batch_that_grows_in_a_pipeline(data, tmp_path):
    """4 samples a step, then 8: two and four micro-batches, both of which interleaving takes."""
    flags = argv(data, DEEP, 8, "--fp64")
    at = flags.index("--train-iters")
    flags = [
        *flags[:at],
        *flags[at + 2 :],
        "--train-samples",
        "64",
        "--rampup-batch-size",
        "4",
        "4",
        "24",
    ]
    at = flags.index("--lr-warmup-iters")
    flags = [*flags[:at], *flags[at + 2 :]]
    one = train(tmp_path / "one", flags)
    run = train(tmp_path / "run", [*flags, PP, "2", CHUNKS, "2"], 2)
    assert [size for [size] in run.series("global_batch_size")][:1] == [4] and run.rows[-1][
        "global_batch_size"
    ] == 8
    assert max(largest_difference(run, one, key) for key in ("lm_loss", "grad_norm")) <= 1e-10


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((TP, "2"), marks=pytest.mark.sweep),
        (TP, "2", SP),
        pytest.param((PP, "2"), marks=pytest.mark.sweep),
        (PP, "2", CHUNKS, "2", *DEEP),
        (CP, "2"),
        pytest.param((CP, "2", *GATHER), marks=pytest.mark.sweep),
    ],
    ids="-".join,
)
def test_dropout_repeats_in_a_layout_with_and_without_recompute(layout, data, tmp_path):
    flags = with_flags(argv(data, GPT2, 4, *layout), *DROPOUT)
    runs = [
        train(
            tmp_path / str(n),
            [*flags, *again, "--save", str(tmp_path / str(n) / "save"), "--save-interval", "4"],
            2,
        )
        for n, again in enumerate(((), SELECTIVE, FULL))
    ]
    for run in runs[1:]:
        assert run.series(*EXACT) == runs[0].series(*EXACT)
        same_tensors(run.tensors(), runs[0].tensors())
    plain = train(tmp_path / "plain", argv(data, GPT2, 4, *layout), 2)
    assert plain.series("lm_loss") != runs[0].series("lm_loss")
