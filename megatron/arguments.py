"""The command-line parser: flags are fields of frozen dataclasses, declared once, and actions of
one `argparse.ArgumentParser`, to which a program may add its own.

What was typed stays apart from the defaults, so that precedence is a dictionary update:
defaults < the checkpoint's args < @file < typed.
A command line is split at its flags, and each flag's words go to its action by themselves: argparse
would stop at the first problem, and take -1e-5 for a flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import itertools
import math
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron.problems import Problems as Problems
from megatron.problems import credentials_problem

if TYPE_CHECKING:
    from megatron.extra_arguments import ExtraArguments

_OFF = re.compile("--(no|disable)-")
_NUMBER = re.compile(r"-(\d|\.\d|inf$|nan$)")
_CALLED = {int: "a whole number", float: "a number"}
_SHOWN = {int: "N", float: "X", str: "TEXT"}
# What no number of a flag reaches: 64 bits hold whole numbers, and nothing computes with infinity.
_BEYOND = {int: 1 << 63, float: math.inf}
_LONGEST_SHOWN = 60  # characters of a value in a message about it
MOST_PROBLEMS = 100  # of a command line, each of which is searched for what was meant
MOST_FLAGS = 10_000  # of a command line


class Needs(NamedTuple):
    """What a flag needs in order to have an effect: in words, and whether the checked values of a
    command line (config.checks.facts.Facts) have it."""

    condition: str
    met: Callable[[Any], Any]


# a flag with another value than its default (its field), a flag with this value, or something else
Need = str | tuple[str, Any] | Needs


class Limits(NamedTuple):
    """The range of a number; None: no such limit."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    def problem(self, value: float) -> str | None:
        """What is wrong with a value outside of the range or not finite."""
        low, above, high, below = self
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number [value-not-finite]"
        if not (
            (low is None or value >= low)
            and (above is None or value > above)
            and (high is None or value <= high)
            and (below is None or value < below)
        ):
            return f"must {self} [value-out-of-range]"
        return None

    def __str__(self) -> str:
        if self == Limits(minimum=0):
            return "not be negative"
        names = ("at least", "greater than", "at most", "less than")
        bounds = [
            f"{name} {bound}" for name, bound in zip(names, self, strict=True) if bound is not None
        ]
        return f"be {' and '.join(bounds)}"


def arg(  # noqa: PLR0913
    default: Any = MISSING,
    *,
    help: str = "",
    flag: str | None = None,
    alias: tuple[str, ...] = (),
    choices: tuple | None = None,
    off: str | None = None,
    nargs: str | int | None = None,
    extend: bool = False,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    position: str = "flag",
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    needs: Need | list[Need] | None = None,
    requires: Need | list[Need] | None = None,
    excludes: tuple[str, ...] = (),
    no_effect: str | None = None,
    trained: bool | str = False,
    per_run: bool = False,
    missing: str | None = None,
) -> Any:
    """A config field that is also a command-line flag. Without `default` it must be given. Its help
    is the docstring below the field, as in Megatron-LM's configurations, or a computed `help`.

    `flag` is the spelling when it is not the name with dashes; `off` is the spelling that turns a
    true-by-default bool off (then there is no on-switch); `nargs` is the number of a list's values
    when it is fixed, or "words" for one text that may be typed as several words;
    `extend` collects repetitions into one tuple; `parse` converts one word (and raises
    ValueError); `metavar` stands for its value in help. `position` is "flag", or "positional"
    (values without a flag), or "after --" (a tuple of all words after `--`); these two are for
    tools, and `metavar` is their name.

    A number must be at least `minimum`, more than `above`, at most `maximum`, less than `below`.
    `missing`: training needs it; what to do about that. The checks see to it, so the type is
    without None, though the default is None. Without what it `needs` the flag has no effect, which
    is said when it is typed, and its default as value; `no_effect` says why it never has one. With
    another value than its default it `requires` others, and `excludes` the flags of some fields.
    `trained`: the function of trained weights depends on it, or on the property of that name of
    its config class. `per_run`: another value on resume is not worth a line.
    """
    meta = {name: value for name, value in locals().items() if name != "default"}
    limits = Limits(minimum, above, maximum, below)
    meta["limits"] = None if limits == Limits() else limits
    meta |= {"needs": _list(needs), "requires": _list(requires)}
    return (
        dataclasses.field(metadata=meta)
        if default is MISSING
        else dataclasses.field(default=default, metadata=meta)
    )


