"""@FILE: words of a command line in a file, with the shell's quoting and # comments."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.problems import Problems
from megatron.small_files import read_text

# Of an @FILE: blanks (a backslash at the end of a line is one), a comment, any number of whole
# numbers (there may be thousands), or a word with the shell's quoting.
_TOKEN = re.compile(
    r"""(?:\s|\\\r?\n)+|\#[^\n]*|(?P<numbers>\d[\d\s]*(?<=\d)(?=\s))|
    (?P<word>(?:[^\s'"\\]|\\(?!\r?\n).|'[^']*'|"(?:\\.|[^"\\])*")+)""",
    re.S | re.X,
)
_LONGEST_WORD = 131_072  # as Linux allows in a command line
MOST_FILES = 100  # that one @FILE may include, counted as often as they are included
MOST_WORDS = 1 << 20


def expand_files(argv: Sequence[str]) -> list[str]:
    """Replace each @FILE word by the words of that file: shell quoting, `#` comments, @FILE inside
    relative to it. Raises Problems."""
    words = list(itertools.islice(_expanded(argv, (), itertools.count(1)), MOST_WORDS + 1))
    if len(words) > MOST_WORDS:
        raise Problems(
            [
                f"{next(word for word in argv if word.startswith('@'))}: gives more than "
                f"{MOST_WORDS} words; include each file once [args-file-too-long]"
            ]
        )
    return words


def _expanded(argv: Sequence[str], within: tuple[Path, ...], count: Iterator[int]) -> Iterator[str]:
    """The words of `argv`, which stands in the last of the files `within`; `count` is of all
    files."""
    for word in argv:
        if not word.startswith("@"):
            yield word
            continue
        path = Path(word[1:]) if not within else within[-1].parent / word[1:]
        if os.path.realpath(path) in map(os.path.realpath, within):
            raise Problems([f"@{path}: includes itself [args-file-includes-itself]"])
        if next(count) > MOST_FILES:
            raise Problems(
                [
                    f"@{within[0]}: includes more than {MOST_FILES} files; include each once "
                    "[args-file-too-long]"
                ]
            )
        yield from _expanded(read_words(path), (*within, path), count)


def read_words(path: Path) -> list[str]:
    """The words of an @FILE, with the shell's quoting and `#` comments. Raises Problems, with the
    line's number."""
    try:
        text = read_text(path, "utf-8-sig")
    except OSError as error:
        raise Problems(
            [
                f"@{path}: {error.strerror or error}; an @FILE holds flags, one or more per "
                "line [file-not-readable]"
            ]
        ) from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise Problems(
            [
                f"@{path}: not a text file; an @FILE holds flags, one or more per line "
                "[args-file-malformed]"
            ]
        )
    words: list[str] = []
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or len(token["word"] or "") > _LONGEST_WORD:
            line = text.count("\n", 0, position) + 1
            problem = "a quote is not closed; close it, or write \\ before it"
            if token:
                problem = f"a word has more than {_LONGEST_WORD} characters"
            raise Problems([f"@{path}, line {line}: {problem} [args-file-malformed]"])
        words += (token["numbers"] or "").split() or (
            shlex.split(token[0]) if token["word"] else []
        )
        position = token.end()
    return words
