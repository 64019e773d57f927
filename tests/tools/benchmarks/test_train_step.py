"""tools/benchmarks/train_step.py: turns, settings and ratios without processes, then the command on
models of two layers."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.tools.benchmarks.other_checkouts import make_checkout

FOLDER = Path(__file__).resolve().parents[3] / "tools" / "benchmarks"
NAMES = tuple(path.stem for path in FOLDER.rglob("*.py"))
SHAPE = "layers=2,hidden=32,heads=2,seq=16,micro_batch=2,vocab=64"
GPT = f"tiny:{SHAPE}"
LLAMA = f"tinyllama:{SHAPE},family=llama,ffn=48,micro_batches=2"
CPU = torch.device("cpu")


@pytest.fixture
def load(monkeypatch):
    """A function that imports a module of the benchmarks, with the state of a new process."""
    monkeypatch.syspath_prepend(str(FOLDER / "step"))
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        sys.modules.pop(name, None)
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


def run(*words: object) -> subprocess.CompletedProcess:
    """The command in a process of its own, as users run it."""
    command = [sys.executable, str(FOLDER / "train_step.py"), *map(str, words), "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def rows(text: str) -> list[dict[str, str]]:
    """The tables' rows by column title; columns are right-aligned, so a cell ends where its title
    does."""
    found: list[dict[str, str]] = []
    spans: list[tuple[str, int]] = []
    for line in text.splitlines():
        if " tok/s" in line:
            spans = [(m[0], m.end()) for m in re.finditer(r"\S+( \S+)*", line)]
        elif spans and re.match(r"  [^,:]+ +\d", line):
            name, first = line[: spans[0][1]].rsplit("  ", 1)
            cells = {
                title: line[start:end].strip()
                for (_, start), (title, end) in zip(spans, spans[1:], strict=False)
            }
            found.append({"name": name.strip(), spans[0][0]: first.strip(), **cells})
        else:
            spans = []
    return found


def made_race(load, **seconds: dict[str, list[float]]):
    """A Race with these seconds by contestant and setting."""
    race = load("race")
    made = race.Race(load("sizes").parse_size(GPT), "fp32", 1000, 10**9)
    for name, by_setting in seconds.items():
        for setting, values in by_setting.items():
            made.series.append(
                race.Series(name.replace("_", "-"), setting, values, peak_bytes=10**9)
            )
    return made


def test_ratios_are_of_the_same_round_and_best_against_best(load):
    made = made_race(
        load,
        ours={"default": [2.0, 4.0, 8.0], "A=1": [1.0, 2.0, 4.0]},
        bare={"default": [4.0, 4.0, 4.0], "A=1": [9.0, 9.0, 9.0], "B=1": [1.0]},
        bare_compiled={"default": [3.0]},
    )
    assert [made.best(name).setting for name in made.contestants] == ["A=1", "default", "default"]
    assert made.ratio("bare", "ours") == (2.0, 1.0)
    assert made.ratio("bare-compiled", "ours") == (3.0, 1.5)
    assert made.ratio("bare", "bare") == (1.0, 1.0) and made.ratio("transformers", "ours") is None


def test_the_table(load):
    """Both settings, best against best with the defaults in brackets, and shares of what the device
    can do."""
    made = made_race(
        load,
        ours={"default": [0.5, 0.5], "A=1": [0.25, 0.25]},
        bare={"default": [1.0, 1.0], "A=1": [2.0, 2.0]},
        bare_compiled={"default": [0.5], "A=1": [0.5]},
    )
    made.default("bare-compiled").compile_seconds = 12.34
    race = load("race")
    made.series.append(race.Series("ceiling", "default", [0.2], parts=[(0.15, 0.05)]))
    made.series.append(race.Series("ceiling", "A=1", [0.1], parts=[(0.05, 0.05)]))
    lines = load("table").table(made, 0.01, 0.02)
    ours, bare, compiled = rows("\n".join(lines))
    assert ours == {
        "name": "ours",
        "default ms": "500.0",
        "best ms": "250.0",
        "best setting": "A=1",
        "tok/s": "128",
        "compile s": "",
        "x bare": "4.00 (2.00)",
        "x bare comp.": "2.00 (1.00)",
        "of ceiling": "40.0%",
        "TFLOP/s": "0.004",
        "of matmul": "40.0%",
        "MFU": "20.0%",
        "peak GB": "1.00",
    }
    assert (bare["best setting"], bare["x bare"], compiled["compile s"]) == (
        "default",
        "1.00 (1.00)",
        "12.3",
    )
    assert "  ceiling: 100.0 ms (GEMMs 50.0 and attention 50.0, in )" in lines
    assert "  bare, ms: default 1000.0, A=1 2000.0" in lines
    assert load("table").heading(made).endswith("2 rounds (bare-compiled 1) of 1 timed step")


def test_the_table_of_one_setting(load):
    """No column for a best setting, and plain ratios."""
    lines = load("table").table(
        made_race(load, ours={"default": [0.5]}, bare={"default": [1.0]}), 0.01, None
    )
    ours, _ = rows("\n".join(lines))
    assert len(lines) == 3 and list(ours) == [
        "name",
        "step ms",
        "tok/s",
        "x bare",
        "TFLOP/s",
        "of matmul",
        "peak GB",
    ]
    assert (ours["step ms"], ours["x bare"]) == ("500.0", "2.00")


@pytest.mark.parametrize(
    ("seconds", "steps"), [(0.025, 20), (0.0001, 100), (0.3, 2), (0.4, 1), (60.0, 1)]
)
def test_a_turn_takes_half_a_second_or_one_timed_step(load, seconds, steps):
    assert load("race").steps_of_turn(seconds) == steps


def test_the_order_moves_on(load):
    assert [load("race").turns_of_round(3, done) for done in range(4)] == [
        [0, 1, 2],
        [1, 2, 0],
        [2, 0, 1],
        [0, 1, 2],
    ]


def test_settings_replace_the_thread_variables(load):
    settings = load("settings")
    inherited = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "7",
        "KMP_BLOCKTIME": "1",
        "MKL_NUM_THREADS": "2",
        "MKL_VERBOSE": "0",
    }
    kept = {"PATH": "/bin", "MKL_VERBOSE": "0"}
    assert settings.thread_variables(inherited) == [
        "KMP_BLOCKTIME",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
    ]
    assert settings.environment_of("default", inherited) == kept
    assert settings.environment_of("default", inherited, 3) == {**kept, "OMP_NUM_THREADS": "3"}
    setting = settings.parse_setting("OMP_WAIT_POLICY=active OMP_PLACES='{0},{1}'")
    assert settings.environment_of(setting, inherited) == {
        **kept,
        "OMP_WAIT_POLICY": "active",
        "OMP_PLACES": "{0},{1}",
    }
    for text in ("", "active", "=active", "A=1 B"):
        with pytest.raises(ValueError, match="is not default or NAME=VALUE pairs"):
            settings.parse_setting(text)


def test_losses_that_differ_are_named(load):
    check = load("race").check_losses
    error = load("race").Disagreement
    check("bare", [1.0, 2.0], [1.000009, 2.0], "fp32")
    with pytest.raises(
        error, match=r"^step 2: the loss of bare is 2\.000100, ours is 2\.000000: they do not train"
    ):
        check("bare", [1.0, 2.0001], [1.0, 2.0], "fp32")
    check("bare", [2.009], [2.0], "bf16")
    with pytest.raises(error, match="step 1"):
        check("bare", [float("nan")], [2.0], "bf16")


class FakeWorker:
    """Stands for processes.Worker: notes what it is asked, and that nobody else runs meanwhile."""

    running: set[str] = set()
    log: list[tuple[str, str]] = []
    seconds: dict[str, float] = {}
    loss = 1.0
    uncounted = 1

    def __init__(self, name, job, environment):
        self.name = name
        self.log.append((name, "start"))
        self.resume()

    def receive(self):
        return {"parameters": 10, "flops_per_step": 100, "dtype": "float32"}

    def ask(self, command, *arguments):
        assert self.running == {self.name}
        self.log.append((self.name, command))
        if command == "warm_up":
            losses = [self.loss if "other" in self.name else 1.0] * arguments[0]
            return {"losses": losses, "step_seconds": 0.1, "compile_seconds": None}
        if command == "save_start":
            return Path(arguments[0]).touch()
        if self.name.startswith("ceiling"):
            return 0.1, 0.2
        assert arguments == (self.uncounted, 5)
        return {"seconds": self.seconds.get(self.name, 1.0), "peak_bytes": 1}

    def pause(self):
        self.running.remove(self.name)

    def resume(self):
        self.running.add(self.name)

    def resident_bytes(self):
        return 50

    def peak_resident_bytes(self):
        return 100

    def end(self):
        self.running.discard(self.name)
        self.log.append((self.name, "end"))


@pytest.fixture
def fake(load, monkeypatch, tmp_path):
    """A function that runs a race of ours and others on fake workers: (the Race, what was asked of
    whom)."""
    race = load("race")

    class Fake(FakeWorker):
        running = set()
        log = []
        seconds = {}

    monkeypatch.setattr(race, "Worker", Fake)

    def run_race(rounds=7, deadline=float("inf"), **options):
        kind = options.pop("other", "bare")
        contestants = [race.Contestant("ours", "ours"), race.Contestant("other", kind)]
        plan = race.Plan(
            contestants,
            options.pop("settings", ["default", "A=1", "B=1"]),
            rounds,
            2,
            {},
            options.pop("device", "cpu"),
            tmp_path,
            **options,
        )
        return race.run_race(
            plan, load("sizes").parse_size(GPT), "fp32", deadline, lambda text: None
        ), Fake.log

    return SimpleNamespace(run=run_race, worker=Fake, race=race)


def test_one_process_at_a_time_and_the_settings_narrow(fake):
    fake.worker.seconds |= {"ours (B=1)": 0.5, "other (A=1)": 0.5, "other (B=1)": 0.7}
    result, log = fake.run(ceiling=True)
    turns = {one.contestant + " " + one.setting: len(one.seconds) for one in result.series}
    assert turns == {
        "ours default": 7,
        "other default": 7,
        "ours A=1": 3,
        "other A=1": 7,
        "ours B=1": 7,
        "other B=1": 3,
        "ceiling default": 3,
        "ceiling A=1": 3,
        "ceiling B=1": 3,
    }
    assert (result.best("ours").setting, result.best("other").setting) == ("B=1", "A=1")
    assert result.ratio("other", "ours") == (1.0, 1.0) and result.ceiling() == (0.1, 0.2)
    starts = [name for name, what in log if what == "start"]
    assert len(starts) == len(set(starts)) == 9
    assert [what for name, what in log if name == "ours (default)"][:3] == [
        "start",
        "save_start",
        "warm_up",
    ]
    first = [name for name, what in log if what == "turn"][:18]
    assert first[9:] == [*first[1:9], first[0]]
    assert (
        sorted(name for name, what in log if what == "end") == sorted(starts)
        and not fake.worker.running
    )


def test_short_memory_ends_a_process_and_starts_it_again(fake, monkeypatch):
    """Three processes fit beside the one that has its turn."""

    def alive() -> int:
        return sum({"start": 1, "end": -1}.get(what, 0) for _, what in fake.worker.log)

    monkeypatch.setattr(fake.race, "free_memory", lambda: 125 + 50 * (3 - alive()))
    most = []
    right = fake.worker.ask
    monkeypatch.setattr(fake.worker, "ask", lambda *args: most.append(alive()) or right(*args))
    result, log = fake.run(rounds=2)
    assert max(most) == 4 and all(len(one.seconds) == 2 for one in result.series)
    assert sum(what == "start" for _, what in log) > 6
    assert sum(what == "save_start" for _, what in log) == 1
    assert [len(one.losses) for one in result.series] == [2] * 6


def test_on_a_gpu_one_process_ends_before_the_next_one_starts(fake, monkeypatch):
    """A stopped process would keep the device's memory, of which the host's says nothing."""
    monkeypatch.setattr(fake.race, "free_memory", lambda: pytest.fail("the host's memory"))
    fake.worker.uncounted = 0
    result, log = fake.run(rounds=2, settings=["default"], device="cuda", ceiling=True)
    one = ["start", "warm_up", "turn", "turn", "end"]
    assert [what for _, what in log] == ["start", "save_start", *one[1:], *one, "start", *one[2:]]
    assert [len(series.seconds) for series in result.series] == [2, 2, 2]
    fake.worker.log.clear()
    late, log = fake.run(settings=["default"], device="cuda", deadline=time.monotonic() - 1)
    assert [len(series.seconds) for series in late.series] == [1, 1]


def test_our_weights_are_copied_only_for_a_contestant_that_reads_them(fake):
    _, log = fake.run(rounds=1, other="ours", ceiling=True)
    assert "save_start" not in {what for _, what in log}


def test_the_kernels_of_a_device_without_the_ranges_around_them(load):
    profile = load("step_profile")

    def row(key: str, device: str, seconds: float, **more: bool) -> SimpleNamespace:
        fields = {"key": key, "count": 3, "device_type": f"DeviceType.{device}", **more}
        times = {"self_device_time_total": 1e6 * seconds, "self_cpu_time_total": 1e6}
        return SimpleNamespace(**fields, **times)

    rows = [row("aten::mm", "CPU", 2.0), row("gemm", "CUDA", 1.0), row("drop", "CUDA", 2.0)]
    rows += [row("range", "CUDA", 9.0, is_user_annotation=True)]
    found = profile.longest(rows)
    assert found == [("drop", 3, 2.0), ("gemm", 3, 1.0)]
    lines = profile.lines(profile.by_kernel(found, 4.0), None)
    assert [line.split()[-1] for line in lines[1:]] == ["100.0%", "50.0%", "25.0%"]
    assert profile.longest(rows[:1]) == [("aten::mm", 3, 1.0)]


def test_a_second_setting_with_other_losses_is_refused(fake):
    fake.worker.loss = 1.1
    with pytest.raises(fake.race.Disagreement, match="the loss of other is 1.1"):
        fake.run()
    assert ("ours (default)", "turn") not in fake.worker.log and not fake.worker.running


def test_the_time_limit_leaves_one_round(fake):
    result, _ = fake.run(deadline=time.monotonic() - 1)
    assert [len(one.seconds) for one in result.series] == [1] * 6


def test_others_run_once_where_the_format_is_emulated(fake):
    result, _ = fake.run(slow_rounds=1)
    turns = {one.contestant + " " + one.setting: len(one.seconds) for one in result.series}
    assert turns == {"ours default": 7, "ours A=1": 3, "ours B=1": 3, "other default": 1}


def test_a_stopped_process_does_not_compute(load):
    """A process that computes without end takes no processor time between pause and resume."""
    processes = load("processes")
    worker = processes.Worker("busy", processes.make_job("busy"), os.environ)

    def taken() -> tuple[str, int]:
        fields = Path(f"/proc/{worker._process.pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11])

    try:
        while taken()[1] < 2:
            time.sleep(0.01)
        worker.pause()
        state, before = taken()
        time.sleep(0.1)
        assert state == "T" and taken() == ("T", before)
        worker.resume()
        while taken()[1] == before:
            time.sleep(0.01)
    finally:
        worker.end()


def test_a_process_that_dies_is_named(load):
    processes = load("processes")
    worker = processes.Worker("bare (default)", processes.make_job("busy"), os.environ)
    worker._process.kill()
    with pytest.raises(
        processes.WorkerFailed, match=r"bare \(default\): its process died \(exit code -9\)"
    ):
        worker.ask("turn", 1, 1)
    worker.end()


def test_compilation_is_in_no_timed_step(load, monkeypatch):
    """A step that compiles is repeated; its time is reported apart."""
    worker = load("worker")
    steps = iter([(9.0, 1), (1.0, 0), (1.0, 0), (5.0, 1), (1.0, 0), (3.0, 0)])
    now = SimpleNamespace(clock=0.0, compiled=0)

    class Runner:
        def step(self):
            seconds, compiled = next(steps)
            now.clock += seconds
            now.compiled += compiled
            return 2.0

    monkeypatch.setattr(worker, "compilations", lambda: now.compiled)
    contestant = worker.TrainingSteps.__new__(worker.TrainingSteps)
    contestant._runner = Runner()
    contestant._clock = lambda: now.clock
    contestant._device = CPU
    assert contestant.warm_up(1) == {"losses": [2.0], "step_seconds": 1.0, "compile_seconds": 8.0}
    answer = contestant.turn(1, 2)
    assert answer["seconds"] == statistics.median([1.0, 3.0]) and answer["peak_bytes"] > 2**20


def contestants_in_one_process(load, tmp_path, size_text, dtype, **job):
    """Ours and the bare loop from the same start, as their processes build them."""
    worker = load("worker")
    size = load("sizes").parse_size(size_text)
    message = load("processes").make_job(
        "ours", size, dtype=dtype, start=str(tmp_path / "start.pt"), **job
    )
    ours = worker.TrainingSteps(message)
    ours.save_start(message["start"], 8)
    return ours, worker.TrainingSteps({**message, "kind": "bare"})


def other_weight(bare) -> None:
    with torch.no_grad():
        bare.model.blocks[1].fc2.weight[0, 0] += 1.0


def skip_a_layer(bare) -> None:
    bare.model.blocks = bare.model.blocks[:1]


def learn_faster(bare) -> None:
    for group in bare.optimizer.param_groups:
        group["lr"] *= 2


def read_other_samples(bare) -> None:
    next(bare.samples)


@pytest.mark.parametrize(
    ("plant", "step", "family"),
    [
        (other_weight, 1, GPT),
        (skip_a_layer, 1, GPT),
        (skip_a_layer, 1, LLAMA),
        (read_other_samples, 1, GPT),
        (learn_faster, 2, GPT),
    ],
)
def test_contestants_that_train_another_model_are_seen(load, tmp_path, plant, step, family):
    ours, bare = contestants_in_one_process(load, tmp_path, family, "fp32")
    plant(bare._runner)
    expected = ours.warm_up(2)["losses"]
    losses = bare.warm_up(2)["losses"]
    with pytest.raises(load("race").Disagreement, match=f"^step {step}: the loss of bare is"):
        load("race").check_losses("bare", losses, expected, "fp32")


@pytest.mark.parametrize("family", [GPT, LLAMA])
def test_ours_and_the_bare_loop_lose_alike(load, tmp_path, family):
    ours, bare = contestants_in_one_process(load, tmp_path, family, "fp32")
    assert ours.facts["parameters"] == bare.facts["parameters"] and ours.facts["flops_per_step"] > 0
    load("race").check_losses("bare", bare.warm_up(3)["losses"], ours.warm_up(3)["losses"], "fp32")


@pytest.mark.sweep
@pytest.mark.parametrize("family", [GPT, LLAMA])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fifty_steps_lose_as_a_plain_loop_does(load, tmp_path, dtype, family):
    """The suite's step with all its kernels against torch's own operations, each step's loss."""
    ours, bare = contestants_in_one_process(load, tmp_path, family, dtype)
    bare._runner.samples = iter(ours._runner.first_samples(50))
    losses = ours.warm_up(50)["losses"]
    assert losses[-1] != losses[0] and losses == pytest.approx(bare.warm_up(50)["losses"], rel=1e-3)