def _list(needs: Need | list[Need] | None) -> tuple[Need, ...]:
    if isinstance(needs, list):
        return tuple(needs)
    return (needs,) if needs else ()


@dataclasses.dataclass(frozen=True)
class Flag:
    """One command-line flag: where it lives, its spellings, its type."""

    name: str
    group: str
    spelling: str
    aliases: tuple[str, ...]
    # "switch" (on), "off" (turns a default-true bool off), "value" or "list"
    kind: str
    type: Any
    default: Any
    choices: tuple | None
    owner: type | None = None  # the class in whose source its help stands
    text: str = ""  # other help than there
    more: str = ""  # and what else there is to say
    extend: bool = False
    nargs: str | int | None = None
    value_name: str | None = None
    position: str = "flag"
    required: bool = False
    limits: Limits | None = None
    needs: tuple[Need, ...] = ()
    requires: tuple[Need, ...] = ()
    excludes: tuple[str, ...] = ()
    no_effect: str | None = None
    trained: bool | str = False
    per_run: bool = False
    missing: str | None = None

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every way this flag can be typed."""
        return (self.spelling, *self.aliases)

    @property
    def help(self) -> str:
        """What --help says of it; read in the source when it is asked for."""
        from megatron.command_help import docstrings

        text = self.text or (docstrings(self.owner).get(self.name, "") if self.owner else "")
        return text + self.more

    @property
    def metavar(self) -> str:
        """What stands for its value in help: `N`, `X`, `TEXT`, `{a,b}`; empty for switches."""
        if self.kind in ("switch", "off"):
            return ""
        value = self.value_name or _SHOWN.get(self.type, "VALUE")
        if self.choices and not self.value_name:
            value = "{" + ",".join(map(str, self.choices)) + "}"
        if self.kind == "value":
            return value
        return (
            " ".join([value] * self.nargs)
            if isinstance(self.nargs, int)
            else f"{value} [{value} ...]"
        )

    def with_values(self, values: Mapping[str, AddedValue]) -> Flag:
        """The flag with more choices; the help says of each what it does."""
        text = "".join(f"; {value}: {added.help}" for value, added in values.items())
        assert self.choices is not None, f"{self.spelling} has no choices"
        return dataclasses.replace(
            self, choices=(*self.choices, *values), more=f"{self.more}{text}"
        )

    def convert(self, words: Sequence[str]) -> Any:
        """The value that `words` (after the flag) spell. Raises ValueError: what is wrong and what
        to write."""
        if self.kind in ("switch", "off"):
            if words:
                raise ValueError(
                    f"takes no value, but {_shown(*words)} follows; omit that [value-not-expected]"
                )
            return self.kind == "switch"
        if not words:
            raise ValueError(f"needs a value: {self.metavar} [value-missing]")
        try:
            "".join(words).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{' '.join(words)!r}: is not UTF-8, in which logs and checkpoints are written; "
                "rename the file, or correct the text [value-not-utf8]"
            ) from None
        if self.nargs == "words":
            words = [" ".join(words)]
        if self.kind == "value":
            if len(words) > 1:
                raise ValueError(
                    f"takes one value, but {len(words)} follow: {_shown(*words)} "
                    "[value-count-wrong]"
                )
            return self._convert_word(words[0])
        if self.choices and len(words) == 1 and words[0][:1] + words[0][-1:] == "[]":
            words = words[0][1:-1].replace(",", " ").split()  # a list as YAML writes it
        if isinstance(self.nargs, int) and len(words) == 1:
            words = words[0].strip("()[]").replace(",", " ").split()  # a tuple as Megatron types it
        if isinstance(self.nargs, int) and len(words) != self.nargs:
            raise ValueError(
                f"takes {self.nargs} values, but {len(words)} follow: {_shown(*words)} "
                "[value-count-wrong]"
            )
        if self.choices is None and self.type is str:
            return tuple(words)
        return tuple(map(self._convert_word, words))

    def _convert_word(self, word: str) -> Any:
        try:
            value = self.type(word)
        except ValueError as error:
            if self.type not in _CALLED:
                raise ValueError(f"{_shown(word)}: {error}") from None
            from megatron.command_help import as_number

            write = as_number(word)
            raise ValueError(
                f"{_shown(word)} is not {_CALLED[self.type]}{write} [value-malformed]"
            ) from None
        if self.type in _BEYOND and not abs(value) < _BEYOND[self.type]:
            if self.type is float:
                raise ValueError(f"{_shown(word)} must be a finite number [value-not-finite]")
            raise ValueError(f"{_shown(word)} must be less than 2^63 [value-out-of-range]")
        if self.choices is not None and value not in self.choices:
            lower = {str(choice).lower(): str(choice) for choice in self.choices}
            close = difflib.get_close_matches(word[:_LONGEST_SHOWN].lower(), lower, 1)
            hint = f"; did you mean {lower[close[0]]}?" if close else ""
            raise ValueError(
                f"{_shown(word)} is not one of {', '.join(map(str, self.choices))}{hint} "
                "[value-not-a-choice]"
            )
        return value


def _shown(*words: str) -> str:
    """Words in a message, the first characters of long ones."""
    text = " ".join(words[:_LONGEST_SHOWN])
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")


class FlagAction(argparse.Action):
    """A flag as an action of argparse: its words are its value, read by `Flag.convert`."""

    def __init__(self, option_strings, dest, *, flag: Flag, required: bool = False):
        super().__init__(
            option_strings,
            dest,
            nargs=0 if flag.kind in ("switch", "off") else "*",
            default=argparse.SUPPRESS,
            required=required,  # argparse's word about a value without a flag
        )
        self.flag = flag

    @property
    def help(self) -> str | None:
        """The flag's, read when it is shown."""
        return self.flag.help

    @help.setter
    def help(self, text: str | None) -> None:
        """argparse sets it."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Set the value that the words spell. Raises argparse.ArgumentError."""
        try:
            value = self.flag.convert(values)
        except ValueError as error:
            raise argparse.ArgumentError(None, f"{option_string}: {error}") from None
        if self.flag.extend:
            value = (*getattr(namespace, self.dest, ()), *value)
        setattr(namespace, self.dest, value)


