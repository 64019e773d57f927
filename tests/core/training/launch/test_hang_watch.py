"""How long each phase may take before it counts as a hang."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron.config import command_line
from megatron.training.launch import hang
from megatron.training.launch.hang_limits import HangLimits, RunPhase, limits
from megatron.training.launch.hang_watch import HangWatch
from megatron.training.launch.process import ProcessId
from megatron.training.result import Requests
from tests.problems import assert_problem
from tests.runs import SMALL, with_flags


class Monitor:
    """Keeps the phases."""

    def __init__(self):
        self.phases = []

    def begin(self, phase) -> None:
        self.phases.append(phase)


def watch(given: float | None = None, micro_batches=lambda _: 1, pipeline=None):
    run = SimpleNamespace(
        plan=SimpleNamespace(num_microbatches=micro_batches),
        pipeline=pipeline,
        runtime=SimpleNamespace(device=torch.device("cpu")),
    )
    monitor = Monitor()
    return monitor, HangWatch(monitor, HangLimits(100.0, 90.0, 80.0, 70.0, given), run)


def iteration_limits(seconds: list[float], given: float | None = None, micro_batches=lambda _: 1):
    """Those of iterations that took so many seconds, and of the one after them."""
    monitor, hook = watch(given, micro_batches)
    for iteration, one in enumerate([*seconds, 0.0], 1):
        hook.before_step(iteration)
        hook.after_step(SimpleNamespace(iteration=iteration, seconds=one))
    return [phase.limit for phase in monitor.phases if phase.name.endswith("iteration")][::2]


def test_the_first_iteration_has_a_limit_of_its_own_and_the_others_at_least_60_seconds():
    assert iteration_limits([40.0, 0.1, 0.1]) == [90.0, 160.0, pytest.approx(80.2), 60.0]


def test_a_limit_that_is_given_holds():
    assert iteration_limits([9.0, 0.1], 3.0) == [90.0, 3.0, 3.0]


def test_a_batch_that_grows_has_as_many_times_the_seconds():
    sizes = {1: 2, 2: 2, 3: 40}
    assert iteration_limits([8.0, 8.0], micro_batches=sizes.get) == [90.0, 60.0, 640.0]


def test_evaluation_and_save_have_limits_and_what_is_between_has_the_larger_one():
    pipeline = SimpleNamespace(actions_done=0)
    monitor, hook = watch(pipeline=pipeline)
    hook.before_evaluation()
    hook.before_save()
    hook.after_iteration(3, Requests())
    hook.on_end()
    assert [phase.limit for phase in monitor.phases] == [80.0, 70.0, 80.0, 80.0]
    assert [phase.announced for phase in monitor.phases] == [True, True, False, True]
    pipeline.actions_done = 7
    assert monitor.progress() == 7


def limits_of(*words: str) -> HangLimits:
    core = with_flags(SMALL, "--mock-data", "--train-iters", "10", "--log-format", "short")
    return limits(command_line.read([*core, *words], {}).config)


def test_the_flags():
    assert limits_of() == HangLimits(540.0, 540.0, 540.0, 540.0, None)
    assert limits_of("--hang-timeout-startup-seconds", "0").startup is None
    none = limits_of("--hang-timeout-seconds", "0")
    assert none == HangLimits(None, None, None, None, 0.0, iterations=False)
    compiled = limits_of("--torch-compile")
    assert compiled.first_iteration is None and not compiled.iterations and compiled.save == 540.0
    assert limits_of("--torch-compile", "--hang-timeout-seconds", "3").iterations
    given = limits_of(
        *("--hang-timeout-first-iteration-seconds", "4"),
        *("--hang-timeout-evaluation-seconds", "5"),
        *("--hang-timeout-save-seconds", "6"),
        *("--distributed-timeout-minutes", "1"),
    )
    assert given == HangLimits(54.0, 4.0, 5.0, 6.0, None)


@pytest.mark.parametrize(
    ("known", "frames", "expected"),
    [
        ("first iteration 1", [("/x/megatron/training/build.py", "build_run")], "start-up"),
        ("first iteration 1", [("/x/megatron/training/loop.py", "pretrain")], "first iteration 1"),
        ("first iteration 1", [], "first iteration 1"),
        (
            "first iteration 1",
            [("/x/megatron/training/loop.py", "pretrain"), ("/x/step.py", "make_batch")],
            "first iteration 1, data",
        ),
        ("evaluation 3", [("/x/megatron/training/build.py", "build_run")], "evaluation 3"),
    ],
)
def test_the_stack_decides_where_another_ranks_phase_is_further(known, frames, expected):
    assert hang.full_phase(known, frames) == expected


@pytest.mark.parametrize(
    "phase, flag",
    [
        (RunPhase("start-up"), "startup"),
        (RunPhase("first iteration", 1), "first-iteration"),
        (RunPhase("iteration", 7), ""),
        (RunPhase("evaluation"), "evaluation"),
        (RunPhase("save"), "save"),
        (RunPhase("after iteration", 7), "save"),
    ],
)
def test_the_line_of_a_hang_ends_with_its_limits_flag_and_a_code(phase, flag):
    """Of a rank that answered, and of one that cannot."""
    frame = [sys._getframe()]
    process = ProcessId(3, 17, "node", "0")
    for answer in (hang.describe(str(phase), frame), hang.unknown(str(phase))):
        [line, *_] = hang.report(hang.failure(process, 61.0, answer), answer).splitlines()
        named = f"--hang-timeout-{flag}{'-' * bool(flag)}seconds"
        assert_problem(line, "rank-hangs", "rank 3", 17, named)