def test_a_profile_accounts_for_the_step(load, tmp_path):
    ours, _ = contestants_in_one_process(load, tmp_path, LLAMA, "fp32")
    found = ours.profile()
    lines = load("step_profile").lines(found, (0.123, 0.456))
    assert {
        "GEMMs",
        "attention",
        "norms",
        "activation",
        "rotary",
        "loss",
        "optimizer and clipping",
        "embedding",
    } < found.keys() and min(found.values()) > 0
    gemms = next(line for line in lines if line.startswith("  GEMMs"))
    assert f"{1e3 * found['GEMMs']:.1f}" in gemms and gemms.endswith(" 123.0")
    whole = found.pop("whole step")
    assert sum(found.values()) == pytest.approx(
        whole, rel=0.5
    )  # medians of each kind over three steps


def completed(load, device: str, *words: str) -> argparse.Namespace:
    """The options after complete()."""
    tool = load("train_step")
    options = tool.build_parser().parse_args(list(words))
    tool.complete(options, device)
    return options


def test_the_default_on_cuda(load):
    """GPT from 125M to 6.7B, only ours, in bf16, within nine minutes; every size is what its name
    says."""
    options = completed(load, "cuda")
    assert (
        options.dtype,
        options.contestants,
        options.env,
        options.rounds,
        options.warmup,
        options.minutes,
    ) == (["bf16"], [], ["default"], 20, 5, 9.0)
    units = {"m": 1e6, "b": 1e9}
    contestants = load("contestants")
    sizes = load("sizes")
    for size in options.size:
        line = contestants.megatron_command_line.read(sizes.command_line(size, "bf16", "cpu"), {})
        plan = contestants.build.plan_run(line.config, 1, size.vocab)
        assert plan.num_parameters == pytest.approx(
            float(size.name[:-1]) * units[size.name[-1]], rel=0.05
        )
        assert plan.num_microbatches(1) == size.micro_batches
    assert [size.name for size in options.size] == ["125m", "350m", "760m", "1.3b", "2.7b", "6.7b"]
    assert completed(load, "cuda", "--profile").profile


