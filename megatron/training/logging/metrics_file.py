"""--metrics-file: one JSON object per iteration, evaluation and score."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.training.logging.iteration import ResultWriter
from megatron.training.logging.output import OutputFile
from megatron.training.result import IterationResult


class MetricsFile(ResultWriter):
    """Writes lines to `file`; `seq_length` in tokens."""

    def __init__(self, file: OutputFile, seq_length: int):
        self._file = file
        self._seq_length = seq_length

    def iteration(
        self,
        r: IterationResult,
        teraflops: float | None,
        memory: Callable[[], Mapping[str, float]],
    ) -> None:
        """As ResultWriter's. Raises ValueError where a metric has the name of a column."""
        trained = r.skipped != "user" and r.seconds > 0
        tokens = r.global_batch_size * self._seq_length
        row = {
            "iteration": r.iteration,
            "lm_loss": r.loss,
            "grad_norm": r.grad_norm,
            "learning_rate": r.learning_rate,
            "consumed_samples": r.consumed_samples,
            "consumed_tokens": r.consumed_samples * self._seq_length,
            "elapsed_ms": round(r.seconds * 1000.0, 3),
            "tokens_per_second": round(tokens / r.seconds, 3) if trained else None,
            "tflops": None if teraflops is None else round(teraflops, 6),
            "loss_scale": r.loss_scale,
            "global_batch_size": r.global_batch_size,
            "skipped": int(r.skipped is not None),
            "skip_reason": r.reason or r.skipped,
            "skipped_iterations_total": r.skipped_iterations,
            "skipped_samples": r.skipped_samples,
            **r.columns,
            **r.counts,
        }
        clashes = row.keys() & r.metrics.keys()
        if clashes:
            raise ValueError(
                f"forward_step: --metrics-file has a column {min(clashes)} already; give this "
                "metric another name [metric-name-taken]"
            )
        self._write({**row, **r.metrics})

    def evaluation(
        self, key: str, split: str, iteration: int, samples: int, values: Mapping[str, float | None]
    ) -> None:
        """As ResultWriter's."""
        row = {"iteration": iteration, "split": split, key.replace(" ", "_"): values["loss"]}
        row |= {name: values[name] for name in ("perplexity", "bits_per_byte")}
        self._write({**row, "consumed_samples": samples})

    def tasks(self, iteration: int, samples: int, scores: Mapping[str, float]) -> None:
        """As ResultWriter's."""
        row = {"iteration": iteration, "split": "tasks", "consumed_samples": samples}
        self._write({**row, **scores})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({name: _finite(value) for name, value in row.items()}) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN: such numbers are written as strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
