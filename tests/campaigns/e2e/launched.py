"""Runs that launchers start by the script's path in a folder with their data."""

from pathlib import Path

from tests.runs import EXACT, SMALL, Finished, train, write_text


def argv(iterations: int = 4, *extra: str) -> list[str]:
    """Relative paths: they count from where the command is given."""
    data = "--data-path text --split 90,10,0 --save save --load save --save-interval 2"
    length = ["--train-iters", str(iterations)]
    return [*SMALL, *data.split(), *length, "--metrics-file", "metrics.jsonl", *extra]


def rows(folder: Path) -> list[tuple]:
    """What the run in `folder` computed."""
    return Finished(folder, 1).series(*EXACT)


def forked(folder: Path, iterations: int, *extra: str) -> Finished:
    """The same on two forked ranks, from the first iteration on."""
    words = argv(iterations, *extra)
    words[words.index("text")] = write_text(folder / "text", 260)
    for at, word in enumerate(words):
        words[at] = str(folder / "two/save") if word == "save" else word
    return train(folder / "two", words, 2)
