"""Named spans of this rank, in seconds; training/ reduces them over ranks and prints them."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any


class Timers:
    """Accumulating stopwatches by name; names above `level` cost nothing.

    Names in `watched`, which may be set, are measured at every level and also summed apart, for
    `pop_watched`.
    `stream`: (a function that marks a moment of the device's own time without waiting, the seconds
    between two of them); spans above level 0 then take it, and wait for the device when popped.
    """

    def __init__(
        self,
        level: int = 0,
        synchronize: Callable[[], None] = lambda: None,
        stream: tuple[Callable[[], Any], Callable[[Any, Any], float]] | None = None,
    ):
        self._level = level
        self._synchronize = synchronize
        self.watched: Collection[str] = ()
        self._watched_seconds = 0.0
        self._elapsed: dict[str, float] = {}
        self._stream = stream
        self._marked: list[tuple[str, bool, Any, Any]] = []  # not yet added up

    @contextmanager
    def __call__(self, name: str, level: int = 0) -> Iterator[None]:
        """Add the time of the block to `name`, when `level` is at most the level asked for."""
        listed = level <= self._level
        if not listed and name not in self.watched:
            yield
            return
        if listed:
            # what begins first stands first, though it may end last
            self._elapsed.setdefault(name, 0.0)
        if self._stream is not None and level > 0:
            mark, _ = self._stream
            start = mark()
            try:
                yield
            finally:
                self._marked.append((name, listed, start, mark()))
            return
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._add(name, listed, time.perf_counter() - start)

    def _add(self, name: str, listed: bool, seconds: float) -> None:
        if listed:
            self._elapsed[name] = self._elapsed.get(name, 0.0) + seconds
        if name in self.watched:
            self._watched_seconds += seconds

    def _collect(self) -> None:
        """Add up what was marked in the device's time."""
        if self._stream is None:
            return
        _, seconds_between = self._stream
        for name, listed, start, end in self._marked:
            self._add(name, listed, seconds_between(start, end))
        self._marked.clear()

    def pop(self, names: list[str] | None = None) -> dict[str, float]:
        """Seconds by name, in the order of first use, and start them again from zero."""
        self._collect()
        chosen = list(self._elapsed) if names is None else [n for n in names if n in self._elapsed]
        return {name: self._elapsed.pop(name) for name in chosen}

    def pop_watched(self) -> float:
        """Seconds in the watched names since the last call."""
        self._collect()
        seconds = self._watched_seconds
        self._watched_seconds = 0.0
        return seconds
