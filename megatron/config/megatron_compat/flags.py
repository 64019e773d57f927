"""Megatron's flags that no config class declares: without effect, or refused with what to use.
Knows no config.

A flag is accepted when the numbers of the run are the ones that were asked for although it does
nothing here; it is refused when ignoring it would train another model or lose something that was
asked for. Names, spellings and defaults: facts/megatron.md 13 (the 260 names of January 2024, the
newer ones, and removed ones that old scripts still have).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.arguments import Flag
from megatron.config.megatron_compat.tables import FAMILIES, NEWER, OLD, PREFIXES, REMOVED, SYNONYMS

NO_EFFECT = "no effect"
REFUSED = "not supported"
__all__ = [
    "FOREIGN",
    "NO_EFFECT",
    "REFUSED",
    "SYNONYMS",
    "ForeignFlag",
    "dumped",
    "explain",
    "parser_flags",
    "refused",
    "without_effect",
]
_TYPES = {"int": int, "float": float, "str": str, "list": str, "ints": int}


@dataclass(frozen=True)
class ForeignFlag:
    """One flag of Megatron's that is not ours.

    `takes` is "switch", "off", "int", "float", "str", "list" or "ints"; `verdict` is NO_EFFECT
    ("because `text`") or REFUSED (`text` says why, and what to use). `fine`: values beside the
    default that say what happens here anyway. `dump`: its default stands in Megatron's argument
    dump and is true here too. `era`: "2024", "newer" or "removed".
    """

    name: str
    spelling: str
    default: Any
    takes: str
    verdict: str
    text: str
    fine: tuple = ()
    dump: bool = False
    era: str = "2024"

    def line(self, value: Any) -> str | None:
        """What to say when it is typed with `value`; None when that is what happens here anyway."""
        if value == self.default or value in self.fine:
            return None
        shown = (
            self.spelling if self.takes in ("switch", "off") else f"{self.spelling} {_shown(value)}"
        )
        if self.verdict == NO_EFFECT:
            return f"{shown}: no effect here, because {self.text} [megatron-flag-has-no-effect]"
        return f"{shown}: not supported: {self.text} [megatron-flag-not-supported]"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _make(
    verdict: str,
    era: str,
    name: str,
    default: Any,
    text: str,
    *,
    spelling: str | None = None,
    takes: str | None = None,
    fine: tuple = (),
    dump: bool | None = None,
) -> ForeignFlag:
    if takes is None:
        kinds = {bool: "off" if default else "switch", int: "int", float: "float", tuple: "list"}
        takes = kinds.get(type(default), "str")
    dumped = era == "2024" if dump is None else dump
    spelling = spelling or "--" + name.replace("_", "-")
    return ForeignFlag(name, spelling, default, takes, verdict, text, fine, dumped, era)


def _from_families() -> list[ForeignFlag]:
    """Whole families of 2024 for other models: one sentence each, a line of name=default words (or
    name=spelling)."""
    found = []
    for text, words in FAMILIES:
        for word in words.split():
            name, _, default = word.partition("=")
            spelling = default if default.startswith("--") else None
            value = True if spelling else _literal(default)
            takes = "list" if name == "retriever_report_topk_accuracies" else None
            found.append(
                _make(
                    REFUSED, "2024", name, value, text, spelling=spelling, takes=takes, dump=False
                )
            )
    return found


def _literal(word: str) -> Any:
    if word in ("", "False"):
        return None if word == "" else False
    try:
        return float(word) if "." in word else int(word)
    except ValueError:
        return word


def _table() -> dict[str, ForeignFlag]:
    flags = _from_families()
    for era, rows in (("2024", OLD), ("newer", NEWER), ("removed", REMOVED)):
        for accepted, name, default, text, more in rows:
            flags.append(
                _make(NO_EFFECT if accepted else REFUSED, era, name, default, text, **more)
            )
    found = {flag.name: flag for flag in flags}
    assert len(found) == len(flags), "a foreign flag stands twice"
    return found


FOREIGN: Mapping[str, ForeignFlag] = _table()


def parser_flags() -> list[Flag]:
    """The foreign flags as `megatron.arguments` reads them."""
    found = []
    for flag in FOREIGN.values():
        kind = {"switch": "switch", "off": "off", "list": "list", "ints": "list"}.get(
            flag.takes, "value"
        )
        found.append(
            Flag(
                flag.name,
                "foreign",
                flag.spelling,
                (),
                kind,
                _TYPES.get(flag.takes, bool),
                flag.default,
                None,
                flag.text,
            )
        )
    return found


def explain(spelling: str) -> str | None:
    """What to say about an unknown spelling that belongs to a known family of flags; None for any
    other."""
    dashed = "--" + spelling.lstrip("-").replace("_", "-")
    for prefixes, text in PREFIXES:
        if dashed.startswith(tuple(prefixes.split())):
            return f"{spelling}: not supported: {text} [megatron-flag-not-supported]"
    return None


def refused(typed: Mapping[str, Any]) -> list[str]:
    """A line for each typed flag that is not supported with the value it was given."""
    return _lines(typed, REFUSED)


def without_effect(typed: Mapping[str, Any]) -> list[str]:
    """A line for each typed flag that is accepted but changes nothing."""
    return _lines(typed, NO_EFFECT)


def _lines(typed: Mapping[str, Any], verdict: str) -> list[str]:
    lines = [
        FOREIGN[name].line(value)
        for name, value in typed.items()
        if name in FOREIGN and FOREIGN[name].verdict == verdict
    ]
    return [line for line in lines if line]


def dumped(typed: Mapping[str, Any]) -> dict[str, Any]:
    """{name: value} of the foreign flags that stand in the argument dump: those of 2024, and those
    that were typed."""
    found = {}
    for name, flag in FOREIGN.items():
        if flag.dump or name in typed:
            value = typed.get(name, flag.default)
            found[name] = list(value) if isinstance(value, tuple) else value
    return found
