"""Every line that a run prints is one of Megatron's templates, or one of few of our own; in
Megatron's order."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import pytest
import torch

from megatron.addons.megatron_cli.tests.log_scraper import LAST, OWN, TEMPLATES, Line, scrape
from megatron.checkpoint import reading
from tests.runs import SMALL, Finished, late_from, stop_in, train, with_flags, write_text

# 11.1, as a single process prints it on a first run that --load finds nothing for.
START = """world size, parameter type, arguments, argument, end of arguments, micro-batches, tokenizer, padded vocab,
distributed, tensor parallel, pipeline parallel, seeds, kernels, kernel, time to initialize, after
initialization, building model, parameters, decay style, no tracker, from random, timers, timer, after model, building
datasets, target sizes, target train, target validation, target test, building GPT datasets, split matrix, index
reader, extract, sequences, documents, build indices, build index, samples, epochs, build indices, build index,
samples, epochs, build indices, build index, samples, epochs, data table, data row, finished datasets, after
dataloaders, done with setup, timers, timer, training, before training"""
ONE_ITERATION = "iteration, timers, timer, dashes, validation, dashes, saving, saved, timers, timer"
END = """after training, evaluating, evaluating iteration, timers, timer, dashes, validation, dashes, evaluating,
evaluating iteration, timers, timer, dashes, validation, dashes"""


def names(text: str) -> list[str]:
    return " ".join(text.split()).split(", ")


def flags(folder: Path, *extra: str) -> list[str]:
    save = str(folder / "save")
    mine = [
        "--data-path",
        str(folder.parent / "text"),
        "--split",
        "80,10,10",
        "--train-iters",
        "4",
        "--eval-interval",
        "2",
        "--eval-iters",
        "2",
        "--save",
        save,
        "--load",
        save,
        "--save-interval",
        "2",
    ]
    return with_flags(with_flags(SMALL, "--log-format", "megatron", *mine), *extra)


def job(folder: Path, *extra: str, world: int = 1, hook=None) -> Finished:
    """A run in `folder`, with data beside it unless `extra` names other data."""
    if "--data-path" not in extra:
        write_text(folder.parent / "text", 260)
    return train(folder, flags(folder, *extra), world, hook=hook)


def go_on(run: Finished, folder: Path, *extra: str, **how) -> Finished:
    """From where another run stopped, with its data, saved elsewhere."""
    return job(
        folder,
        "--data-path",
        str(run.folder.parent / "text"),
        "--load",
        str(run.save),
        *extra,
        **how,
    )


def squeezed(lines: list[Line]) -> list[str]:
    """Names in order; a line that repeats the one before it counts once."""
    return [
        line.name
        for number, line in enumerate(lines)
        if number == 0 or lines[number - 1].name != line.name
    ]


def by_name(lines: list[Line], name: str) -> list[Line]:
    return [line for line in lines if line.name == name]


def fields(lines: list[Line], name: str, *keys: str) -> list[tuple]:
    return [tuple(line.fields[key] for key in keys) for line in by_name(lines, name)]


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Finished:
    """A run of one process from its first line to its last."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return job(
        folder,
        "--log-throughput",
        "--log-params-norm",
        "--log-num-zeros-in-grad",
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Finished:
    """Two ranks in fp16, iteration 3 skipped, all timers."""
    folder = tmp_path_factory.mktemp("two") / "run"
    return job(
        folder,
        "--fp16",
        "--train-range-to-skip",
        "3",
        "3",
        "--timing-log-level",
        "2",
        "--initial-loss-scale",
        "65536",
        world=2,
    )


def test_order_of_the_first_run(first):
    """11.1, line by line, to the last one."""
    two_iterations = ["iteration", *names(ONE_ITERATION)]
    # said where nothing was compiled
    lines = [line for line in scrape(first.log) if line.name != "index helpers"]
    assert squeezed(lines) == names(START) + squeezed(
        [Line(name, {}, "") for name in two_iterations + two_iterations + names(END)]
    )


