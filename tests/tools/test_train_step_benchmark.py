"""tools/benchmarks/train_step.py on models of two layers: its table and figures, and how it refuses an unfair race."""

from __future__ import annotations

import importlib
import json
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "benchmarks"
SHAPE = "layers=2,hidden=32,heads=2,seq=16,micro_batch=2,vocab=64"
GPT, LLAMA = f"tiny:{SHAPE}", f"tinyllama:{SHAPE},family=llama,ffn=48,micro_batches=2"
NAMES = ("train_step", "bare_model", "ceiling", "contestants", "sizes", "step_profile")


def imported(monkeypatch):
    """The benchmark as a module, read anew."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        sys.modules.pop(name, None)
    return importlib.import_module("train_step")


@pytest.fixture
def alone(monkeypatch):
    """The benchmark where transformers is not installed."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    yield imported(monkeypatch)
    for name in NAMES:
        del sys.modules[name]


@pytest.fixture
def tool(monkeypatch):
    """The benchmark where transformers is installed."""
    pytest.importorskip("transformers")
    yield imported(monkeypatch)
    for name in NAMES:
        del sys.modules[name]


def rows(text: str) -> list[dict[str, str]]:
    """The tables' rows by column title; columns are right-aligned, so a cell ends where its title does."""
    found: list[dict[str, str]] = []
    titles: list[tuple[str, int, int]] = []
    for line in text.splitlines():
        if "step ms" in line:
            spans = [(m[0], m.end()) for m in re.finditer(r"\S+( \S+)*", line)]
            titles = [(title, start, end) for (title, end), start in
                      zip(spans, [line.index("step ms") - 1, *(end for _, end in spans)], strict=False)]
        elif titles and line.startswith("  "):
            cells = {title: line[start:end].strip() for title, start, end in titles}
            found.append({"name": line[:titles[0][1]].strip(), **cells})
    return found


@pytest.mark.peers
def test_the_whole_race(tool, tmp_path, capsys):
    """Everybody, both families: equal losses, all figures in the file, and in the table what follows from them."""
    file = tmp_path / "figures.json"
    code = tool.main(["--size", GPT, "--size", LLAMA, "--dtype", "fp32", "--rounds", "2", "--device", "cpu", "--json",
                      str(file)])
    out = capsys.readouterr().out
    assert code == 0 and out.count("0.0M parameters") == 2 and "; 2 rounds\n" in out
    assert "tiny fp32: gpt, 2 layers, hidden 32, ffn 128, 2 heads, sequence 16, vocabulary 64" in out
    assert "tinyllama fp32: llama, 2 layers, hidden 32, ffn 48" in out and "2 x 2 samples = 64 tokens a step" in out
    races, lines = json.loads(file.read_text())["races"], rows(out)
    assert [line["name"] for line in lines] == ["ours", "bare torch loop", "transformers", "ceiling"] * 2
    assert len(races) == 2
    for race, table in zip(races, (lines[:4], lines[4:]), strict=True):
        seconds = race["seconds"]
        assert [(name, len(values)) for name, values in seconds.items()] == [(line["name"], 2) for line in table[:3]]
        for name in seconds:
            assert race["losses"][name] == pytest.approx(race["losses"]["ours"], rel=1e-5)
        for key, other in (("x_bare", "bare torch loop"), ("x_transformers", "transformers")):
            pairs = zip(seconds[other], seconds["ours"], strict=True)
            assert race[key] == pytest.approx(statistics.median(a / b for a, b in pairs))
        assert (table[0]["x bare"], table[0]["x transf."]) == (f"{race['x_bare']:.2f}", f"{race['x_transformers']:.2f}")
        assert table[1]["x bare"] == table[2]["x transf."] == "1.00"
        assert table[0]["best ms"] == f"{1e3 * min(seconds['ours']):.1f}"
        share = sum(race["ceiling_seconds"]) / min(seconds["ours"])
        assert table[0]["of ceiling"] == f"{100 * share:.1f}%" and 0 < share < 1
    assert races[1]["tokens_per_step"] == 64 and races[1]["size"]["family"] == "llama"


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fifty_steps_lose_as_a_plain_loop_does(alone, tmp_path, dtype):
    """The suite's step with all its kernels against torch's own operations, both families, each step's loss."""
    file = tmp_path / "figures.json"
    sizes = [word for size in (GPT, LLAMA) for word in ("--size", size)]
    assert alone.main([*sizes, "--dtype", dtype, "--warmup", "1", "--rounds", "50", "--contestants", "bare", "--device",
                       "cpu", "--json", str(file)]) == 0
    for race in json.loads(file.read_text())["races"]:
        losses = race["losses"]
        assert len(losses["ours"]) == 50 and losses["ours"][-1] != losses["ours"][0]
        assert losses["ours"] == pytest.approx(losses["bare torch loop"], rel=1e-3)


