"""What an iteration did, and what the ranks request after it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.config.moe import PER_LAYER


class Requests(NamedTuple):
    """What a rank requests or reports, 0 or 1 each; summed over ranks, the number of ranks that do.

    For another request, add a field here and return it from a hook (hook.py).
    """

    signal: int = 0  # has received the signal that ends the run
    time_up: int = 0  # --exit-duration-in-mins is over
    save_now: int = 0  # --control-file requests a checkpoint (rank 0)
    stop_now: int = 0  # --control-file requests a checkpoint and the end of the run (rank 0)
    written: int = 0  # has written its part of the asynchronous save, or failed to


@dataclass(frozen=True, kw_only=True)
class IterationResult:
    """What one iteration did, or several whose data were not read. The step gives what it measured,
    `Run.advance` adds where the run is then, hooks add to `counts`, `columns` and `points`."""

    iteration: int  # the last one, of several
    iterations: int = 1  # more than one only where data are not read
    global_batch_size: int
    seconds: float
    # up to the sum of gradients and losses over the ranks, which waits for the device
    fwd_bwd_seconds: float = 0.0
    loss: float | None = None
    grad_norm: float | None = None
    # of real parameters: those that are padding always have zero gradients
    num_zeros: int | None = None
    # None; `user`: its data were not read; or why no update was made: `overflow` (fp16), or the
    # feature that vetoed it
    skipped: str | None = None
    # why the data were not read (user, spike ...), or the veto's
    reason: str | None = None
    requests: Requests = Requests()  # of all ranks
    counts: dict[str, float | int | None] = field(default_factory=dict)  # of `Run.counters`
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # of forward_step

    # after it
    consumed_samples: int = 0
    skipped_samples: int = 0
    skipped_iterations: int = 0  # in the whole run
    learning_rate: float = 0.0  # of the next step, as Megatron logs it
    loss_scale: float = 1.0
    adam_beta2: float | None = None
    params_norm: float | None = None

    # of features: more columns of the metrics file, and scalars that boards store at once
    columns: dict[str, Any] = field(default_factory=dict)
    points: dict[str, float] = field(default_factory=dict)

    @property
    def line_metrics(self) -> dict[str, float | None]:
        """Metrics of forward_step that the log line has: not those of single MoE layers."""
        return {k: value for k, value in self.metrics.items() if not k.startswith(PER_LAYER)}

    @property
    def line_norm(self) -> float | None:
        """The gradient norm that the log line has: none where there was no update."""
        return None if self.skipped else self.grad_norm