def test_the_default_on_a_cpu(load, monkeypatch):
    tool = load("train_step")
    monkeypatch.setattr(tool, "_has_transformers", lambda: True)
    monkeypatch.setattr(tool.shutil, "which", lambda name: f"/usr/bin/{name}")
    options = completed(load, "cpu")
    assert [size.name for size in options.size] == ["nano", "gpt10m", "llama30m", "gpt124m"]
    assert options.contestants == [
        "ours-compiled",
        "bare",
        "bare-compiled",
        "transformers",
        "transformers-compiled",
        "ceiling",
    ]
    assert options.env[0] == "default" and len(options.env) > 2 and options.rounds == 7
    assert completed(load, "cpu", "--env", "default").env == ["default"]
    assert completed(load, "cpu", "--env", "A=1").env == ["default", "A=1"]
    assert completed(load, "cpu", "--alone").contestants == []


def test_what_is_missing_is_skipped(load, monkeypatch, capsys):
    tool = load("train_step")
    monkeypatch.setattr(tool, "_has_transformers", lambda: False)
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert completed(load, "cpu").contestants == ["bare", "ceiling"]
    assert capsys.readouterr().out == (
        "transformers is not installed: transformers, transformers-compiled will be skipped\n"
        "there is no C++ compiler (g++): ours-compiled, bare-compiled will be skipped\n"
    )