def test_numbers_of_the_first_run(first):
    lines = scrape(first.log)
    assert fields(lines, "world size", "world", "dp", "cp", "tp", "pp") == [("1",) * 5]
    assert fields(lines, "micro-batches", "n") == [("4",)]
    assert fields(lines, "padded vocab", "size", "dummies", "padded") == [("211", "5", "216")]
    weights = 216 * 32 + 32 * 32 + 2 * (12 * 32**2 + 13 * 32) + 64
    assert fields(lines, "parameters", "tp", "pp", "n") == [("0", "0", str(weights))]
    assert [fields(lines, f"target {split}", "n") for split in ("train", "validation", "test")] == [
        [("32",)],
        [("48",)],
        [("16",)],
    ]
    assert fields(lines, "decay style", "style") == [("cosine",)]
    assert fields(lines, "sequences", "n") == fields(lines, "documents", "n") == [("260",)]
    assert fields(lines, "extract", "what") == [
        ("sequence lengths",),
        ("sequence pointers",),
        ("document indices",),
    ]
    assert fields(lines, "build indices", "split") == [("train",), ("valid",), ("test",)]
    assert fields(lines, "build index", "what") == [("document",), ("sample",), ("shuffle",)] * 3
    assert fields(lines, "saving", "n") == fields(lines, "saved", "n") == [("2",), ("4",)]
    assert fields(lines, "evaluating", "samples") == [("16",)] * 2
    assert fields(lines, "evaluating iteration", "i", "n") == [("1", "2"), ("2", "2")] * 2
    timers = [name for (name,) in fields(lines, "timer", "name")]
    assert timers == [
        "load-checkpoint",
        "model-and-optimizer-setup",
        "train/valid/test-data-iterators-setup",
        *["evaluate", "save-checkpoint"] * 2,
        "evaluate",
        "evaluate",
    ]
    for line, row in zip(by_name(lines, "iteration"), first.rows, strict=True):
        f = line.fields
        assert (int(f["n"]), int(f["samples"])) == (row["iteration"], row["consumed_samples"])
        assert (f["of"], f["batch"]) == ("4", "8")
        assert (f["loss"], f["lr"]) == (f"{row['lm_loss']:.6E}", f"{row['learning_rate']:.3E}")
        assert (
            f["norm"] == f"{row['grad_norm']:.3f}"
            and float(f["zeros"]) < 5 * 32
            and float(f["params"]) > 0
        )
        assert (f["scale"], f["skipped"], f["nan"]) == ("1.0", "0", "0")
        assert f"{row['tflops']:.1f}" == f["tflops"]


def test_argument_dump(first):
    """Sorted by the whole line in lower case; the dots end in column 48."""
    dump = by_name(scrape(first.log), "argument")
    texts = [line.text for line in dump]
    assert texts == sorted(texts, key=str.lower) and len(dump) > 150
    assert all(
        len(line.fields["name"]) + len(line.fields["dots"]) == max(48, len(line.fields["name"]) + 1)
        or len(line.fields["name"]) > 46
        for line in dump
    )
    found = {line.fields["name"]: line.fields["value"] for line in dump}
    assert (
        found["hidden_size"],
        found["params_dtype"],
        found["split"],
        found["save_interval"],
    ) == ("32", "torch.float32", "80,10,10", "2")


def test_the_dump_names_the_backend_that_auto_comes_to(tmp_path):
    run = job(tmp_path / "run", "--device", "auto", "--eval-iters", "0")
    found = {
        line.fields["name"]: line.fields["value"] for line in by_name(scrape(run.log), "argument")
    }
    assert "device" not in found and found["distributed_backend"] == (
        "nccl" if torch.cuda.is_available() else "gloo"
    )


def test_validation_blocks(first):
    """Between two rows of dashes, each one longer than the line; perplexity is the loss's."""
    lines = scrape(first.log)
    prefixes = []
    for number, line in enumerate(lines):
        if line.name == "validation":
            assert lines[number - 1].text == lines[number + 1].text == "-" * (len(line.text) + 1)
            assert float(line.fields["ppl"]) == pytest.approx(
                math.exp(float(line.fields["loss"])), rel=2e-6
            )
            prefixes.append(line.fields["prefix"])
    assert prefixes == [
        "iteration 2",
        "iteration 4",
        "iteration 4 on validation set",
        "iteration 4 on test set",
    ]
    assert lines[-1].name == "dashes" and sum(line.name == "dashes" for line in lines) == 8


