"""The keys of an InternLM config, taken one by one, and the .args file that comes of them."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MISSING = object()
LARGEST = 1e100  # of numbers that are multiplied by whole ones


@dataclass
class Args:
    """What a config is translated to: lines of flags and comments, the flags alone, and what keeps
    it from being honoured."""

    lines: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        """Begin a part of the file."""
        self.lines += ["", f"# {title}"]

    def flag(self, *words: object, why: str = "") -> None:
        """One line of flags; a text that begins with -- may hold several words."""
        flag_words: list[str] = []
        for word in words:
            flag_words += (
                word.split() if isinstance(word, str) and word.startswith("--") else [_text(word)]
            )
        self.words += flag_words
        text = " ".join(map(shlex.quote, flag_words))
        self.lines.append(f"{text}   # {why}" if why else text)

    def note(self, text: str) -> None:
        """Something that has no flag, and why."""
        self.lines.append(f"# {text}")


def _text(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


class Section:
    """One dict of a config whose keys are taken one by one; those that nobody takes are
    problems."""

    def __init__(self, name: str, values: Mapping[str, Any], args: Args):
        self.name = name
        self.unread = dict(values)
        self.args = args
        self.flag = args.flag
        self.note = args.note

    def take(
        self,
        key: str,
        default: Any = None,
        check: Callable[[Any], bool] | None = None,
        wants: str = "",
    ) -> Any:
        """The value of a key (gone from those left), or the default; one that `check` refuses is a
        problem."""
        value = self.unread.pop(key, MISSING)
        if value is MISSING:
            return default
        if check is not None and not check(value):
            self.refuse(key, value, f"must be {wants}")
            return default
        return value

    def integer(self, key: str, default: Any = None, least: int = 0) -> Any:
        """A whole number of at least so much (or None, which is the default)."""
        return self.take(
            key,
            default,
            lambda v: v is None or type(v) is int and least <= v < 2**63,
            f"a whole number, at least {least}",
        )

    def number(self, key: str, default: Any = None) -> Any:
        """A number."""
        return self.take(
            key, default, lambda v: type(v) in (int, float) and abs(v) <= LARGEST, "a number"
        )

    def switch(self, key: str, default: bool) -> bool:
        """True or False."""
        return self.take(key, default, lambda v: isinstance(v, bool), "True or False")

    def text(self, key: str, default: str | None = None) -> Any:
        """A text or None."""
        return self.take(key, default, lambda v: v is None or isinstance(v, str), "a text")

    def only(self, key: str, value: Any, why: str) -> None:
        """A key of which only one value can be honoured."""
        actual = self.take(key, value)
        if actual != value:
            self.refuse(key, actual, why)

    def ignore(self, *keys: str, why: str) -> None:
        """Keys that change no number here; they become a comment."""
        for key in keys:
            if key in self.unread:
                self.args.note(f"{self.name}.{key} = {self.unread.pop(key)!r}: {why}")

    def refuse(self, key: str, value: Any, why: str) -> None:
        """A value that cannot be honoured."""
        self.args.problems.append(f"{self.name}.{key} = {value!r}: {why}")

    def done(self, known: tuple[str, ...] = ()) -> None:
        """What is left is unknown."""
        for key in self.unread:
            near = difflib.get_close_matches(key, known, 1)
            hint = (
                f"; did you mean {near[0]}?"
                if near
                else "; remove it if the run does not depend on it"
            )
            self.args.problems.append(f"{self.name}.{key}: is no key that this tool knows{hint}")