@pytest.mark.parametrize(
    ("native", "words", "rounds"), [(True, "", None), (False, "", 1), (False, "--rounds 2", None)]
)
def test_fewer_rounds_where_bf16_is_emulated(load, tmp_path, capsys, native, words, rounds):
    """Only the others', only by default, and announced."""
    options = completed(load, "cpu", "--contestants", "bare", *words.split())
    plan = load("train_step").make_plan(options, "bf16", native, tmp_path)
    assert plan.slow_rounds == rounds
    note = "this CPU emulates bf16, a step may take minutes: 1 round of bare with the defaults (--"
    assert (note in capsys.readouterr().out) is (rounds is not None)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--size gpt10b", "'gpt10b' is none of nano, gpt10m, llama30m, "),
        ("--size gpt10m:depth=3", "'depth=3' is not FIELD=VALUE with a field of layers, hidden, "),
        ("--size gpt10m:layers", "'layers' is not FIELD=VALUE"),
        ("--size gpt10m:layers=x", "layers is a whole number, not 'x'"),
        ("--size gpt10m:family=bert", "family is gpt or llama, not 'bert'"),
        ("--size new:layers=2,hidden=8", "for a new size give heads, seq, micro_batch, vocab too"),
        ("--rounds 0", "'0' is not a whole number, 1 or more"),
        ("--warmup -1", "'-1' is not a whole number, 1 or more"),
        ("--busy x", "'x' is not a whole number, 1 or more"),
        ("--env active", "'active' is not default or NAME=VALUE pairs"),
        ("--compare-with /", "/: not a checkout of this repository"),
        ("--json /nowhere/x", "/nowhere/x: No such file or directory"),
    ],
)
def test_what_cannot_be_raced_is_one_message(load, capsys, flags, says):
    with pytest.raises(SystemExit) as leave:
        load("train_step").main([*flags.split(), "--device", "cpu"])
    err = capsys.readouterr().err
    assert (
        leave.value.code == 2
        and says in err
        and err.count("error: ") == 1
        and len(err.splitlines()) <= 2
    )