class AddedValue(NamedTuple):
    """What the help says of a value that an extension adds to a flag, and what makes that which
    the value names."""

    help: str
    make: Callable[..., Any]


class Extension:
    """A group of flags that not every program has, and what else it changes of the command line."""

    # values that it adds to flags of other groups, by field name
    adds: ClassVar[Mapping[str, Mapping[str, AddedValue]]] = {}

    @classmethod
    def foreign_flags(cls) -> ForeignFlags | None:
        """Flags of another program that it reads; one extension of a program may have some."""
        return None


def flags_of(tree: type) -> Mapping[str, Flag]:
    """Every flag of a dataclass whose fields are dataclasses, by field name. A name or spelling
    stands only once."""
    return _flags_of(tree)


@functools.cache  # apart, because mypy takes the class of a frozen dataclass for unhashable
def _flags_of(tree: type) -> Mapping[str, Flag]:
    flags: dict[str, Flag] = {}
    owners = typing.get_type_hints(tree)
    for group, owner in owners.items():
        for name, flag in flags_of_group(owner, group).items():
            assert name not in flags, f"{name} is declared twice"
            flags[name] = flag
    for extension in owners.values():
        if issubclass(extension, Extension):
            for name, values in extension.adds.items():
                flags[name] = flags[name].with_values(values)
    _by_spelling(flags.values())
    return types.MappingProxyType(flags)


def flags_of_group(owner: type, group: str) -> dict[str, Flag]:
    """Every flag of one dataclass, by field name."""
    hints = typing.get_type_hints(owner)
    return {
        field.name: _flag(owner, group, field, hints[field.name])
        for field in dataclasses.fields(owner)
        if "flag" in field.metadata
    }


