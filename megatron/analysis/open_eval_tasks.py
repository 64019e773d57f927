"""--eval-tasks at start-up: reads the tasks, or says which package is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.analysis.eval_tasks import EvalTasks


def opened(files: Sequence[str]) -> EvalTasks:
    """The tasks of YAML files. Raises ValueError if one is wrong or lm-eval is not installed."""
    try:
        from megatron.analysis.eval_tasks import EvalTasks
    except ImportError as error:
        raise ValueError(
            f"--eval-tasks needs the package lm-eval ({error}): pip install lm-eval, or omit the "
            "flag [package-missing]"
        ) from None
    return EvalTasks(files)