def test_a_profile_accounts_for_the_step(alone, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert alone.main(["--size", LLAMA, "--dtype", "fp32", "--rounds", "1", "--contestants", "ceiling", "--profile",
                       "--device", "cpu", "--json", str(file)]) == 0
    race, = json.loads(file.read_text())["races"]
    found = race["profile"]
    assert {"matrix products", "attention", "norms", "activation", "rotary", "loss", "optimizer and clipping",
            "embedding"} < found.keys() and min(found.values()) > 0
    whole = found.pop("whole step")
    assert sum(found.values()) == pytest.approx(whole, rel=0.5)         # medians of each kind over three steps
    out = capsys.readouterr().out
    assert "where a step's time goes" in out and f"{1e3 * found['matrix products']:.1f}" in out


def test_a_profile_on_cuda_is_refused(alone, monkeypatch):
    monkeypatch.setattr(alone.devices, "choose_device", lambda *_: torch.device("cuda"))
    with pytest.raises(SystemExit, match="--profile: counts the operations of a CPU"):
        alone.main(["--profile"])


def test_without_transformers(alone, capsys):
    assert alone.main(["--size", GPT, "--dtype", "fp32", "--rounds", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("transformers is not installed: it does not take part\n") and "x transf." not in out
    assert [line["name"] for line in rows(out)] == ["ours", "bare torch loop", "ceiling"]


def other_weight(tool, monkeypatch) -> None:
    right = tool.megatron_to_bare

    def wrong(*args):
        state = right(*args)
        state["blocks.1.fc2.weight"][0, 0] += 1.0
        return state

    monkeypatch.setattr(tool, "megatron_to_bare", wrong)


def changed_bare(change):
    """A plant that changes the bare contestant before it runs."""
    def plant(tool, monkeypatch) -> None:
        right = tool.bare

        def wrong(*args):
            racer = right(*args)
            change(racer)
            return racer

        monkeypatch.setattr(tool, "bare", wrong)
    return plant


def skip_a_layer(racer) -> None:
    racer.model.blocks = racer.model.blocks[:1]


def learn_faster(racer) -> None:
    for group in racer.optimizer.param_groups:
        group["lr"] *= 2


def read_other_samples(racer) -> None:
    next(racer.samples)


@pytest.mark.parametrize(("plant", "step", "family"), [
    (other_weight, 1, GPT), (changed_bare(skip_a_layer), 1, GPT), (changed_bare(skip_a_layer), 1, LLAMA),
    (changed_bare(read_other_samples), 1, GPT), (changed_bare(learn_faster), 2, GPT)])
def test_contestants_that_train_another_model_do_not_race(alone, monkeypatch, capsys, plant, step, family):
    """One line and exit code 1, as soon as the losses differ: no contestant gets to a timed step."""
    contestants, steps = sys.modules["contestants"], []
    right = contestants.BareLoop.step
    monkeypatch.setattr(contestants.BareLoop, "step", lambda racer: steps.append(racer) or right(racer))
    plant(alone, monkeypatch)
    words = ["--size", family, "--dtype", "fp32", "--rounds", "1", "--contestants", "bare", "--device", "cpu"]
    assert alone.main(words) == 1
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"error: \w+ fp32: step {step}: the loss of bare torch loop is [\d.]+, ours is [\d.]+: they do "
                        r"not train the same model, so their times say nothing\n", err)
    assert len(steps) == step and "step ms" not in out


@pytest.mark.parametrize(("flags", "says"), [
    ("--size gpt10b", "'gpt10b' is none of gpt10m, llama30m, "),
    ("--size gpt10m:depth=3", "'depth=3' is not FIELD=VALUE with a field of layers, hidden, "),
    ("--size gpt10m:layers", "'layers' is not FIELD=VALUE"),
    ("--size gpt10m:layers=x", "layers is a whole number, not 'x'"),
    ("--size gpt10m:family=bert", "family is gpt or llama, not 'bert'"),
    ("--size new:layers=2,hidden=8", "for a new size give heads, seq, micro_batch, vocab too"),
    (f"--size {GPT},hidden=33 --dtype fp32", "--hidden-size 33: not a multiple of --num-attention-heads 2"),
    ("--rounds 0", "'0' is not a number of steps, 1 or more"),
    ("--warmup -1", "'-1' is not a number of steps, 1 or more"),
    ("--json /nowhere/x", "/nowhere/x: No such file or directory")])
def test_what_cannot_be_raced_is_one_message(alone, capsys, flags, says):
    with pytest.raises(SystemExit) as leave:
        alone.main([*flags.split(), "--device", "cpu"])
    err = capsys.readouterr().err
    assert leave.value.code == 2 and says in err and err.count("error: ") == 1 and len(err.splitlines()) <= 2


@pytest.mark.campaign
@pytest.mark.parametrize(("native", "typed", "rounds"), [(True, "", 7), (False, "", 1), (False, "--rounds 2", 2)])
def test_fewer_rounds_where_bf16_is_emulated(alone, monkeypatch, capsys, native, typed, rounds):
    """Only the others', only by default, and said before the first slow step and in the heading."""
    monkeypatch.setattr(alone, "low_precision_is_native", lambda kind, dtype: native or dtype == torch.float32)
    monkeypatch.setattr(alone, "matmul_rate", lambda *args: 1.0)
    ours, said_before = 2 if typed else 7, []
    monkeypatch.setattr(alone, "warm_up", lambda *args: said_before.append(capsys.readouterr().out))
    seconds = []
    right = alone.table
    monkeypatch.setattr(alone, "table", lambda race, *args: seconds.append(race.seconds) or right(race, *args))
    for dtype in ("bf16", "fp32"):
        assert alone.main(["--size", GPT, "--dtype", dtype, "--contestants", "bare", "--device", "cpu",
                           *typed.split()]) == 0
    assert [{name: len(times) for name, times in race.items()} for race in seconds] == [
        {"ours": ours, "bare torch loop": rounds}, {"ours": ours, "bare torch loop": ours}]
    fewer = rounds < ours
    note = "this CPU emulates bf16, a step may take minutes: 1 round of bare torch loop (--rounds N: N of all)\n"
    assert (note in said_before[0]) is fewer and "emulates" not in said_before[1]
    assert ("; 7 rounds (bare torch loop 1)\n" in said_before[1] + capsys.readouterr().out) is fewer


def test_ratio_of_unequal_numbers_of_rounds(alone):
    race = alone.Race(alone.parse_size(GPT), "bf16", 1, 1, {alone.OURS: [1.0, 2.0, 4.0], alone.BARE: [2.0, 2.0, 2.0]})
    assert race.ratio(alone.BARE, alone.OURS) == 1.0 and race.ratio(alone.HUGGINGFACE, alone.OURS) is None
    race.seconds[alone.BARE] = [2.0]
    assert race.ratio(alone.BARE, alone.OURS) == 2.0


@pytest.mark.campaign
def test_mfu_stands_beside_the_matmul_rate(alone, tmp_path, capsys):
    """The CUDA run's own columns, on a CPU with a made-up peak: both shares from the same FLOPs and the same median."""
    file = tmp_path / "figures.json"
    assert alone.main(["--size", GPT, "--dtype", "bf16", "--alone", "--peak-tflops", "1e-3", "--minutes", "1", "--rounds",
                       "3", "--device", "cpu", "--json", str(file)]) == 0
    line, = rows(capsys.readouterr().out)
    figures = json.loads(file.read_text())
    race, rate = figures["races"][0], figures["matmul_tflops"]["bf16"]
    speed = race["flops_per_step"] / statistics.median(race["seconds"]["ours"]) / 1e12
    assert (line["MFU"], line["of matmul"]) == (f"{100 * speed / 1e-3:.1f}%", f"{100 * speed / rate:.1f}%")


def test_the_default_on_cuda(alone, monkeypatch):
    """GPT from 125M to 6.7B, only ours, in bf16, within nine minutes; every size is what its name says."""
    monkeypatch.setattr(alone.devices, "choose_device", lambda wish, rank: torch.device("cuda"))
    options = alone.build_parser().parse_args([])
    alone.settle(options)
    assert (options.dtype, options.contestants, options.rounds, options.warmup, options.minutes) == (
        ["bf16"], [], 20, 5, 9.0)
    units = {"m": 1e6, "b": 1e9}
    contestants, sizes = sys.modules["contestants"], sys.modules["sizes"]
    for size in options.size:
        line = contestants.megatron_command_line.read(sizes.command_line(size, "bf16", "cpu"), {})
        plan = contestants.build.plan_run(line.config, 1, size.vocab)
        assert plan.num_parameters == pytest.approx(float(size.name[:-1]) * units[size.name[-1]], rel=0.05)
        assert plan.num_microbatches(1) == size.micro_batches
    assert [size.name for size in options.size] == ["125m", "350m", "760m", "1.3b", "2.7b", "6.7b"]
