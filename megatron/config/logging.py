"""Flags of the log and the metrics file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import Needs, arg

SHORT = "short"


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Log lines, metrics file, timers."""

    log_interval: int = arg(100, minimum=1, per_run=True)
    """iterations between log lines"""

    log_format: str = arg(SHORT, choices=(SHORT,), per_run=True, alias=("--log-dialect",))
    """output format; short: at most 100 columns"""

    print_arguments: Literal["changed", "all", "none"] | None = arg(None, per_run=True)
    """arguments printed at the start: those that differ from their defaults, all, or none (default:
    changed with --log-format short, otherwise all)"""

    metrics_file: str | None = arg(None, per_run=True)
    """JSON Lines file with one object per iteration"""

    progress: Literal["auto", "on", "off"] = arg("auto", per_run=True)
    """progress and ETA. With --log-format short: a status line between log lines if stdout is a
    terminal, unless off. With other formats: a line on stderr after each log line; auto: if stderr
    is a terminal"""

    log_subsets: bool = arg(False)
    """tokens and loss per data set of a blend, in the metrics file; always with --packed-samples
    and where --log-format needs them"""

    log_accuracy: bool = arg(
        False, requires=Needs("--log-subsets", lambda v: v["log_subsets"] or v.config.needs_subsets)
    )
    """with --log-subsets: top-1 token accuracy, total and per data set"""

    log_throughput: bool = arg(False)
    """log TFLOP/s per rank on the iteration line"""

    log_num_zeros_in_grad: bool = arg(False)
    """log the number of zeros in the gradients"""

    log_params_norm: bool = arg(False)
    """log the L2 norm of the parameters on the iteration line"""

    timing_log_level: Literal[0, 1, 2] = arg(0)
    """detail of the timers in the log: 0 (fewest) to 2"""

    timing_log_option: Literal["max", "minmax", "all"] = arg(
        "minmax",
        needs=Needs(
            "--timing-log-level 1 or 2",
            lambda v: v["timing_log_level"] or not v.config.logging.is_short,
        ),
    )
    """timers of the ranks in the log: max, minmax or all"""

    @property
    def is_short(self) -> bool:
        """Is this suite's own short output format chosen?"""
        return self.log_format == SHORT

    @property
    def printed_arguments(self) -> str:
        """Which arguments are printed at the start: `changed`, `all` or `none`."""
        return self.print_arguments or ("changed" if self.is_short else "all")
