"""Reads back what runs wrote to TensorBoard."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_TAGS = {
    "lm loss": "loss",
    "grad-norm": "grad_norm",
    "learning-rate": "learning_rate",
    "batch-size": "global_batch_size",
    "loss/train": "loss",
    "train/loss": "loss",  # before 0.2.0
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "train/batch_size": "global_batch_size",
    "perf/tokens_per_second": "tokens_per_second",
}
_EVALUATED = re.compile(
    r"(?:lm loss |loss/)?(?P<split>valid(?:ation)?|test)(?P<name>-[^/ ]+)?(?:/loss)?"
)


def read_points(path: str) -> Iterator[tuple[str, int, float]] | None:
    """The points of the event files under a directory, or of one; None where there are none."""
    folder = Path(path)
    if any(folder.rglob("*tfevents*")) if folder.is_dir() else "tfevents" in folder.name:
        return _named(read_scalars(path))
    return None


def _named(scalars: Iterable[tuple[str, int, float]]) -> Iterator[tuple[str, int, float]]:
    for tag, step, value in scalars:
        evaluated = _EVALUATED.fullmatch(tag)
        if tag in _TAGS:
            yield _TAGS[tag], step, value
        elif evaluated:
            name = evaluated["name"] or ""
            yield "test" if evaluated["split"] == "test" else f"validation{name}", step, value


def read_scalars(directory: str) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of every scalar under a directory, file by file as they were begun and in
    the order written.

    Raises ValueError where the package is missing.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(
            f"{directory}: TensorBoard files need the package tensorboard: pip install "
            "tensorboard [package-missing]"
        ) from None
    for path in sorted(Path(directory).rglob("*tfevents*"), key=lambda path: (path.name, path)):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield value.tag, event.step, value.simple_value
                elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name in (
                    "",
                    "scalars",
                ):
                    number = make_ndarray(value.tensor)
                    if number.ndim == 0 and number.dtype.kind == "f":
                        yield value.tag, event.step, float(number)
