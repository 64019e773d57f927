"""Write the weighted mean of the weights of several checkpoints as a checkpoint of its own, which
stands for a decay of the learning rate over them (Tian et al. 2025, arXiv:2507.17634).

A SOURCE is a run directory, of which all checkpoints are taken or the --merge-window newest, or an
iter_XXXXXXX in one, oldest first. They may be of different layouts. Weights are read from the fp32
copies of the optimizer where there are some, summed in float64, and rounded once. Expert biases of
routers are averaged like weights. The moments of Adam are not merged: the result has no optimizer
state. With --ema it is the average that a run with --ema-decay kept, for every tool that takes a
checkpoint; expert biases are those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from megatron.arguments import arg
from tools.shared.program import complain, run_program

from .decays import DECAYS, decay_weights


def local(word: str) -> Path:
    """A path. Raises ValueError for a URL."""
    from ..convert.options import local

    return local(word)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which checkpoints, and how much of each."""

    save: Path = arg(parse=local, metavar="DIR")
    """run directory to create"""

    merge_window: int | None = arg(None, minimum=1)
    """of a run directory only so many checkpoints, the newest"""

    merge_weights: tuple[str, ...] = arg(("linear",))
    """the decay that they stand for: linear (their mean), cosine or 1-sqrt; or a number for each,
    oldest first, which are divided by their sum"""

    ema: bool = arg(False)
    """the averages of --ema-decay in the place of the weights; of a run directory those of the
    newest checkpoint, unless --merge-window is given"""

    sources: tuple[Path, ...] = arg(position="positional", metavar="SOURCE", parse=local)
    """run directories, iter_XXXXXXX"""

    def weights(self, count: int) -> list[float]:
        """Of `count` checkpoints, oldest first. Raises ValueError for numbers that are not one for
        each, or that have no mean."""
        words = self.merge_weights
        if len(words) == 1 and words[0] in DECAYS:
            return decay_weights(DECAYS[words[0]], count)
        flag = f"--merge-weights {' '.join(words)}"
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            raise ValueError(
                f"{flag}: give {', '.join(DECAYS)}, or numbers [value-malformed]"
            ) from None
        if len(numbers) != count:
            raise ValueError(f"{flag}: {count} checkpoints need {count} numbers [value-malformed]")
        total = sum(numbers)
        if not all(map(isfinite, numbers)) or not 0 < total < float("inf"):
            raise ValueError(f"{flag}: the sum must be more than 0 [value-out-of-range]")
        return [number / total for number in numbers]


def _check(options: Options) -> list[str]:
    try:
        options.weights(len(options.merge_weights))
    except ValueError as error:
        return [str(error)]
    return []


def _merge(options: Options) -> None:
    from .merge import merge

    window, weights = options.merge_window, options.weights
    print(merge(options.sources, options.save, window, weights, options.ema))


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 it could not be done, 2 a wrong command line."""
    try:
        return run_program(
            Options,
            _merge,
            argv,
            prog="merge_checkpoints.py",
            description=__doc__ or "",
            check=_check,
        )
    except ModuleNotFoundError:
        needs = (
            "addons/convert/ is not there, which reads and writes checkpoints; install the suite"
        )
        complain(ValueError(f"{needs} with it [feature-not-installed]"))
        return 2