def _by_spelling(flags: Iterable[Flag]) -> dict[str, Flag]:
    spellings: dict[str, Flag] = {}
    for flag in flags:
        for spelling in flag.spellings:
            assert spelling not in spellings, f"{spelling} is declared twice"
            spellings[spelling] = flag
    return spellings


def _flag(owner: type, group: str, field: dataclasses.Field, hint: Any) -> Flag:
    meta = field.metadata
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    kind = "value"
    choices = meta["choices"]
    if hint is bool:
        kind = "off" if meta["off"] else "switch"
    elif typing.get_origin(hint) is tuple:
        kind = "list"
        hint = typing.get_args(hint)[0]
    elif typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        hint = type(choices[0])
    spelling = meta["off"] or meta["flag"] or "--" + field.name.replace("_", "-")
    if meta["position"] != "flag":
        spelling = meta["metavar"]
    as_declared = {
        each.name: meta[each.name] for each in dataclasses.fields(Flag) if each.name in meta
    }
    return Flag(
        **as_declared
        | {
            "name": field.name,
            "group": group,
            "spelling": spelling,
            "aliases": meta["alias"],
            "kind": kind,
            "type": meta["parse"] or hint,
            "default": None if field.default is MISSING else field.default,
            "choices": choices,
            "owner": owner,
            "text": meta["help"],
            "value_name": meta["metavar"],
            "required": field.default is MISSING,
        }
    )


class ReadAs(NamedTuple):
    """What flags of another program came to: `typed` with the values that they stand for, what is
    wrong with them, and what is worth a line."""

    typed: dict[str, Any]
    problems: list[str]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class ForeignFlags:
    """Flags that no config class declares: `flags` are read, but the help does not show them; of a
    further spelling `explain` may know why there is no such flag, `ignores` that it has no effect,
    and `synonyms` what it is called here. `read_as` gets the parser, what was typed of the
    program's own flags, of these, and the spellings that are ignored. `changes_nothing`: whether
    what is computed is the same with a name's value. `refused`: by reason, spellings of what the
    program cannot do; `page`: where it is listed. `tables`: of their page, by the text above each,
    the spellings and what is said of them. `argument_table`: the table of arguments, of the
    program's own and those typed of these."""

    flags: Sequence[Flag] = ()
    explain: Callable[[str], str | None] = lambda spelling: None
    ignores: Callable[[str], bool] = lambda spelling: False
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read_as: Callable[[Parser, dict[str, Any], dict[str, Any], Sequence[str]], ReadAs] = (
        lambda parser, typed, foreign, ignored: ReadAs(typed, [], [])
    )
    changes_nothing: Callable[[str, Any], bool] = lambda name, value: False
    refused: Callable[[], Mapping[str, Sequence[str]]] = dict
    page: str = ""
    tables: Callable[[], Mapping[str, Sequence[tuple[Sequence[str], str]]]] = dict
    argument_table: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] = (
        lambda values, foreign: values
    )


class NamedFlags(NamedTuple):
    """A flag whose value is the name of other flags, which count as typed in its place: `words`
    gives them (or raises ValueError), `listing` is the help of the `topic`."""

    spelling: str
    help: str
    words: Callable[[str], Sequence[str]]
    topic: str
    listing: Callable[[], str]