def test_a_checkout_without_its_extensions_is_refused(load, monkeypatch, tmp_path):
    checkouts = load("checkouts")
    (tmp_path / "tools" / "benchmarks").mkdir(parents=True)
    (tmp_path / "tools" / "benchmarks" / "contestants.py").touch()
    monkeypatch.setattr(checkouts, "EXTENSIONS", "pretrain_gpt.py")
    with pytest.raises(ValueError, match="its C\\+\\+ extensions are not built; run"):
        checkouts.parse_checkout(str(tmp_path))
    with pytest.raises(ValueError, match="two of the directories are called a"):
        checkouts.check_names([Path("/x/a"), Path("/y/b"), Path("/z/a")])


@pytest.mark.campaign
def test_a_size_that_is_not_accepted(load, capsys):
    words = ["--size", f"{GPT},hidden=33", "--dtype", "fp32", "--alone", "--device", "cpu"]
    assert load("train_step").main(words) == 2
    err = capsys.readouterr().err
    assert (
        "--hidden-size 33: not a multiple of --num-attention-heads 2" in err
        and err.count("error: ") == 1
    )


@pytest.mark.peers
@pytest.mark.sweep
def test_all_contestants(tmp_path):
    """Eager and compiled, with two settings, by the command: equal losses, all figures in the file,
    and in the table what follows from them."""
    pytest.importorskip("transformers")
    names = [
        "ours",
        "ours-compiled",
        "bare",
        "bare-compiled",
        "transformers",
        "transformers-compiled",
    ]
    file = tmp_path / "figures.json"
    done = run(
        "--size",
        GPT,
        "--dtype",
        "fp32",
        "--rounds",
        "2",
        "--env",
        "OMP_WAIT_POLICY=passive",
        "--contestants",
        *names[1:],
        "ceiling",
        "--json",
        file,
    )
    assert done.returncode == 0, done.stderr
    (race,) = json.loads(file.read_text())["races"]
    lines = rows(done.stdout)
    assert [line["name"] for line in lines] == names and list(race["best_setting"]) == names
    series = {(one["contestant"], one["setting"]): one for one in race["series"]}
    assert len(series) == 2 * (len(names) + 1) and all(
        len(one["seconds"]) == 2 for one in series.values()
    )
    for name, line in zip(names, lines, strict=True):
        default = series[name, "default"]
        best = series[name, race["best_setting"][name]]
        assert default["losses"] == pytest.approx(series["ours", "default"]["losses"], rel=1e-5)
        assert line["default ms"] == f"{1e3 * statistics.median(default['seconds']):.1f}"
        assert line["best ms"] == f"{1e3 * statistics.median(best['seconds']):.1f}"
        assert (
            (default["compile_seconds"] is not None)
            is name.endswith("compiled")
            is bool(line["compile s"])
        )
    ours = series["ours", race["best_setting"]["ours"]]["seconds"]
    other = series["bare-compiled", race["best_setting"]["bare-compiled"]]["seconds"]
    ratio = race["ratio"]["bare-compiled"]
    assert ratio["best"] == pytest.approx(
        statistics.median(a / b for a, b in zip(other, ours, strict=True))
    )
    assert lines[0]["x bare comp."] == f"{ratio['best']:.2f} ({ratio['defaults']:.2f})"
    assert race["tokens_per_step"] == 32 and sum(race["ceiling_seconds"]) < min(ours)


