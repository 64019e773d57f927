"""Flags made from dataclass fields: what is read, what is refused with which words, and the way
back to text."""

import random
import shlex
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Literal

import pytest

from megatron.args_file import expand_files, read_words
from megatron.arguments import (
    AddedValue,
    Extension,
    Flag,
    ForeignFlags,
    Problems,
    arg,
    build_parser,
    config_from,
    flags_of,
    is_flag,
    parse,
    parse_typed,
    to_args_text,
    values_of,
)
from megatron.features.registry import RunConfig
from tests.problems import assert_problem, codes_of, raises


def _even(word: str) -> int:
    if int(word) % 2:
        raise ValueError("must be even")
    return int(word)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large."""

    width: int | None = arg(None, help="width", alias=("--breadth",))
    rate: float = arg(0.5, help="rate")
    pair: tuple[int, ...] | None = arg(None, help="pair", nargs=2)
    many: tuple[str, ...] | None = arg(None, help="many", extend=True)
    style: Literal["sharp", "round"] = arg("round", help="style")
    level: Literal[0, 1] = arg(0, help="level")
    even: int | None = arg(None, help="even", parse=_even)
    kinds: tuple[str, ...] = arg((), help="kinds", choices=("red", "green", "blue"))


@dataclass(frozen=True, kw_only=True)
class Look:
    """How it looks."""

    bright: bool = arg(False, help="bright")
    border: bool = arg(True, off="--no-border", help="no border")
    title: str = arg("", help="title", flag="--the-title")
    inner: int = 3  # not a flag


@dataclass(frozen=True)
class Tree:
    """Both."""

    size: Size
    look: Look


PARSER = build_parser(Tree, prog="x", description="d")


def problems(*argv: str) -> list[str]:
    return parse(PARSER, argv).problems


@pytest.mark.parametrize(
    "words, kinds",
    [
        (["red", "blue"], ("red", "blue")),
        (["[red blue]"], ("red", "blue")),
        (["[red, blue]"], ("red", "blue")),
        (["[green]"], ("green",)),
        (["[]"], ()),
    ],
)
def test_a_list_may_be_written_as_in_yaml(words, kinds):
    assert parse_typed(PARSER, ["--kinds", *words]) == {"kinds": kinds}


def test_flags_are_made_from_the_fields():
    flags = flags_of(Tree)
    assert list(flags) == [
        "width",
        "rate",
        "pair",
        "many",
        "style",
        "level",
        "even",
        "kinds",
        "bright",
        "border",
        "title",
    ]
    assert {name: flag.kind for name, flag in flags.items() if flag.kind != "value"} == {
        "pair": "list",
        "many": "list",
        "kinds": "list",
        "bright": "switch",
        "border": "off",
    }
    assert flags["width"].spellings == ("--width", "--breadth") and flags["width"].type is int
    assert flags["border"].spelling == "--no-border" and flags["title"].spelling == "--the-title"
    assert flags["style"].choices == ("sharp", "round") and flags["level"].type is int


def test_a_name_or_spelling_stands_only_once():
    @dataclass(frozen=True)
    class Again:
        """Twice."""

        width: int = arg(1, help="width")

    @dataclass(frozen=True)
    class Other:
        """Same spelling."""

        breadth: int = arg(1, help="breadth")

    for second in (Again, Other):
        two = dataclass(type("Two", (), {"__annotations__": {"a": Size, "b": second}}))
        with pytest.raises(AssertionError, match="declared twice"):
            flags_of(two)


@dataclass(frozen=True)
class Fashion(Extension):
    """More styles."""

    adds = {"style": {"wavy": AddedValue("as a wave", str)}}


def test_a_value_that_an_extension_adds_is_known_where_it_is():
    more = dataclass(
        type("More", (), {"__annotations__": {"size": Size, "look": Look, "fashion": Fashion}})
    )
    parser = build_parser(more, prog="x", description="d")
    assert parse_typed(parser, ["--style", "wavy"]) == {"style": "wavy"}
    assert "{sharp,round,wavy}" in parser.help() and "wavy: as a wave" in parser.help()
    assert codes_of(problems("--style", "wavy")) == ["value-not-a-choice"]
    assert "wavy" not in PARSER.help()


def test_values_are_read_in_every_spelling():
    typed = parse_typed(
        PARSER,
        [
            "--width=3",
            "--rate",
            "-1e-5",
            "--pair",
            "-1",
            "2",
            "--bright",
            "--no-border",
            "--the-title",
            "a b",
            "--style",
            "sharp",
            "--level",
            "1",
            "--even",
            "4",
        ],
    )
    assert typed == {
        "width": 3,
        "rate": -1e-5,
        "pair": (-1, 2),
        "bright": True,
        "border": False,
        "title": "a b",
        "style": "sharp",
        "level": 1,
        "even": 4,
    }
    assert parse_typed(PARSER, ["--breadth", "7"]) == {"width": 7}
    assert (
        parse_typed(PARSER, ["--the-title="])
        == {"title": ""}
        == parse_typed(PARSER, ["--the-title", ""])
    )
    assert parse_typed(PARSER, []) == {}


def test_only_what_was_typed_is_returned_and_the_rest_has_defaults():
    config = config_from(Tree, parse_typed(PARSER, ["--width", "3", "--no-border"]))
    assert (config.size.width, config.size.rate, config.look.border, config.look.inner) == (
        3,
        0.5,
        False,
        3,
    )
    assert values_of(config)["border"] is False and "inner" not in values_of(config)


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (["--width", "two"], "value-malformed", ["--width", "'two'"]),
        (["--width", "1.5"], "value-malformed", ["'1.5'"]),
        (["--width", "1e9"], "value-malformed", ["write 1000000000"]),
        (["--width", "300k"], "value-malformed", ["write 300000"]),
        (["--width", "1,000"], "value-malformed", ["write 1000"]),
        (["--width"], "value-missing", ["--width", " N"]),
        (["--pair"], "value-missing", ["--pair", " N N"]),
        (["--many"], "value-missing", ["--many", "TEXT [TEXT ...]"]),
        (["--rate", "fast"], "value-malformed", ["--rate", "'fast'"]),
        (["--rate", "1", "2"], "value-count-wrong", ["--rate", "'1 2'"]),
        (["--pair", "1"], "value-count-wrong", ["--pair", "2", "'1'"]),
        (["--bright", "yes"], "value-not-expected", ["--bright", "'yes'"]),
        (["--bright=yes"], "value-not-expected", ["--bright", "'yes'"]),
        (["--style", "Sharp"], "value-not-a-choice", ["--style", "sharp?"]),
        (["--style", "blunt"], "value-not-a-choice", ["--style", "sharp, round"]),
        (["--level", "2"], "value-not-a-choice", ["--level", "0, 1"]),
        (["--widht", "3"], "flag-unknown", ["--widht", "--width?"]),
        (["--the_title", "3"], "flag-unknown", ["--the_title", "--the-title?"]),
        (["-width", "3"], "flag-unknown", ["-width", "--width?"]),
        (["--border"], "flag-unknown", ["--border", "--no-border?"]),
        (["--colour", "3"], "flag-unknown", ["--colour", "--help"]),
        (["width", "3"], "value-without-flag", ["'width 3'"]),
    ],
)
def test_one_problem_is_one_line(argv, code, named):
    [line] = problems(*argv)
    assert_problem(line, code, *named)
    with pytest.raises(Problems) as raised:
        parse_typed(PARSER, argv)
    assert raised.value.lines == [line]


def test_a_type_of_its_own_says_what_is_wrong():
    assert problems("--even", "3") == ["--even: '3': must be even"]


def test_all_problems_are_said_at_once_and_the_rest_is_read():
    parsed = parse(
        PARSER, ["loose", "--width", "x", "--rat", "1", "--bright", "--pair", "1", "2", "3"]
    )
    assert [line.split(":")[0].split(";")[0] for line in parsed.problems] == [
        "'loose' stands alone",
        "--width",
        "unknown flag --rat",
        "--pair",
    ]
    assert parsed.typed == {"bright": True} and parsed.broken == {"width", "rate", "pair"}


def test_a_flag_that_comes_again_is_noted_unless_it_collects():
    parsed = parse(
        PARSER,
        [
            "--width",
            "1",
            "--width",
            "2",
            "--many",
            "a",
            "--many",
            "b",
            "c",
            "--rate",
            "1",
            "--rate",
            "1",
        ],
    )
    assert parsed.typed == {"width": 2, "many": ("a", "b", "c"), "rate": 1.0}
    [note] = parsed.notes
    assert_problem(note, "flag-given-twice", "--width", 2)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--a", True),
        ("-h", True),
        ("-x", True),
        ("-1", False),
        ("-1e-5", False),
        ("-.5", False),
        ("-1_000", False),
        ("-inf", False),
        ("-", False),
        ("a", False),
        ("", False),
        ("--", True),
        ("-1,2", False),
        ("-infinite", True),
    ],
)
def test_negative_numbers_are_no_flags(word, expected):
    assert is_flag(word) is expected


def test_words_of_a_file_follow_the_shell(tmp_path: Path):
    inner = tmp_path / "more" / "inner.args"
    inner.parent.mkdir()
    inner.write_text("--bright # yes\n")
    file = tmp_path / "x.args"
    file.write_text(
        "# a comment with 'one quote\n--the-title 'a  b'\\''#c' \\\n  --many x#y \"d e\" f\\ g\n"
        "@more/inner.args\n"
    )
    assert expand_files([f"@{file}", "z"]) == [
        "--the-title",
        "a  b'#c",
        "--many",
        "x#y",
        "d e",
        "f g",
        "--bright",
        "z",
    ]


def test_typed_flags_win_over_a_file_wherever_it_stands(tmp_path: Path):
    file = tmp_path / "x.args"
    file.write_text("--width 1 --many a --rate 0.25")
    for argv in (
        [f"@{file}", "--width", "2", "--many", "b"],
        ["--width", "2", "--many", "b", f"@{file}"],
    ):
        parsed = parse(PARSER, argv)
        assert parsed.typed == {"width": 2, "rate": 0.25, "many": ("a", "b")}
        assert not parsed.problems and not parsed.notes


def test_a_file_of_values_stays_where_it_is(tmp_path: Path):
    file = tmp_path / "blend.txt"
    file.write_text("a\nb\n")
    assert parse_typed(PARSER, ["--many", f"@{file}", "c", "--bright"]) == {
        "many": ("a", "b", "c"),
        "bright": True,
    }


def test_bad_files_are_problems_beside_the_others(tmp_path: Path):
    (tmp_path / "loop.args").write_text("@loop.args")
    (tmp_path / "quote.args").write_text("--bright\n--the-title 'open\n")
    (tmp_path / "bytes.args").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "link.args").symlink_to(tmp_path / "link.args")
    names = ("none.args", "link.args", "loop.args", "quote.args", "bytes.args")
    lines = problems(*[f"@{tmp_path / name}" for name in names], "--width", "x")
    assert codes_of(lines) == [
        "file-not-readable",
        "file-not-readable",
        "args-file-includes-itself",
        "args-file-malformed",
        "args-file-malformed",
        "value-malformed",
    ]
    assert "line 2" in lines[3]


@pytest.mark.parametrize(("words", "files"), [("", 30), ("1 " * 100_000, 5)])
def test_files_that_include_twice_have_an_end(tmp_path: Path, words: str, files: int):
    for number in range(files):
        (tmp_path / f"{number}.args").write_text(f"@{number + 1}.args\n" * 2)
    (tmp_path / f"{files}.args").write_text(words)
    with raises(Problems, "args-file-too-long", "0.args"):
        expand_files([f"@{tmp_path / '0.args'}"])
    flat = "".join(f"@{number}.args\n" for number in range(1, files))
    (tmp_path / "0.args").write_text(flat)
    for number in range(1, files):
        (tmp_path / f"{number}.args").write_text("--bright\n")
    assert expand_files([f"@{tmp_path / '0.args'}"]) == ["--bright"] * (files - 1)


def test_help_names_every_flag_with_type_and_default():
    assert parse(PARSER, ["--width", "1", "-h"]).help and parse(PARSER, ["--help"]).help
    text = PARSER.help()
    for flag in PARSER.flags:
        assert all(spelling in text for spelling in flag.spellings)
    assert (
        "How large." in text
        and "--pair N N" in text
        and "{sharp,round}" in text
        and "(default: 0.5)" in text
    )
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("topic", "names"), [("width", {"width"}), ("How LARGE", None), ("no-such-thing", set())]
)
def test_help_of_a_topic_has_its_flags(topic, names):
    parsed = parse(PARSER, ["--help", *topic.split()])
    assert parsed.help and not parsed.problems
    text = PARSER.help(parsed.topic)
    shown = {flag.name for flag in PARSER.flags if f"  {flag.spelling}" in text}
    assert shown == names if names is not None else 0 < len(shown) < len(PARSER.flags)


@dataclass(frozen=True)
class Depth:
    """The depth."""

    width_of_depth: int = arg(1, help="a number")
    layers: int = arg(1, help="number of layers, whatever their width")


@dataclass(frozen=True)
class Width:
    """The width."""

    narrow: bool = arg(False, help="less than usual")


@dataclass(frozen=True)
class Sections:
    depth: Depth
    width: Width


def test_help_of_a_topic_begins_with_the_section_of_that_title():
    text = build_parser(Sections, prog="x", description="d").help("width")
    heads = [line.split()[0] for line in text.splitlines() if line]
    assert heads == ["The", "--narrow", "The", "--width-of-depth"]


@dataclass(frozen=True, kw_only=True)
class Tall(Depth):
    """Has fields of its own beside those that it inherits."""

    floors: int = arg(1, minimum=1)
    """number of floors, the
    ground floor among them"""

    roof: Literal["flat", "gable"] = arg("flat")
    """its form"""

    cellar: bool = arg(False, help=f"a cellar of {2} m")
    """not this"""

    bare: bool = arg(False)


@dataclass(frozen=True)
class House(Extension):
    """The house."""

    adds = {"roof": {"dome": AddedValue("round", make=dict)}}


@dataclass(frozen=True)
class Houses:
    tall: Tall
    house: House


def test_the_docstring_below_a_field_is_its_help():
    flags = flags_of(Houses)
    assert {name: flag.help for name, flag in flags.items()} == {
        "width_of_depth": "a number",
        "layers": "number of layers, whatever their width",
        "floors": "number of floors, the ground floor among them",
        "roof": "its form; dome: round",
        "cellar": "a cellar of 2 m",
        "bare": "",
    }
    assert "--bare" in build_parser(Houses, prog="x", description="d").help()


def test_a_class_without_source_has_no_help():
    made = make_dataclass("Made", [("size", int, arg(1))], frozen=True)
    text = build_parser(make_dataclass("Tree", [("made", made)]), prog="x", description="d").help()
    assert "--size" in text


def test_help_of_a_topic_that_is_not_here():
    accepted = ForeignFlags(
        refused=lambda: {"no wheels (cars)": ["--wheel-size", "--wid*"], "paint it": ["--paint-*"]},
        page="FILE.md",
    )
    parser = build_parser(Tree, prog="x", description="d", foreign_flags=lambda: accepted)
    for topic in ("wheel", "cars"):
        text = parser.help(topic)
        assert "--wheel-size" in text and "no wheels" in text and "--paint" not in text
    assert "--paint-*" in parser.help("paint")
    assert "--width" in parser.help("wid") and "--wid*" not in parser.help("wid")
    assert "--help width" in parser.help("widht") and "FILE.md" not in parser.help("widht")
    assert "FILE.md" in parser.help("zzzz") and ".md" not in PARSER.help("zzzz")


def test_what_is_unknown_may_be_explained():
    parser = build_parser(
        Tree,
        prog="x",
        description="d",
        foreign_flags=lambda: ForeignFlags(
            explain=lambda s: f"{s}: gone" if s == "--old" else None
        ),
    )
    old, wrong = parse(parser, ["--old", "1", "--widt", "2"]).problems
    assert old == "--old: gone"
    assert_problem(wrong, "flag-unknown", "--widt", "--width")


def _other_value(flag: Flag, draw: random.Random):
    """A random value of this flag, not its default where it has another; a tuple for lists."""
    if flag.kind in ("switch", "off"):
        return flag.kind == "switch"

    def one():
        if flag.choices is not None:
            others = [choice for choice in flag.choices if choice != flag.default]
            return draw.choice(others or [flag.default])
        if flag.type is int:
            return draw.randint(-(10**6), 10**12)
        if flag.type is float or flag.metavar == "X":
            return draw.choice(
                [
                    draw.random(),
                    -draw.random() * 1e-7,
                    draw.random() * 1e30,
                    float(draw.randint(0, 9)),
                ]
            )
        return draw.choice(
            ["a b", "x'y", 'q"r', "#h", "@at", "-dash", "back\\slash", "ünï", "$HOME", "a\nb", "w"]
        )

    if flag.kind == "value":
        return one()
    words = [
        one() for _ in range(flag.nargs if isinstance(flag.nargs, int) else draw.randint(1, 4))
    ]
    return tuple(f"p/{w}" if isinstance(w, str) and not flag.choices else w for w in words)


@pytest.mark.parametrize("seed", range(20))
def test_a_configuration_written_as_flags_reads_back_equal(seed, tmp_path: Path):
    draw = random.Random(seed)
    flags = flags_of(RunConfig)
    chosen = {
        name: _other_value(flag, draw)
        for name, flag in flags.items()
        if seed == 0 or draw.random() < 0.3
    }
    config = config_from(RunConfig, chosen)
    file = tmp_path / "args"
    file.write_text(to_args_text(config), encoding="utf-8")
    parser = build_parser(RunConfig, prog="x", description="d")
    assert config_from(RunConfig, parse_typed(parser, [f"@{file}"])) == config


def test_defaults_are_not_written_and_names_can_be_left_out():
    config = config_from(Tree, {"width": 3, "title": "", "bright": True})
    assert to_args_text(config) == "--width 3\n--bright\n"
    assert to_args_text(config, leave_out=["width"]) == "--bright\n"


def test_the_files_that_one_includes_count_with_it(tmp_path: Path):
    (tmp_path / "x.args").write_text("@y.args\n" * 20)
    (tmp_path / "y.args").write_text("#" * (1 << 20))
    with raises(Problems, "args-file-too-long", "x.args"):
        expand_files([f"@{tmp_path / 'x.args'}"])


@pytest.mark.parametrize("before", [[], ["--width", "1"], ["--bright"]])
def test_a_file_that_holds_no_flags_is_not_shown(before, tmp_path: Path):
    (tmp_path / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\nbin:x:1:1::/bin:/bin/sh\n")
    found = parse(PARSER, [*before, f"@{tmp_path / 'passwd'}"]).problems
    assert_problem(found[-1], "args-file-malformed", "passwd")
    assert "root:" not in "".join(found)


def test_quotes_are_those_of_the_shell(tmp_path: Path):
    draw = random.Random(1)
    for _ in range(3000):
        text = "".join(draw.choices("ab'\"\\ \n", k=draw.randint(1, 12)))
        if "\\\n" in text:  # where a line goes on
            continue
        try:
            expected = shlex.split(text)
        except ValueError:
            expected = None
        (tmp_path / "x.args").write_text(text)
        try:
            words = read_words(tmp_path / "x.args")
        except Problems:
            words = None
        assert words == expected, text
