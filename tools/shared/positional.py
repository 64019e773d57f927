"""Command lines with values that stand without a flag, and with words after `--`."""

import math
from collections.abc import Sequence

from megatron.arguments import Parsed, Parser, is_flag, take


def parse_words(parser: Parser, argv: Sequence[str]) -> Parsed:
    """As `megatron.arguments.parse`, where values may stand without a flag; there is no @FILE."""
    parsed = Parsed()
    argv = list(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    words = argv[:end]
    tail = argv[end + 1 :]
    loose = []
    index = 0
    typed_values: dict[str, list[str]] = {}
    while index < len(words):
        stop = index + 1
        if not is_flag(words[index]):
            loose.append(words[index])
        else:
            most = _most_values(parser, words[index])
            while stop < len(words) and stop - index <= most and not is_flag(words[stop]):
                stop += 1
            take(parser, words[index:stop], typed_values, parsed)
        index = stop
    if parser.after_dashes is None:
        loose += tail
    elif end < len(argv):
        parsed.typed[parser.after_dashes.name] = tuple(tail)
    for flag in parser.positionals:
        number = len(loose) if flag.kind == "list" else 1
        if loose:
            parser.read(flag, flag.spelling, loose[:number], parsed)
            loose = loose[number:]
    if loose and not parsed.problems:
        parsed.problems.append(
            f"{' '.join(loose)!r}: not expected; {parser.usage()} [value-not-expected]"
        )
    return parsed


def _most_values(parser: Parser, word: str) -> float:
    """How many of the words after a flag can be its values. Of an unknown flag all, so that none is
    taken for another's."""
    spelling, equals, _ = word.partition("=")
    flag = parser.find(spelling)
    if (
        equals
        or spelling in ("-h", "--help", "--version")
        or flag
        and flag.kind in ("switch", "off")
    ):
        return 0
    if flag is None:
        return math.inf
    if flag.kind == "value":
        return 1
    return flag.nargs if isinstance(flag.nargs, int) else math.inf


def missing(parser: Parser, parsed: Parsed) -> list[str]:
    """A line for each value that must be given and is not. After an unknown flag nobody knows what
    its values were."""
    absent = [
        flag
        for flag in parser.flags
        if flag.required and flag.name not in parsed.typed.keys() | parsed.broken
    ]
    if parsed.unread_file or any(line.startswith("unknown flag") for line in parsed.problems):
        absent = []
    return [f"{flag.spelling} is missing: {flag.help} [flag-missing]" for flag in absent]
