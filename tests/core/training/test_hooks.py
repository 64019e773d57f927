"""The points of the training loop at which hooks are called, and the order of the hooks."""

import functools
import inspect

import pytest

from megatron.training import loop
from megatron.training.hook import Hook
from megatron.training.hooks import placed
from tests.runs import SMALL, train, write_text

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
        "wrap_step 0",
        "on_start 0",
        *("before_step 0", "after_step 1", "after_iteration 1", "ends_stage 1"),
        *("before_step 1", "after_step 2", "before_evaluation 2"),
        *(f"{point} 2" for point in saved),
        *("after_iteration 2", "ends_stage 2", "after_skip 3", "after_iteration 3", "ends_stage 3"),
        *("after_skip 4", "before_evaluation 4"),
        *(f"{point} 4" for point in saved),
        *("after_iteration 4", "ends_stage 4"),
        *("before_step 4", "after_step 5", "after_iteration 5", "ends_stage 5", "on_end 5"),
        *(f"{point} 5" for point in saved),
        "before_evaluation 5",
    ]


def hook(name: str, **places: tuple[str, ...]) -> Hook:
    return type(name, (Hook,), places)()


@pytest.mark.parametrize(
    ("more", "order"),
    [
        ([hook("X")], "ABCX"),
        ([hook("X", before=("B", "gone"))], "AXBC"),
        ([hook("X", after=("gone",), before=("C",)), hook("Y", before=("C",))], "ABXYC"),
        ([hook("X", before=("B",)), hook("Y", before=("X",), after=("A",))], "AYXBC"),
        ([hook("X", before=("Y",)), hook("Y", before=("B",), after=("A",))], "AXYBC"),
        ([hook("X", after=("Y",)), hook("Y", after=("X",))], None),
        ([hook("X", before=("A",), after=("C",))], None),
    ],
)
def test_a_hook_says_its_place(more, order):
    core = [hook(name) for name in "ABC"]
    if order is None:
        with pytest.raises(ValueError, match="X"):
            placed(core, more)
    else:
        assert "".join(type(one).__name__ for one in placed(core, more)) == order
