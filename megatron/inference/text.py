"""From new tokens to text: whole characters as they are complete, and the end at a stop string.
Imports no torch."""

from collections.abc import Callable, Iterable, Sequence

CONTEXT = 8  # tokens of the prompt that decide how the first new one is written (spaces)
LONGEST_CHARACTER = 16  # tokens; what is no character by then is written as it is
INCOMPLETE = "\ufffd"


class TextStream:
    """The text of new tokens piece by piece, at a cost that does not grow with the text.

    A piece waits until its bytes are whole characters, and while it may be the beginning of one of
    the strings in `stop`. Such a string ends the text and is not part of it.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        detokenize: Callable[[Iterable[int]], str],
        stop: Sequence[str] = (),
    ):
        self.stopped = False
        self._detokenize = detokenize
        self._stop = [text for text in stop if text]
        self._ids = list(prompt[-CONTEXT:])
        self._written = len(self._ids)  # tokens whose text is known to be complete
        self._text = detokenize(self._ids)  # of the first `_written` tokens
        self._held = ""

    def push(self, token: int) -> str:
        """What can be shown with this token more."""
        if self.stopped:
            return ""
        self._ids.append(token)
        text = self._detokenize(self._ids)
        waits = text.endswith(INCOMPLETE)
        if waits and len(self._ids) - self._written < LONGEST_CHARACTER:
            return ""
        chunk = text[len(self._text) :]
        self._ids = self._ids[self._written :] or self._ids[-1:]
        self._written = len(self._ids)
        self._text = self._detokenize(self._ids)
        return self._release(chunk)

    def finish(self) -> str:
        """What is left when no token comes any more."""
        if self.stopped:
            return ""
        shown = self._release(self._detokenize(self._ids)[len(self._text) :])
        if self.stopped:
            return shown
        shown += self._held
        self._held = ""
        return shown

    def _release(self, chunk: str) -> str:
        """As much of what is held and of `chunk` as cannot belong to a stop string."""
        text = self._held + chunk
        ends = [position for stop in self._stop if (position := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
