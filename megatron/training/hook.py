"""What a feature does at fixed points of the training loop. Those of the core: hooks.py."""

from collections.abc import Callable, Sequence

from megatron.training.result import IterationResult, Requests

Step = Callable[..., IterationResult]  # called as `training.step.train_step`


class Hook:
    """A feature of the loop overrides the points it needs. At each point the hooks are called in
    the order of their list, on every rank alike; a point that calls a collective must do so on all
    of them.

    What a checkpoint has to keep of a feature is `run.progress.features[NAME]`, JSON data: read
    when the hook is made, written in `before_save`. That of a feature that is not here stays.

    `before` and `after` are the names of hooks that it must precede or follow, if they are there;
    `hooks.placed` says where it stands then.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def wrap_step(self, step: Step) -> Step:
        """What trains an iteration in place of `step`, which it may call."""
        return step

    def on_start(self) -> None:
        """Training starts; the run is as it was loaded."""

    def before_step(self, iteration: int) -> None:
        """Iteration `iteration` is about to be trained (not if it is skipped)."""

    def requests(self, iteration: int) -> Requests | None:
        """What this rank requests after `iteration`; counted over all ranks."""

    def after_step(self, result: IterationResult) -> None:
        """An iteration was trained. A hook may add to its `columns` and `points`, or set the run
        back to an earlier iteration: then `on_rollback` follows and the rest of the iteration is
        omitted."""

    def after_skip(self, first: int, result: IterationResult) -> None:
        """The iterations from `first` to `result.iteration` were skipped."""

    def on_rollback(self) -> None:
        """The run is at an earlier iteration again."""

    def before_evaluation(self) -> None:
        """A validation is about to start."""

    def before_save(self) -> None:
        """A checkpoint or snapshot of the run as it is now is about to be written."""

    def after_save(self, iteration: int) -> None:
        """The checkpoint of `iteration` is on the disk."""

    def after_iteration(self, iteration: int, requests: Requests) -> None:
        """An iteration is over, trained or skipped, evaluated and saved; the run may exit next.
        `requests` are those of all ranks."""

    def ends_stage(self, iteration: int) -> bool:
        """Whether this run ends with `iteration`, and the next of its process goes on from
        there."""
        return False

    def on_end(self) -> None:
        """Training is over, finished or because the run exits early; the last save follows."""

    def intervals(self) -> Sequence[int | None]:
        """While iterations are skipped, the loop also stops at multiples of these."""
        return ()
