"""A file through which a person or a scheduler requests a save or the end of a run."""

import re
from pathlib import Path

from megatron import log
from megatron.small_files import open_regular
from megatron.training.hook import Hook
from megatron.training.result import Requests

SAVE = "save"
STOP = "stop"
NOTHING = "0"
_REQUEST = re.compile(r"(save|stop|[+-]?\d{1,18})")


class ControlFileRequests(Hook):
    """--control-file, on rank 0. `save` and `stop` mean now; `-N` saves and `N` (or `+N`) stops
    after iteration N, or at once where N is over."""

    def __init__(self, path: str):
        """The file is made where it is missing. Raises OSError."""
        self._path = Path(path)
        self._asked = NOTHING
        if not self._path.exists():
            self._path.write_text(NOTHING + "\n")

    def requests(self, iteration: int) -> Requests | None:
        """What is requested after `iteration`."""
        asked = self.request(iteration)
        return Requests(save_now=asked == SAVE, stop_now=asked == STOP) if asked else None

    def request(self, iteration: int) -> str | None:
        """SAVE or STOP where that is requested after `iteration`."""
        self._asked = text = self._read()
        if text == NOTHING:
            return None
        if not _REQUEST.fullmatch(text):
            log.warn_once(
                f"--control-file {self._path} holds {text[:40]!r}: write save, stop, N or -N into "
                "it"
            )
            return None
        if text in (SAVE, STOP):
            return text
        if not iteration >= abs(int(text)) > 0:
            return None
        return SAVE if text[0] == "-" else STOP

    def _read(self) -> str:
        """The request; none where the file is being replaced, or was removed."""
        try:
            with open_regular(self._path) as file:
                return file.read(100).decode(errors="replace").strip() or NOTHING
        except OSError:
            return NOTHING

    def after_iteration(self, iteration: int, requests: Requests) -> None:
        """If a request was carried out, reset the file, unless it holds another one by now."""
        if not (requests.save_now or requests.stop_now):
            return
        try:
            if NOTHING != self._asked == self._read():
                self._path.write_text(NOTHING + "\n")
        except OSError as error:
            log.warn_once(f"--control-file {self._path} cannot be set back: {error.strerror}")
