"""Megatron's flags that no config class declares: accepted without effect, read as flags of this
suite, or refused.

A flag that requests less precision or less memory than is used is accepted, with its cost; a flag
that would train another model or lose data is refused. The rows are in `tables.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.arguments import Flag

from .tables import PREFIXES, REASONS, STRATEGIES, SYNONYMS, TABLE

NO_EFFECT = "note"
MORE = "more"
READ_AS = "read-as"
REFUSED = "refused"
__all__ = [
    "FOREIGN",
    "MORE",
    "NO_EFFECT",
    "READ_AS",
    "REFUSED",
    "SYNONYMS",
    "ForeignFlag",
    "accepted",
    "dumped",
    "explain",
    "ignores",
    "parser_flags",
    "prefixes",
    "refused",
    "replaced",
]
_TYPES = {"int": int, "float": float, "str": str, "list": str}
_ROW = re.compile(r"(\w+)(?::(\w+))?=([^!?,]*)((?:[!?][^!?,]*)*)((?:,--[\w-]+)*)")


@dataclass(frozen=True)
class ForeignFlag:
    """One flag of Megatron's that is not ours.

    `takes` is "switch", "off", "int", "float", "str" or "list". `text`: why it has no effect, what
    it costs, what is read in its place, or why it is refused and what to use. `fine`: values other
    than the default that need no note; `only`: the values that are accepted in addition to it,
    where not all are. `dump`: its default is in Megatron's argument dump of 2024.
    """

    name: str
    spelling: str
    aliases: tuple[str, ...]
    default: Any
    takes: str
    verdict: str
    text: str
    fine: tuple = ()
    only: tuple = ()
    dump: bool = False

    def shown(self, value: Any) -> str | None:
        """The flag as it is typed with `value`; None where that is what happens anyway."""
        if value == self.default or value in self.fine:
            return None
        if self.takes in ("switch", "off"):
            return self.spelling
        words = value if isinstance(value, tuple) else (value,)
        return " ".join([self.spelling, *map(str, words)])

    def refuses(self, value: Any) -> bool:
        """Is this value an error?"""
        return self.verdict == REFUSED or bool(self.only) and value not in self.only

    def words(self, value: Any, samples: Any) -> str:
        """What is read in its place."""
        strategy = STRATEGIES.get(value, "/".join(STRATEGIES.values()))
        return self.text.format(shlex.quote(str(value)), samples=samples, strategy=strategy)

    @property
    def reason(self) -> str:
        """What docs/flags.md says of it."""
        if self.verdict != READ_AS:
            return self.text
        only = f" (for {', '.join(map(str, self.only))}; other values are refused)" * bool(
            self.only
        )
        text = self.words("VALUE", "VALUE/--seq-length")
        return f"`{text}`{only}"


def _rows(table: str) -> Iterator[tuple[list[str], str, str]]:
    """(verdict and more, flags, reason) of each row of the table."""
    head: list[str] = []
    for row in re.split(r"\n(?! )", table.strip()):
        if row.startswith("["):
            head = row.strip("[]\n").split()
        elif row:
            flags, _, reason = re.sub(r"\s+", " ", row).partition(" | ")
            yield head, flags.replace(", --", ",--"), _reason(reason)


def _reason(text: str) -> str:
    return REASONS[text[1:]] if text.startswith("&") else text


def _literal(word: str) -> Any:
    if word in ("", "''", "False", "True"):
        return {"": None, "''": "", "False": False, "True": True}[word]
    if word.startswith("("):
        return tuple(map(_literal, word[1:-1].split()))
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


def _flag(word: str, head: Sequence[str], text: str) -> ForeignFlag:
    match = _ROW.fullmatch(word)
    assert match, f"{word}: not NAME[:TYPE]=DEFAULT[!VALUE][?VALUE][,--SPELLING]"
    name, takes, value, values, more = match.groups()
    default = value if takes == "str" else _literal(value)
    if takes is None:
        kinds = {bool: "off" if default else "switch", int: "int", float: "float", tuple: "list"}
        takes = kinds.get(type(default), "str")
    dashed = name.replace("_", "-")
    spelling, *aliases = more.split(",")[1:] or [
        f"--no-{dashed}" if default is True else f"--{dashed}"
    ]
    fine, only = (
        tuple(
            tuple(v.split("/")) if takes == "list" else _literal(v)
            for mark, v in re.findall(r"([!?])([^!?]*)", values)
            if mark == wanted_mark
        )
        for wanted_mark in "!?"
    )
    return ForeignFlag(
        name,
        spelling,
        tuple(aliases),
        default,
        takes,
        head[0],
        text,
        fine,
        only,
        "dumped" in head,
    )


def _table() -> dict[str, ForeignFlag]:
    flags = [
        _flag(word, head, text) for head, words, text in _rows(TABLE) for word in words.split()
    ]
    table = {flag.name: flag for flag in flags}
    assert len(table) == len(flags), "a foreign flag stands twice"
    return table


FOREIGN: Mapping[str, ForeignFlag] = _table()


def parser_flags() -> list[Flag]:
    """The foreign flags as `megatron.arguments` reads them."""
    kinds = {"switch": "switch", "off": "off", "list": "list"}
    return [
        Flag(
            flag.name,
            "foreign",
            flag.spelling,
            flag.aliases,
            kinds.get(flag.takes, "value"),
            _TYPES.get(flag.takes, bool),
            flag.default,
            None,
            text=flag.text,
        )
        for flag in FOREIGN.values()
    ]


def prefixes() -> list[tuple[str, tuple[str, ...], str]]:
    """(verdict, beginnings of spellings, reason) of the families of flags."""
    return [(verdict, tuple(words.split()), _reason(text)) for verdict, words, text in PREFIXES]


def _family(spelling: str) -> tuple[str, str] | None:
    dashed = "--" + spelling.lstrip("-").replace("_", "-")
    for verdict, beginnings, text in prefixes():
        if dashed.startswith(beginnings):
            return verdict, text
    return None


def explain(spelling: str) -> str | None:
    """What to say about an unknown spelling that belongs to a refused family of flags; None for
    any other."""
    family = _family(spelling)
    if family is None or family[0] != REFUSED:
        return None
    return f"{spelling}: not supported: {family[1]} [megatron-flag-not-supported]"


def ignores(spelling: str) -> bool:
    """Does an unknown spelling belong to a family of flags that have no effect?"""
    family = _family(spelling)
    return family is not None and family[0] == NO_EFFECT


def refused(typed: Mapping[str, Any]) -> list[str]:
    """A line for each typed flag that is not supported with the value it was given."""
    lines = []
    for name, value in typed.items():
        flag = FOREIGN[name]
        if flag.refuses(value) and (shown := flag.shown(value)):
            use = flag.text
            if flag.only:
                use = f"use {flag.spelling} {' or '.join(map(str, flag.only))}, or omit the flag"
            lines.append(f"{shown}: not supported: {use} [megatron-flag-not-supported]")
    return lines


def replaced(typed: Mapping[str, Any], seq_length: int = 1) -> dict[str, list[str]]:
    """{flag as typed: words that are read in its place} of the flags that another one replaces.
    `seq_length`: the tokens of a sample."""
    values = {}
    for name, flag in FOREIGN.items():
        value = typed.get(name, flag.default)
        shown = flag.shown(value)
        if flag.verdict == READ_AS and shown and not flag.refuses(value):
            samples = value // seq_length if flag.takes == "int" else None
            values[shown] = shlex.split(flag.words(value, samples))
    return values


def accepted(
    typed: Mapping[str, Any], ignored: Sequence[str] = (), seq_length: int = 1
) -> list[str]:
    """One paragraph about all typed flags that do nothing, or something else than in Megatron; []
    where there is none. `ignored`: flags as typed that only their family is known of."""
    notes: dict[str, list[str]] = {NO_EFFECT: [], MORE: [], READ_AS: []}
    for name, value in typed.items():
        flag = FOREIGN[name]
        shown = flag.shown(value)
        if shown and flag.verdict == MORE:
            notes[MORE].append(f"{shown} ({flag.text})")
        elif shown and flag.verdict == NO_EFFECT:
            notes[NO_EFFECT].append(shown)
    notes[NO_EFFECT] += ignored
    notes[READ_AS] = [
        f"{was} = {' '.join(now)}" for was, now in replaced(typed, seq_length).items()
    ]
    verdicts = (
        ("ignored, the results are the same (reasons: docs/flags.md): ", ", ", NO_EFFECT),
        ("more precision or memory than requested: ", "; ", MORE),
        ("replaced: ", "; ", READ_AS),
    )
    text = ". ".join(
        start + between.join(notes[verdict])
        for start, between, verdict in verdicts
        if notes[verdict]
    )
    if not text:
        return []
    return [f"flags of Megatron-LM: {text} [megatron-flag-has-no-effect]"]


def dumped(typed: Mapping[str, Any]) -> dict[str, Any]:
    """{name: value} of the foreign flags that stand in the argument dump: those of 2024, and those
    that were typed."""
    values = {}
    for name, flag in FOREIGN.items():
        if flag.dump or name in typed:
            value = typed.get(name, flag.default)
            values[name] = list(value) if isinstance(value, tuple) else value
    return values