class Parser:
    """All flags of a program by their spellings. `foreign_flags` is called when a flag is met that
    is none of them; `named` is the flag that stands for others; `arguments` is the parser of
    argparse that has all flags as its actions, and those that `extra_args_provider` adds to it."""

    def __init__(
        self,
        flags: Iterable[Flag],
        *,
        prog: str,
        description: str,
        sections: dict[str, str],
        foreign_flags: Callable[[], ForeignFlags] = ForeignFlags,
        extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
        named: NamedFlags | None = None,
    ):
        self.named = named
        self.flags = list(flags)
        self.by_spelling = _by_spelling(flag for flag in self.flags if flag.position == "flag")
        self.positionals = [flag for flag in self.flags if flag.position == "positional"]
        self.after_dashes = next((flag for flag in self.flags if flag.position == "after --"), None)
        self.prog = prog
        self.description = description
        self.sections = sections
        self._load_foreign_flags = foreign_flags
        self.extra: ExtraArguments | None = None
        if extra_args_provider:
            from megatron.extra_arguments import ExtraArguments

            own = {flag.name for flag in self.flags}
            self.extra = ExtraArguments(self.arguments, own, extra_args_provider)

    @functools.cached_property
    def arguments(self) -> argparse.ArgumentParser:
        """All flags as actions, in the groups of their sections."""
        parser = argparse.ArgumentParser(
            self.prog,
            description=self.description,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        parser._negative_number_matcher = _NUMBER  # argparse's own knows -1e-5 since 3.14
        groups = {name: parser.add_argument_group(text) for name, text in self.sections.items()}
        for flag in self.flags:
            _add(groups.get(flag.group, parser), flag)
        return parser

    @functools.cached_property
    def foreign_flags(self) -> ForeignFlags:
        """The flags that no config class declares."""
        return self._load_foreign_flags()

    def read(self, flag: Flag, spelling: str, words: list[str], parsed: Parsed) -> bool:
        """Let an action of the flag read the words after it, or note what is wrong with them;
        whether they spell a value. `arguments`, which few runs need, is not built for it."""
        if problem := credentials_problem(words):
            parsed.problems.append(f"{spelling}: {problem}")
            parsed.broken.add(flag.name)
            return False
        try:
            action = FlagAction(flag.spellings, flag.name, flag=flag)
            action(None, parsed.namespace, words, spelling)
        except argparse.ArgumentError as error:
            parsed.problems.append(error.message)
            parsed.broken.add(flag.name)
            return False
        return True

    @functools.cached_property
    def every_spelling(self) -> dict[str, Flag]:
        """All flags, `foreign_flags` too, by their spellings."""
        return _by_spelling(
            flag for flag in [*self.flags, *self.foreign_flags.flags] if flag.position == "flag"
        )

    def find(self, spelling: str) -> Flag | None:
        """The flag of that spelling. What switches something off may begin with --no- or
        --disable-, followed by the rest of its spelling or the name of its field."""
        flag = self.by_spelling.get(spelling) or self.every_spelling.get(spelling)
        match = _OFF.match(spelling)
        return flag or (self._off.get(spelling[match.end() :]) if match else None)

    @functools.cached_property
    def _off(self) -> dict[str, Flag]:
        """The switches whose spelling begins with --no- or --disable-, by what follows."""
        switches = {}
        for spelling, flag in self.every_spelling.items():
            match = _OFF.match(spelling)
            if match and flag.kind in ("switch", "off"):
                switches[spelling[match.end() :]] = flag
                if flag.kind == "off":
                    switches.setdefault(flag.name.replace("_", "-"), flag)
        return switches

    def help(self, topic: str = "") -> str:
        """The text for --help: every flag of the sections, with its default; of a topic, those that
        speak of it."""
        from megatron.command_help import help_text

        return help_text(self, topic)

    def usage(self) -> str:
        """The first line of the help."""
        from megatron.command_help import usage

        return usage(self)

    @property
    def takes_words(self) -> bool:
        """Does it take values without a flag? Then a flag takes only as many values as it needs."""
        return bool(self.positionals or self.after_dashes)


def _add(group: argparse._ActionsContainer, flag: Flag) -> None:
    """Add a flag, or a value that stands without one, to a group of argparse."""
    if flag.position == "flag":
        group.add_argument(*flag.spellings, action=FlagAction, dest=flag.name, flag=flag)
    else:
        group.add_argument(flag.name, action=FlagAction, flag=flag)


def build_parser(
    tree: type,
    *,
    prog: str,
    description: str,
    foreign_flags: Callable[[], ForeignFlags] = ForeignFlags,
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    named: NamedFlags | None = None,
) -> Parser:
    """A parser with one section per config class."""
    sections = {
        group: (owner.__doc__ or group).split("\n")[0]
        for group, owner in typing.get_type_hints(tree).items()
    }
    return Parser(
        flags_of(tree).values(),
        prog=prog,
        description=description,
        sections=sections,
        foreign_flags=foreign_flags,
        extra_args_provider=extra_args_provider,
        named=named,
    )


@dataclasses.dataclass
class Parsed:
    """What a command line says: values by field name, all that is wrong with it, what is worth a
    line, and the names of flags that were meant but could not be read. `ignored`: unknown flags
    without effect, as typed. `unread_file`: an @FILE could not be read, or a name of flags is
    unknown, so that nobody knows which flags are missing. `name`: that which stands for flags."""

    namespace: argparse.Namespace = dataclasses.field(default_factory=argparse.Namespace)
    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    broken: set[str] = dataclasses.field(default_factory=set)
    ignored: list[str] = dataclasses.field(default_factory=list)
    help: bool = False
    topic: str = ""  # typed after --help
    version: bool = False
    explain: list[str] | None = None  # typed after --explain
    unread_file: bool = False
    name: str | None = None

    @property
    def typed(self) -> dict[str, Any]:
        """Values by field name."""
        return vars(self.namespace)


def parse(parser: Parser, argv: Sequence[str]) -> Parsed:
    """Read a command line as far as it can be read. What an @FILE says is read first, so that typed
    flags win."""
    parsed = Parsed()
    from_files: list[str] = []
    typed: list[str] = []
    for word in argv:
        if word[:1] != "@":
            typed.append(word)
            continue
        try:
            from megatron.args_file import expand_files

            words = expand_files([word])
            if not words or is_flag(words[0]):
                from_files += words
            elif _takes(parser, typed, len(words)):
                typed += words
            else:
                raise Problems(
                    [
                        f"{word}: begins with no flag, and follows none that takes {len(words)} "
                        "values; an @FILE holds flags, one or more per line [args-file-malformed]"
                    ]
                )
        except Problems as error:
            parsed.problems += error.lines
            parsed.unread_file = True
    for words in (from_files, typed):
        typed_values: dict[str, list[str]] = {}
        each = _each_flag(words)
        if len(each) > MOST_FLAGS:
            parsed.problems.append(
                f"the command line has {len(each)} flags; at most {MOST_FLAGS} are read, so "
                "give each once [too-many-words]"
            )
            parsed.unread_file = True
            break
        for flag_words in each:
            take(parser, flag_words, typed_values, parsed)
            if len(parsed.problems) >= MOST_PROBLEMS:
                parsed.problems.append(
                    f"{parsed.problems.pop()}; what follows was not read, after "
                    f"{MOST_PROBLEMS} problems [too-many-words]"
                )
                parsed.unread_file = True
                return parsed
    if parser.extra and not parsed.unread_file:
        parsed.problems += parser.extra.problems(parsed.broken)
    return parsed


def _each_flag(words: list[str]) -> list[list[str]]:
    """The words of each flag."""
    starts = [
        index
        for index, word in enumerate(words)
        if index == 0 or (word[:1] == "-" and is_flag(word))
    ]
    return [words[start:end] for start, end in itertools.pairwise([*starts, len(words)])]


def _takes(parser: Parser, typed: Sequence[str], count: int) -> bool:
    """Does the last of these flags take so many values? Of one that is not known here (its error is
    another, or a script reads it) any number."""
    spelling = next((word for word in reversed(typed) if is_flag(word)), "").partition("=")[0]
    flag = parser.find(spelling) if spelling else None
    if flag is None:
        return bool(spelling)
    return flag.kind == "list" or flag.nargs == "words" or (flag.kind == "value" and count == 1)


def parse_typed(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """What was typed, as {field name: value}. Raises Problems with every problem at once."""
    parsed = parse(parser, argv)
    if parsed.problems:
        raise Problems(parsed.problems)
    return parsed.typed


def take(
    parser: Parser, words: list[str], typed_values: dict[str, list[str]], parsed: Parsed
) -> None:
    """One flag and the words up to the next one."""
    spelling, equals, value = words[0].partition("=")
    values = [value] * bool(equals) + words[1:]
    if spelling in ("-h", "--help"):
        parsed.help = True
        parsed.topic = " ".join(values)
        return
    if spelling == "--version":
        parsed.version = True
        return
    if spelling == "--explain":
        parsed.explain = values
        return
    if not is_flag(words[0]):
        parsed.problems.append(
            f"{_shown(*words)} stands alone: every value follows a flag (--name value); did a "
            "dash get lost? [value-without-flag]"
        )
        return
    if parser.extra and spelling in parser.extra.by_spelling:
        problem = credentials_problem(values)
        problem = f"{spelling}: {problem}" if problem else parser.extra.take(words)
        if problem:
            parsed.problems.append(problem)
        return
    if parser.named and spelling == parser.named.spelling:
        _take_named(parser, parser.named, values, typed_values, parsed)
        return
    flag = parser.find(spelling)
    if flag is None:
        if parser.foreign_flags.ignores(spelling):
            parsed.ignored.append(" ".join(words))
        else:
            from megatron.command_help import unknown_flag

            problem, meant = unknown_flag(parser, spelling)
            parsed.problems.append(problem)
            parsed.broken |= meant
        return
    if not parser.read(flag, spelling, values, parsed):
        return
    if not flag.extend and typed_values.get(flag.name, values) != values:
        parsed.notes.append(
            f"{spelling} is given more than once; the last one counts: {' '.join(values)} "
            "[flag-given-twice]"
        )
    typed_values[flag.name] = values


def _take_named(
    parser: Parser,
    named: NamedFlags,
    values: list[str],
    typed_values: dict[str, list[str]],
    parsed: Parsed,
) -> None:
    """The flags that a name stands for; those that follow count more."""
    problem = credentials_problem(values)
    if not problem and len(values) != 1:
        problem = f"takes one name, but {len(values)} follow [value-count-wrong]"
    if not problem and parsed.name:
        problem = f"{_shown(*values)}: {parsed.name} is given already; give one [flag-given-twice]"
    words: Sequence[str] = ()
    if not problem:
        try:
            words = named.words(values[0])
        except ValueError as error:
            problem = f"{_shown(*values)}: {error}"
    if problem:
        parsed.problems.append(f"{named.spelling}: {problem}")
        parsed.unread_file = True
        return
    parsed.name = values[0]
    stood_for: dict[str, list[str]] = {}
    for flag_words in _each_flag(list(words)):
        take(parser, flag_words, stood_for, parsed)
    for name in typed_values.keys() & stood_for.keys():
        if typed_values[name] != stood_for[name]:
            parsed.notes.append(
                f"--{name.replace('_', '-')} {' '.join(typed_values[name])} stands before "
                f"{named.spelling}, whose {' '.join(stood_for[name])} counts; type it after "
                f"{named.spelling} [flag-given-twice]"
            )


def is_flag(word: str) -> bool:
    """Does this word begin a flag? Negative numbers do not."""
    return len(word) > 1 and word[0] == "-" and not _NUMBER.match(word)


def config_from(tree: type, values: Mapping[str, Any]) -> Any:
    """The frozen dataclass tree from {field name: value}; names that no field has are ignored."""
    groups = {}
    for group, owner in typing.get_type_hints(tree).items():
        names = {f.name for f in dataclasses.fields(owner) if "flag" in f.metadata}
        groups[group] = owner(**{name: values[name] for name in names & values.keys()})
    return tree(**groups)


def values_of(config: Any) -> dict[str, Any]:
    """{field name: value} of every flag of a config tree."""
    flat: dict[str, Any] = {}
    for group in dataclasses.fields(config):
        group_values = getattr(config, group.name)
        flat |= {
            f.name: getattr(group_values, f.name)
            for f in dataclasses.fields(group_values)
            if "flag" in f.metadata
        }
    return flat


def to_args_text(config: Any, leave_out: Iterable[str] = ()) -> str:
    """The flags that differ from their defaults, one per line: `pretrain_gpt.py @FILE` repeats the
    run."""
    lines = []
    values = values_of(config)
    omitted = set(leave_out)
    for name, flag in flags_of(config.__class__).items():
        value = values[name]
        if value == flag.default or name in omitted:
            continue
        if flag.kind in ("switch", "off"):
            lines.append(flag.spelling)
        elif flag.kind == "list":
            lines.append(f"{flag.spelling} {shlex.join(map(str, value))}")
        else:
            apart = "=" if str(value).startswith(("@", "-")) else " "
            lines.append(f"{flag.spelling}{apart}{shlex.quote(str(value))}")
    return "\n".join(lines) + "\n"
