"""Arguments that a program adds to the parser of argparse: read as argparse reads them, their
errors together with all others."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from megatron.arguments import Parsed, Parser, arg, build_parser, parse
from megatron.config import command_line
from megatron.config.script import Script
from tests.core.config.checks.checked_flags import BASE
from tests.problems import codes_of, raises


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large."""

    width: int | None = arg(None, help="width", alias=("--breadth",))
    rate: float = arg(0.5, help="rate")
    bright: bool = arg(False, help="bright")


@dataclass(frozen=True)
class Tree:
    """All groups."""

    size: Size


Provider = Callable[[argparse.ArgumentParser], Any]


class Doubled(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, 2 * values)


def many(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("my arguments", "of a script")
    group.add_argument("--maybe", nargs="?", const="bare", default="absent")
    group.add_argument("--item", action="append", type=int, default=[0])
    group.add_argument("--fancy", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--twice", action=Doubled, type=int, help="doubled (default: %(default)s)")
    group.add_argument("--names", nargs="+", choices=("a", "b"))
    group.add_argument("--on", action="store_true")
    group.add_argument("--count", "-c", action="count", default=0)
    group.add_argument("--path", type=str, default="3", dest="where")
    group.add_argument("--number", type=float, default="4")
    parser.set_defaults(rate=0.25, unrelated=7)
    return parser


def built(provider: Provider) -> Parser:
    return build_parser(Tree, prog="x", description="d", extra_args_provider=provider)


def read(*argv: str, provider: Provider = many) -> tuple[Parsed, argparse.Namespace]:
    parser = built(provider)
    return parse(parser, argv), parser.extra.namespace


CASES = [
    [],
    ["--maybe"],
    ["--maybe", "x"],
    ["--maybe=x"],
    ["--item", "1", "--item", "2"],
    ["--no-fancy"],
    ["--fancy"],
    ["--twice", "3", "--names", "a", "b", "--on"],
    ["-c", "-c", "--count"],
    ["--path", "-1"],
    ["--number", "-0.5"],
    ["--number=1e-3"],
]


@pytest.mark.parametrize("argv", CASES, ids=" ".join)
def test_values_are_those_of_argparse(argv):
    plain = many(argparse.ArgumentParser(argument_default=None)).parse_args(argv)
    parsed, extra = read("--width", "3", *argv, "--bright")
    assert parsed.problems == [] and parsed.typed == {"width": 3, "bright": True}
    expected = vars(plain)
    assert expected.pop("rate") == 0.25
    assert vars(extra) == expected


def test_defaults_of_flags_that_exist_already():
    parser = built(many)
    assert parser.extra.defaults == {"rate": 0.25}
    assert parse(parser, ["--rate", "1"]).typed == {"rate": 1.0}


@pytest.mark.parametrize(
    "argv, codes",
    [
        (["--twice"], ["value-malformed"]),
        (["--twice", "x"], ["value-malformed"]),
        (["--twice", "1", "2"], ["value-count-wrong"]),
        (["--names", "c"], ["value-malformed"]),
        (["--on", "1"], ["value-count-wrong"]),
        (["--twise", "1"], ["flag-unknown"]),
        (["--twice", "x", "--rate", "y", "--names", "c"], ["value-malformed"] * 3),
    ],
)
def test_errors_are_collected(argv, codes):
    parsed, _ = read(*argv)
    assert codes_of(parsed.problems) == codes
    assert all(line.startswith(("--", "unknown flag --")) for line in parsed.problems)


def required(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--needed", required=True, type=int)
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--left", action="store_true")
    one.add_argument("--right", action="store_true")


@pytest.mark.parametrize(
    "argv, codes",
    [
        (["--needed", "1", "--left"], []),
        ([], ["flag-missing", "flag-missing"]),
        (["--left"], ["flag-missing"]),
        (["--needed", "1", "--left", "--right"], ["flags-exclude-each-other"]),
        (["--needed", "x", "--left"], ["value-malformed"]),
        (["--neded", "1", "--left"], ["flag-unknown"]),
    ],
)
def test_what_is_required_and_what_excludes_each_other_is_judged_at_the_end(argv, codes):
    assert codes_of(read(*argv, provider=required)[0].problems) == codes


def test_a_value_without_a_flag_cannot_be_added():
    with pytest.raises(TypeError, match="positional"):
        built(lambda parser: parser.add_argument("positional"))


@pytest.mark.parametrize("flag, options", [("--breadth", {}), ("--mine", {"dest": "width"})])
def test_a_name_that_exists_already(flag, options):
    with raises(ValueError, "extra-flag-taken", flag):
        built(lambda parser: parser.add_argument(flag, **options))


def test_the_program_reads_them(capsys):
    def provider(parser):
        group = parser.add_argument_group("of this script")
        group.add_argument("--my-scale", type=float, default=1.0, help="scale of my loss")
        group.add_argument("--img-h", type=int, help="a flag of Megatron-LM that is refused here")
        parser.set_defaults(hidden_dropout=0.0, norm_epsilon=1e-6)

    argv = [*BASE.split(), "--my-scale", "-1e-5", "--img-h", "3", "--norm-epsilon", "1e-4"]
    script = Script(extra_args_provider=provider)
    line = command_line.read(argv, {}, script)
    assert vars(line.extra) == {"my_scale": -1e-5, "img_h": 3}
    assert (line.config.model.hidden_dropout, line.config.model.norm_epsilon) == (0.0, 1e-4)
    assert line.foreign == {}
    with pytest.raises(SystemExit) as end:
        command_line.read([*BASE.split(), "--my-scale", "x", "--lr", "y"], {}, script)
    said = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and codes_of(said) == ["value-malformed"] * 2
    with pytest.raises(SystemExit) as end:
        command_line.read(["--help"], {}, script)
    assert end.value.code == 0 and "--my-scale MY_SCALE" in capsys.readouterr().out
