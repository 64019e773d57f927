"""The iteration line of --log-format megatron (Megatron-LM's of January 2024)."""

from __future__ import annotations

from megatron.training.logging.iteration import Interval
from megatron.training.logging.line_format import LineFormat
from megatron.training.result import IterationResult


def megatron_line(
    result: IterationResult, i: Interval, train_iters: int, teraflops: float | None = None
) -> str:
    """Megatron-LM's iteration line of January 2024, to the character, for interval `i`."""
    fields = [
        f" iteration {result.iteration:8d}/{train_iters:8d}",
        f" consumed samples: {result.consumed_samples:12d}",
        f" elapsed time per iteration (ms): {i.milliseconds:.1f}",
    ]
    if teraflops is not None:
        fields.append(f" throughput per GPU (TFLOP/s/GPU): {teraflops:.1f}")
    fields += [
        f" learning rate: {result.learning_rate:.3E}",
        f" global batch size: {result.global_batch_size:5d}",
    ]
    if i.losses:
        fields.append(f" lm loss: {i.loss:.6E}")
    fields += [f" {name}: {value:.6E}" for name, value in i.metrics.items()]
    fields.append(f" loss scale: {result.loss_scale:.1f}")
    if result.line_norm is not None:
        fields.append(f" grad norm: {result.line_norm:.3f}")
    if result.num_zeros is not None:
        fields.append(f" num zeros: {result.num_zeros:.1f}")
    if result.params_norm is not None:
        fields.append(f" params norm: {result.params_norm:.3f}")
    fields += [
        f" number of skipped iterations: {i.overflow_skips:3d}",
        f" number of nan iterations: {i.nan_iterations:3d}",
    ]
    if i.user_skips:
        fields.append(f" number of user-skipped iterations: {i.user_skips:3d}")
    for feature, vetoes in i.vetoes.items():
        fields.append(f" number of {feature}-skipped iterations: {vetoes.total():3d}")
    reasons = i.reasons.union(*i.vetoes.values())
    if reasons - {"user"}:
        fields.append(f" skip reason: {' '.join(sorted(reasons))}")
    return " |".join(fields) + " |"


class MegatronLines(LineFormat):
    """--log-format megatron."""

    def _text(self, result: IterationResult, interval: Interval, teraflops: float | None) -> str:
        logged = teraflops if self._config.logging.log_throughput else None
        return megatron_line(result, interval, self.plan.train_iters, logged)
