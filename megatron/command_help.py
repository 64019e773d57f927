"""The text of --help, and what was probably meant by a flag or a number that cannot be read."""

import ast
import difflib
import functools
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

_NAMED = 4  # spellings of what is not here
Flag = Any  # of megatron.arguments, which loads this module
Parser = Any


def docstrings(owner: type) -> dict[str, str]:
    """The docstring below each field of a class and those that it inherits, each in one line."""
    texts: dict[str, str] = {}
    for declared in reversed(owner.__mro__):
        texts |= _documented(declared.__module__, "<locals>" in declared.__qualname__).get(
            declared.__name__, {}
        )
    return texts


@functools.cache
def _documented(module: str, inside: bool) -> dict[str, dict[str, str]]:
    """The docstrings by class and field, of classes `inside` functions, too. The compiler drops
    them, so they are read in the module's source; without it there are none."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError, SyntaxError, ValueError):
        return {}
    classes: dict[str, dict[str, str]] = {}
    for declared in ast.walk(tree) if inside else tree.body:
        if isinstance(declared, ast.ClassDef):
            for field, below in itertools.pairwise(declared.body):
                match field, below:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        classes.setdefault(declared.name, {})[name] = " ".join(text.split())
    return classes


def help_text(parser: Parser, topic: str = "") -> str:
    """The text for --help: every flag of the sections, with its default; of a topic the sections
    that have all its words, or the beginning of words, in their title, then flags that have them in
    their spelling; without such a section, or in their help."""
    if topic:
        return _help_of_topic(parser, topic)
    text = parser.description.strip()
    lines = [
        usage(parser),
        "",
        *(text.splitlines() if "\n" in text else textwrap.wrap(text, 110)),
        "",
    ]
    for flag in [*parser.positionals, *filter(None, [parser.after_dashes])]:
        lines += _help_lines(flag.spelling, help_with_default(flag))
    lines += _help_lines(
        "-h, --help [TOPIC]",
        "print this text, or the flags of a topic (--help moe), and exit",
    )
    if parser.named:
        lines += _help_lines(f"{parser.named.spelling} NAME", parser.named.help)
    lines += _help_lines("--version", "print the version and exit")
    lines += _help_lines("--explain CODE", "print what the code of a message means, and exit")
    for group, title in parser.sections.items():
        shown = [flag for flag in parser.flags if flag.group == group and flag.position == "flag"]
        lines += ["", title] * bool(shown)
        for flag in shown:
            lines += _flag_lines(flag)
    if parser.extra:
        lines += ["", parser.extra.help()]
    return "\n".join(lines) + "\n"


def _help_of_topic(parser: Parser, topic: str) -> str:
    if parser.named and topic == parser.named.topic:
        return parser.named.listing()
    wanted = [word for word in re.split(r"[\s_-]+", topic.lower()) if word]
    titled = [group for group, title in parser.sections.items() if _speaks_of(wanted, title)]
    lines = []
    for group in [*titled, *(group for group in parser.sections if group not in titled)]:
        shown = [
            flag
            for flag in parser.flags
            if flag.group == group
            and (
                group in titled or _speaks_of(wanted, *flag.spellings, *[flag.help] * (not titled))
            )
        ]
        lines += ["", parser.sections[group]] * bool(shown)
        for flag in shown:
            lines += _flag_lines(flag)
    own = parser.extra.help(functools.partial(_speaks_of, wanted)) if parser.extra else ""
    lines += ["", own] * bool(own)
    lines += _refused(parser, wanted)
    if not lines:
        return f"{parser.prog}: no flag speaks of {topic!r}{_nearest(parser, wanted)}\n"
    return "\n".join(lines[1:]) + "\n"


def _refused(parser: Parser, wanted: Sequence[str]) -> list[str]:
    """What the program cannot do of a topic, and what to use in its place."""
    lines = []
    for reason, every in parser.foreign_flags.refused().items():
        # of a family, only one that no flag of the program is of
        spellings = [
            s for s in every if not any(known.startswith(s[:-1]) for known in parser.by_spelling)
        ]
        named = [s for s in spellings if _speaks_of(wanted, s)]
        if named or (spellings and _speaks_of(wanted, *spellings, reason)):
            lines += _help_lines(", ".join((named or spellings)[:_NAMED]), reason)
    return ["", "Not here."] * bool(lines) + lines


def _nearest(parser: Parser, wanted: Sequence[str]) -> str:
    """What a topic may have meant that no flag speaks of."""
    words = sorted({w for s in parser.every_spelling for w in s.strip("-").split("-") if w})
    close = [difflib.get_close_matches(word, words, 1, 0.75) for word in wanted]
    if all(close):
        return f"; did you mean --help {' '.join(word for (word,) in close)}?"
    page = parser.foreign_flags.page
    return f"; --help lists all{', and ' * bool(page)}{page}{' what is not here' * bool(page)}"


def _speaks_of(wanted: Sequence[str], *texts: str) -> bool:
    """Whether each word begins one of the texts' words."""
    words = re.split(r"[^a-z0-9]+", " ".join(texts).lower())
    return all(any(word.startswith(start) for word in words) for start in wanted)


