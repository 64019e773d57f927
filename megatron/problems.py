"""The error of a command line that cannot be run, and text from outside as it may be printed."""

import re
from collections.abc import Iterable

# Control characters but for tab and line end, those that turn the direction of text, and bytes of
# file names that are no UTF-8.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# USER:SECRET@ in a URL; a secret may have slashes, a port is digits before one
_CREDENTIALS = re.compile(r"(?<=://)[^\s:@/]*:(?!\d+/)[^\s@]*@")


class Problems(ValueError):
    """Everything that is wrong with a command line, one line each."""

    def __init__(self, lines: Iterable[str]):
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))


def printable(text: str) -> str:
    """A text as a terminal and a log may get it: what would act on them is written as `\\x1b`, and
    credentials of URLs are left out."""
    text = _CREDENTIALS.sub("...@", text)
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def error_lines(problems: Iterable[str]) -> str:
    """A line of output for each."""
    return "".join("error: " + printable(text).replace("\n", "\\n") + "\n" for text in problems)


def credentials_problem(words: Iterable[str]) -> str | None:
    """What is wrong with words if there is a URL with credentials among them, which logs and
    checkpoints would keep."""
    if not any("@" in word and _CREDENTIALS.search(word) for word in words):
        return None
    return (
        "has credentials in a URL; give the URL without them, and them where the store's library "
        "looks (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws) [url-has-credentials]"
    )