@pytest.mark.peers
@pytest.mark.sweep
def test_the_llama_family(tmp_path):
    """Ours, the bare loop and transformers train the same model; --busy and --profile work in the
    same run."""
    pytest.importorskip("transformers")
    done = run(
        "--size",
        LLAMA,
        "--dtype",
        "fp32",
        "--rounds",
        "1",
        "--env",
        "default",
        "--busy",
        "1",
        "--profile",
        "--contestants",
        "bare",
        "transformers",
    )
    assert done.returncode == 0, done.stderr
    assert [line["name"] for line in rows(done.stdout)] == ["ours", "bare", "transformers"]
    assert (
        "tinyllama fp32: llama, 2 layers, hidden 32, ffn 48" in done.stdout
        and "busy processes 1" in done.stdout
    )
    assert (
        "2 x 2 samples = 64 tokens per step" in done.stdout
        and "where a step's time goes" in done.stdout
    )


@pytest.mark.sweep
def test_mfu_stands_beside_the_matmul_rate(tmp_path):
    """The CUDA run's own columns, on a CPU with a given peak: both shares from the same FLOPs and
    the same median."""
    file = tmp_path / "figures.json"
    done = run(
        "--size",
        GPT,
        "--dtype",
        "bf16",
        "--alone",
        "--env",
        "default",
        "--peak-tflops",
        "1e-3",
        "--minutes",
        "1",
        "--rounds",
        "3",
        "--json",
        file,
    )
    assert done.returncode == 0, done.stderr
    (line,) = rows(done.stdout)
    figures = json.loads(file.read_text())
    race = figures["races"][0]
    rate = figures["matmul_tflops"]["bf16"]
    speed = race["flops_per_step"] / statistics.median(race["series"][0]["seconds"]) / 1e12
    assert (line["MFU"], line["of matmul"]) == (
        f"{100 * speed / 1e-3:.1f}%",
        f"{100 * speed / rate:.1f}%",
    )


@pytest.mark.sweep
def test_another_checkout_takes_part(tmp_path):
    """It runs with its own modules: one that learns faster is seen, one that does not has a row and
    a column."""
    same = make_checkout(tmp_path / "before")
    faster = make_checkout(
        tmp_path / "faster",
        "step/sizes.py",
        "LEARNING_RATE = 3e-4",
        "LEARNING_RATE = 6e-4",
    )
    words = (
        "--size",
        GPT,
        "--dtype",
        "fp32",
        "--alone",
        "--env",
        "default",
        "--rounds",
        "1",
        "--compare-with",
    )
    done = run(*words, same)
    assert done.returncode == 0, done.stderr
    ours, before = rows(done.stdout)
    assert (
        before["name"] == "ours in before"
        and before["x ours in before"] == "1.00"
        and ours["x ours in before"]
    )
    done = run(*words, faster)
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: tiny fp32: step 2: the loss of ours in faster is [\d.]+, ours is [\d.]+: they "
        r"do not train the same model, so their times say nothing\n",
        done.stderr,
    )
