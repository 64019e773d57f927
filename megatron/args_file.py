"""@FILE: words of a command line in a file, with the shell's quoting and # comments."""

import errno
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.problems import Problems
from megatron.small_files import read_text

# Of an @FILE: blanks (a backslash at the end of a line is one) and comments, any number of whole
# numbers (there may be thousands), or a word, without or with the shell's quoting.
_TOKEN = re.compile(
    r"""(?:\s++|\\\r?\n|\#[^\n]*+)++|(?P<numbers>\d[\d\s]*(?<=\d)(?=\s))|
    (?P<plain>[^\s'"\\]++(?=\s))|
    (?P<word>(?:[^\s'"\\]++|\\(?!\r?\n).|'[^']*+'|"(?:\\.|[^"\\]++)*+")++)""",
    re.S | re.X,
)
_QUOTED = re.compile(r"""\\(.)|'([^']*)'|"((?:\\.|[^"\\])*)\"""", re.S)  # in a word
_LONGEST_WORD = 131_072  # as Linux allows in a command line
MOST_BYTES = 10 << 20  # of an @FILE, with those that it includes
MOST_FILES = 100  # that one @FILE may include, counted as often as they are included
MOST_WORDS = 1 << 19


def expand_files(argv: Sequence[str], folders: Sequence[Path] = ()) -> list[str]:
    """Replace each @FILE word by the words of that file: shell quoting, `#` comments, @FILE inside
    relative to it. Raises Problems; a plain ValueError for a file that is not below one of
    `folders`, if there are any."""
    words = list(itertools.islice(_expanded(argv, (), [], folders), MOST_WORDS + 1))
    if len(words) > MOST_WORDS:
        raise _too_long(next(word for word in argv if word.startswith("@")))
    return words


def _too_long(file: str) -> Problems:
    return Problems(
        [
            f"{file}: gives more than {MOST_BYTES >> 20} MiB, {MOST_WORDS} words or {MOST_FILES} "
            "files; include each file once [args-file-too-long]"
        ]
    )


def _expanded(
    argv: Sequence[str], within: tuple[Path, ...], sizes: list[int], folders: Sequence[Path]
) -> Iterator[str]:
    """The words of `argv`, which stands in the last of the files `within`; `sizes`: characters of
    each file so far."""
    for word in argv:
        if not word.startswith("@"):
            yield word
            continue
        path = Path(word[1:]) if not within else within[-1].parent / word[1:]
        if os.path.realpath(path) in map(os.path.realpath, within):
            raise Problems([f"@{path}: includes itself [args-file-includes-itself]"])
        real = Path(os.path.realpath(path))
        if folders and not any(real.is_relative_to(folder.resolve()) for folder in folders):
            raise ValueError(
                f"@{path}: not read, because it is outside of {' and '.join(map(str, folders))}; "
                "copy it there, or put its flags in its place [args-file-outside]"
            )
        text = _read(path)
        sizes.append(len(text))
        if sum(sizes) > MOST_BYTES or len(sizes) > MOST_FILES:
            raise _too_long(f"@{within[0] if within else path}")
        yield from _expanded(_split(text, path), (*within, path), sizes, folders)


def read_words(path: Path) -> list[str]:
    """The words of an @FILE, with the shell's quoting and `#` comments. Raises Problems, with the
    line's number."""
    return _split(_read(path), path)


def _read(path: Path) -> str:
    try:
        text = read_text(path, "utf-8-sig", limit=MOST_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _too_long(f"@{path}") from None
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
    return text


def _split(text: str, path: Path) -> list[str]:
    words: list[str] = []
    position = 0
    while position < len(text) and len(words) <= MOST_WORDS:
        token = _TOKEN.match(text, position)
        word = token and (token["plain"] or token["word"]) or ""
        if token is None or len(word) > _LONGEST_WORD:
            line = text.count("\n", 0, position) + 1
            problem = "a quote is not closed; close it, or write \\ before it"
            if token:
                problem = f"a word has more than {_LONGEST_WORD} characters"
            raise Problems([f"@{path}, line {line}: {problem} [args-file-malformed]"])
        if token["plain"]:
            words.append(word)
        else:
            words += (token["numbers"] or "").split() or ([_unquoted(word)] if word else [])
        position = token.end()
    return words


def _unquoted(word: str) -> str:
    """A word as `shlex.split` gives it, which takes ten times as long."""

    def text(quoted: re.Match) -> str:
        if quoted[3] is None:
            return quoted[1] or quoted[2] or ""
        return re.sub(r"\\([\"\\])", r"\1", quoted[3])

    return _QUOTED.sub(text, word)
