"""The sums of one step: losses, tokens and counts, first over micro-batches, then over ranks."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from megatron.training.result import Requests

# Of a metric: a tensor, whose mean is logged, or (sum, count).
MetricValue = torch.Tensor | float | tuple[torch.Tensor | float, torch.Tensor | float]


class Totals(NamedTuple):
    """The sums over micro-batches and ranks, on the host; `metrics` are means, None without a
    count."""

    loss: float
    tokens: float
    requests: Requests
    counters: list[list[float]]
    routers: list[float]
    metrics: dict[str, float | None]


class StepSums:
    """Named sums in one float64 tensor `values`, so that one collective sums them all.

    Each name is a view [n] of `values`: `loss` and `tokens` [1], `requests` one per field of
    `Requests`, `routers` the sums of `model.moe.RouterStep` [`routers`]; `counters` is one view
    for each of `Run.counters`, whose sizes are given. The metrics of `forward_step`, whose names
    the first micro-batch shows, follow once `reserve_metrics` has made room for them.
    """

    def __init__(
        self,
        device: torch.device,
        counters: Sequence[int] = (),
        routers: int = 0,
    ) -> None:
        self._sizes = [1, 1, len(Requests._fields), routers, *counters]
        self._metrics: dict[str, torch.Tensor] = {}  # (sum, count) [2] each
        self._names: Sequence[str] = ()
        # One vector, so that one all-reduce and one copy to the host serve all sums of a step; the
        # attributes below are views into it.
        self.values = torch.zeros(sum(self._sizes), dtype=torch.float64, device=device)
        self._name_views()

    def _name_views(self) -> None:
        views = self.values.split([*self._sizes, *(2 for _ in self._names)])
        self.loss, self.tokens, self.requests, self.routers = views[:4]
        self.counters = views[4 : len(self._sizes)]
        self._metrics = dict(zip(self._names, views[len(self._sizes) :], strict=True))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that were added."""
        return tuple(sorted(self._metrics))

    def add_loss(
        self, loss: torch.Tensor, tokens: torch.Tensor | int, logged: MetricValue | None = None
    ) -> None:
        """Add the sum of losses of a micro-batch, or with `logged` that of another loss, as many
        tokens of it as there are."""
        if logged is not None:
            total, count = _sum_and_count(logged)
            loss = torch.as_tensor(total) * tokens / torch.as_tensor(count).clamp(min=1)
        self.loss += loss.detach()
        self.tokens += tokens

    def add_metrics(self, metrics: Mapping[str, MetricValue]) -> None:
        """Add those of a micro-batch."""
        for name, value in metrics.items():
            total, count = _sum_and_count(value)
            pair = self._metrics.setdefault(name, self.values.new_zeros(2))
            pair[0] += total
            pair[1] += count

    def reserve_metrics(self, names: Sequence[str]) -> None:
        """Make room for these in `values`; what was added is kept, others are zeros."""
        if names:
            # Their names are known after the first micro-batch, so the vector grows here, by the
            # same names in the same order on every rank.
            zeros = self.values.new_zeros(2)
            self.values = torch.cat([self.values, *(self._metrics.get(n, zeros) for n in names)])
            self._names = names
            self._name_views()

    def clear_losses(self, of_routers: bool = True) -> None:
        """Forget loss, tokens and metrics: another rank has the same; so it has losses of routers,
        unless they see other tokens."""
        if of_routers:
            self.routers.zero_()
        for slots in (self.loss, self.tokens, *self._metrics.values()):
            slots.zero_()

    def totals(self) -> Totals:
        """All sums by name. It waits for the device, once."""
        values = iter(self.values.tolist())
        loss, tokens, requests, routers, *counters = (
            [next(values) for _ in range(size)] for size in self._sizes
        )
        return Totals(
            loss[0],
            tokens[0],
            Requests(*map(int, requests)),
            counters,
            routers,
            {
                name: total / count if count else None
                # one iterator twice: pairs of neighbours
                for name, total, count in zip(self._names, values, values, strict=True)
            },
        )


def _sum_and_count(
    value: MetricValue,
) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """Of what `MetricValue` says, without gradients."""
    if isinstance(value, torch.Tensor):
        return value.detach().sum(dtype=torch.float64), value.numel()
    total, count = value if isinstance(value, tuple) else (value, 1)
    return total.detach() if isinstance(total, torch.Tensor) else total, count


def set_counts(slots: torch.Tensor, counts: Sequence[float]) -> None:
    """Write counts [n] into slots that are zeros; only those that are not 0, since on a GPU each
    one written takes a kernel."""
    for slot, count in enumerate(counts):
        if count:
            slots[slot] = count