def _flag_lines(flag: Flag) -> list[str]:
    head = " ".join(filter(None, [", ".join(flag.spellings), flag.metavar]))
    return _help_lines(head, help_with_default(flag))


def usage(parser: Parser) -> str:
    """The first line of the help."""
    if not parser.takes_words:
        return f"usage: {parser.prog} [--flag [value ...]] [@FILE] ..."
    words = [flag.metavar if flag.required else f"[{flag.metavar}]" for flag in parser.positionals]
    words.append("[--flag [value ...]] ...")
    if parser.after_dashes:
        words.append(f"[{parser.after_dashes.spelling} ...]")
    return " ".join([f"usage: {parser.prog}", *words])


def help_with_default(flag: Flag) -> str:
    """The help text, and the default where it says something."""
    shown = (
        flag.default in (None, (), "") or flag.kind in ("off", "switch") or "(default" in flag.help
    )
    if flag.required and flag.position == "flag":
        return f"{flag.help} (required)"
    return flag.help if shown else f"{flag.help} (default: {flag.default})"


def _help_lines(head: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, 76) or [""]
    if len(head) > 30:
        return [f"  {head}", *(" " * 34 + line for line in wrapped)]
    return [f"  {head:<31} {wrapped[0]}", *(" " * 34 + line for line in wrapped[1:])]


def unknown_flag(parser: Parser, spelling: str) -> tuple[str, set[str]]:
    """The problem of a flag that does not exist, and the names of the flags that were meant."""
    dashed = "--" + spelling.lstrip("-").replace("_", "-")
    known = parser.every_spelling
    extra = parser.extra.by_spelling if parser.extra else {}
    shown = sorted(s for s, flag in known.items() if flag.group in parser.sections)
    shown += ["--help", "--version", "--explain", *extra]
    shown += [parser.named.spelling] if parser.named else []
    if dashed in known or dashed in extra:
        close = [dashed]
    elif dashed in parser.foreign_flags.synonyms:
        close = [parser.foreign_flags.synonyms[dashed]]
    else:
        close = _close(dashed, shown) or difflib.get_close_matches(dashed, sorted(known), 1, 0.75)
    meant = {known[s].name for s in close if s in known}
    meant |= {extra[s].dest for s in close if s in extra}
    if explained := parser.foreign_flags.explain(spelling):
        return explained, meant
    if close:
        return f"unknown flag {spelling}; did you mean {' or '.join(close)}? [flag-unknown]", meant
    return f"unknown flag {spelling}; --help lists every flag [flag-unknown]", meant


def _close(spelling: str, known: Sequence[str]) -> list[str]:
    """The known spellings nearest to a wrong one: by letters, else by its words, else by letters
    from farther away."""
    words = set(spelling[2:].split("-"))
    close = difflib.get_close_matches(spelling, known, 3, 0.75)
    if close:
        best = difflib.SequenceMatcher(None, spelling, close[0]).ratio()
        return [
            s for s in close if difflib.SequenceMatcher(None, spelling, s).ratio() > best - 0.05
        ]
    with_words = [s for s in known if words <= set(s[2:].split("-"))]
    return with_words[:3] or difflib.get_close_matches(spelling, known, 2, 0.7)


def as_number(word: str) -> str:
    """How to write a number like 1e9, 300k or 1,000 so that it can be read."""
    plain = word.strip().replace(",", "").lower()
    factor = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}.get(plain[-1:], 1)
    try:
        number = float(plain if factor == 1 else plain[:-1]) * factor
        return f"; write {int(number)}" if number == int(number) else ""
    except (ValueError, OverflowError):
        return ""