def test_two_ranks_each_print_their_own_lines(two):
    """Losses, timers and validations by the last rank, everything else by the first, nothing
    twice."""
    ranks = [scrape(two.first_rank_log), scrape(two.log)]
    assert [line.text for lines in ranks for line in lines if line.name is None] == []
    first, last = ({line.name for line in lines} for lines in ranks)
    assert not first & LAST and last <= LAST | {"skipped iteration"}
    # the other rank may have been faster
    built = [name.replace("load ind", "build ind") for name in squeezed(ranks[0])]
    assert [name for name in built if name in names(START)] == [
        name for name in names(START) if name not in LAST
    ]
    assert fields(ranks[0], "world size", "world", "dp") == [("2", "2")]
    assert fields(ranks[0], "parameter type", "dtype") == [("float16",)]
    assert fields(ranks[0], "micro-batches", "n") == [("2",)]
    assert fields(ranks[1], "iteration", "n", "scale") == [
        ("1", "65536.0"),
        ("2", "65536.0"),
        ("4", "65536.0"),
    ]
    assert (
        len(by_name(ranks[1], "skipped iteration")) == 1
        and len(by_name(ranks[0], "parameters")) == 1
    )
    assert all(float(low) <= float(high) for low, high in fields(ranks[1], "timer", "min", "max"))
    after = squeezed(ranks[1])
    assert after[after.index("iteration") + 1 :][:2] == ["timers", "timer"]


def test_a_resumed_run(first, tmp_path):
    """11.4 of a load, and index caches that are found; tried on another number of ranks and other
    flags."""
    flags = [
        "--train-iters",
        "5",
        "--exit-interval",
        "5",
        "--override-opt_param-scheduler",
        "--allow-data-order-change",
    ]
    done = go_on(first, tmp_path / "run", *flags, world=2)
    lines = scrape(done.first_rank_log)
    assert [line.text for line in lines if line.name is None] == []
    start = squeezed(lines)
    assert start[start.index("decay style") : start.index("after model")] == [
        "decay style",
        "loading",
        "version",
        "differs",
        "scheduler override",
        "learning rate jump",
        "other world size",
        "loaded",
    ]
    assert fields(lines, "loading", "n") == fields(lines, "loaded", "n") == [("4",)]
    # as many samples as before; or the other rank was faster
    found = fields(lines, "load indices", "split")
    assert found in ([("valid",), ("test",)], [("train",), ("valid",), ("test",)])
    assert fields(lines, "load index", "what") == [("document",), ("sample",), ("shuffle",)] * len(
        found
    )
    assert fields(lines, "exit interval", "n") == [("5",)] and lines[-1].name == "exit interval"
    saving = start.index("saving")
    assert start[saving:] == ["saving", "saved", "exit interval"]


def test_exits(tmp_path):
    """11.7: signal, time, time within an evaluation. Each has saved before it says so."""
    done = job(tmp_path / "signal", "--exit-signal-handler", hook=functools.partial(stop_in, 3))
    assert squeezed(scrape(done.log))[-5:] == ["saving", "saved", "timers", "timer", "exit signal"]
    assert reading.latest(done.save) == 3
    done = job(tmp_path / "time", "--exit-duration-in-mins", "0.000001", "--eval-iters", "0")
    assert squeezed(scrape(done.log))[-5:] == [
        "saving",
        "saved",
        "timers",
        "timer",
        "exit duration",
    ]
    done = job(
        tmp_path / "evaluation",
        "--exit-duration-in-mins",
        "60",
        hook=functools.partial(late_from, 3),
    )
    assert squeezed(scrape(done.log))[-6:] == [
        "exit in evaluation",
        "saving",
        "saved",
        "timers",
        "timer",
        "exit duration",
    ]


