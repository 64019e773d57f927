"""The iteration line of --log-format megatron (Megatron-LM's of January 2024)."""

from __future__ import annotations

from megatron.training.logging.iteration import IterationResult, IterationRow
from megatron.training.logging.line_format import LineFormat


def megatron_line(row: IterationRow, log_throughput: bool) -> str:
    """Megatron-LM's iteration line of January 2024, to the character."""
    i = row.interval
    parts = [
        f" iteration {row.iteration:8d}/{row.train_iters:8d}",
        f" consumed samples: {row.consumed_samples:12d}",
        f" elapsed time per iteration (ms): {i.milliseconds:.1f}",
    ]
    if log_throughput and row.teraflops is not None:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {row.teraflops:.1f}")
    parts += [
        f" learning rate: {row.learning_rate:.3E}",
        f" global batch size: {row.global_batch_size:5d}",
    ]
    if i.losses:
        parts.append(f" lm loss: {i.loss:.6E}")
    parts += [f" {name}: {value:.6E}" for name, value in i.metrics.items()]
    parts.append(f" loss scale: {row.loss_scale:.1f}")
    if row.grad_norm is not None:
        parts.append(f" grad norm: {row.grad_norm:.3f}")
    if row.num_zeros is not None:
        parts.append(f" num zeros: {row.num_zeros:.1f}")
    if row.params_norm is not None:
        parts.append(f" params norm: {row.params_norm:.3f}")
    parts += [
        f" number of skipped iterations: {i.overflow_skips:3d}",
        f" number of nan iterations: {i.nan_iterations:3d}",
    ]
    if i.user_skips:
        parts.append(f" number of user-skipped iterations: {i.user_skips:3d}")
    for feature, vetoes in i.vetoes.items():
        parts.append(f" number of {feature}-skipped iterations: {vetoes.total():3d}")
    reasons = i.reasons.union(*i.vetoes.values())
    if reasons - {"user"}:
        parts.append(f" skip reason: {' '.join(sorted(reasons))}")
    return " |".join(parts) + " |"


class MegatronLines(LineFormat):
    """--log-format megatron."""

    def _text(self, row: IterationRow, result: IterationResult) -> str:
        return megatron_line(row, self._config.logging.log_throughput)
