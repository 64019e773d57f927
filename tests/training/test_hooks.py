"""The points of the training loop at which hooks are called, and the order of the hooks."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path

from megatron.training import hooks, loop
from megatron.training.hook import Hook
from tests.runs import SMALL, train, write_text
from tests.training.tiny_run import make_run

POINTS = [name for name, _ in inspect.getmembers(Hook, inspect.isfunction)]


def note_points(folder: str) -> None:
    """A hook of `tests.runs.train`: write down each point that the loop comes to, with the
    iteration that the run is at."""
    build_hooks = loop.build_hooks

    class Noting(Hook):
        def __init__(self, run):
            self.run = run

        def __getattribute__(self, name):
            if name in POINTS and name not in ("intervals", "requests"):
                with open(f"{folder}/points", "a") as file:
                    file.write(f"{name} {self.run.progress.iteration}\n")
            return super().__getattribute__(name)

    def with_noting(run, *args):
        return [*build_hooks(run, *args), Noting(run)]

    loop.build_hooks = with_noting


def test_points_of_a_run(tmp_path):
    """Within an iteration: step, evaluation, save, end; skipped ones have no step."""
    text = write_text(tmp_path / "text", 100)
    flags = "--train-iters 5 --eval-interval 2 --eval-iters 1 --save-interval 2 --split 80,20,0"
    skip = ["--train-range-to-skip", "3", "4"]
    words = [*SMALL, "--data-path", text, *flags.split(), *skip, "--save", str(tmp_path / "save")]
    train(tmp_path / "run", words, hook=functools.partial(note_points, str(tmp_path)))
    saved = ["before_save", "after_save"]
    assert (tmp_path / "points").read_text().splitlines() == [
        "on_start 0",
        *("before_step 0", "after_step 1", "after_iteration 1"),
        *("before_step 1", "after_step 2", "before_evaluation 2"),
        *(f"{point} 2" for point in saved),
        "after_iteration 2",
        *("after_skip 3", "after_iteration 3", "after_skip 4", "before_evaluation 4"),
        *(f"{point} 4" for point in saved),
        "after_iteration 4",
        *("before_step 4", "after_step 5", "after_iteration 5", "on_end 5"),
        *(f"{point} 5" for point in saved),
        "before_evaluation 5",
    ]


def test_the_order_of_the_hooks(tmp_path):
    """All features on: each hook that depends on another comes after it."""
    run = make_run(
        manual_gc=True,
        control_file=str(tmp_path / "control"),
        log_straggler=True,
        check_weight_hash_across_dp_replicas_interval=1,
        data_ledger=str(tmp_path / "ledger"),
        profile=True,
        spike_action="rewind",
        save=str(tmp_path / "save"),
        save_interval=5,
    )
    skipping, evaluation, saving = Hook(), Hook(), Hook()
    found = hooks.build_hooks(run, None, evaluation, saving, skipping, 0.0)
    kinds = [type(hook).__name__ for hook in found]
    assert kinds.index("SpikeDetection") < kinds.index("IterationLog")  # which logs the finding
    assert kinds.index("IterationLog") < kinds.index("Stragglers")
    assert kinds.index("RunEvents") < found.index(saving)  # whose start it is notified of
    assert kinds.index("WeightComparison") < found.index(saving)  # which saves no such weights
    assert kinds.index("DataLedger") < found.index(saving)  # which saves after a rollback
    assert found.index(evaluation) < found.index(saving)
    assert found.index(saving) < kinds.index("RollbackBuffer")  # then old checkpoints are renamed
    assert {"Profiling", "ControlFileRequests", "GarbageCollection"} <= set(kinds)
    assert skipping in found and len(found) == len(set(map(id, found)))
    assert Path(tmp_path / "control").read_text() == "0\n"