def test_only_evaluation(first, tmp_path):
    done = go_on(first, tmp_path / "run", "--skip-train", "--timing-log-option", "all")
    ends = squeezed(scrape(done.log))
    assert ends[ends.index("skip train") :] == names(
        "skip train, evaluating, evaluating iteration, timers all, timer all, timer rank, dashes, "
        "validation, dashes, evaluating, evaluating iteration, timers all, timer all, timer rank, "
        "dashes, validation, dashes"
    )


def test_blend_and_the_largest_option(tmp_path):
    """11.5 of two corpora in one blend; 11.3 with the option max."""
    write_text(tmp_path / "text", 260)
    other = write_text(tmp_path / "other", 260, seed=1)
    blend = ["0.3", str(tmp_path / "text"), "0.7", other]
    done = job(tmp_path / "run", "--data-path", *blend, "--timing-log-option", "max")
    lines = scrape(done.log)
    assert [line.text for line in lines if line.name is None] == []
    assert len(by_name(lines, "blend")) == 3 and len(by_name(lines, "index reader")) == 2
    assert (
        by_name(lines, "timers max")
        and by_name(lines, "timer max")
        and not by_name(lines, "timers")
    )


def test_every_template_was_seen(first, two):
    """Those of the other tests are named here; what is left must be in the two long logs."""
    seen = {line.name for log in (first.log, two.first_rank_log, two.log) for line in scrape(log)}
    elsewhere = {
        "skip train",
        "loading",
        "version",
        "loaded",
        "scheduler override",
        "learning rate jump",
        "scheduler checkpoint",
        "load indices",
        "load index",
        "blend",
        "exit signal",
        "exit duration",
        "exit interval",
        "exit in evaluation",
        "timers all",
        "timer all",
        "timer rank",
        "timers max",
        "timer max",
    }
    assert set(TEMPLATES) - elsewhere <= seen
    assert seen - set(TEMPLATES) <= set(OWN) and len(OWN) <= 17


@pytest.mark.parametrize(
    "text",
    [
        " iteration       1/    1000 | consumed samples:            8 | elapsed time per "
        "iteration (ms): 1.0 | learning rate: 1.50E-04 | global batch size:     8 | loss scale: "
        "1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        " > padded vocab (size: 1) with 1 dummy tokens (new size: 128).",
        "saving checkpoint at iteration 1 to x",
        "[after dataloaders are built] datetime: 2024-01-24 11:10:16",
        "    evaluate ....: (1.00, 2.00)",
        " validation loss at iteration 1 | lm loss value: 1.1E+01 | lm loss PPL: 6.184932E+04 | ",
    ],
)
def test_the_scraper_is_strict(text):
    assert scrape(text + "\n")[0].name is None


def test_the_scraper_reads_the_seeds_log():
    """Lines that Megatron-LM itself printed (the 345M walk-through); blanks at line ends as in its
    source."""
    seed = """\
using world size: 1, data-parallel size: 1, context-parallel size: 1 tensor-model-parallel size: 1, \
pipeline-model-parallel size: 1·
using torch.float16 for parameters ...
setting number of micro-batches to constant 2
> building GPT2BPETokenizer tokenizer ...
 > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)
time to initialize megatron (seconds): 4.270
[after megatron is initialized] datetime: 2024-01-24 11:10:16·
 > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 354871296
> learning rate decay style: cosine
WARNING: could not find the metadata file ./checkpoints/gpt-2/latest_checkpointed_iteration.txt·
    will not load any checkpoints and will start from random
    load-checkpoint ................................: (0.19, 0.19)
    validation: 80080
INFO:megatron.core.datasets.gpt_dataset:	Load the sample index from \
743f9c78682483773343914511a6c2a5-GPTDataset-sample_index.npy
    train/valid/test-data-iterators-setup ..........: (596.36, 596.36)
 validation loss at iteration 1 | lm loss value: 1.103246E+01 | lm loss PPL: 6.184932E+04 |·
  successfully saved checkpoint at iteration       1 to ./checkpoints/gpt-2
    save-checkpoint ................................: (21027.08, 21027.08)
""".replace("·", " ")
    assert [line.text for line in scrape(seed) if line.name is None] == []
    assert not re.search("·", seed)
