"""Chromium without a window, driven over DevTools' pipe, for tests of pages."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0  # seconds for what usually takes a moment


def program() -> str | None:
    """The browser of this machine."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One page of a browser process."""

    def __init__(self, profile: Path):
        read_here, self._write = os.pipe()
        self._read, write_there = os.pipe()

        def wire() -> None:  # DevTools reads file descriptor 3 and writes 4
            copies = [os.dup(read_here), os.dup(write_there)]
            for number, copy in zip((3, 4), copies, strict=True):
                os.dup2(copy, number)

        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        words += ["--disable-dev-shm-usage", "--window-size=900,700", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [program(), *words, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=wire,
            close_fds=False,
        )
        os.close(read_here)
        os.close(write_there)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._read, 1 << 16)
                assert part, "the browser has ended"
                self._rest += part
            first, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(first)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        """Load a page and wait for its form."""
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.forms.length > 0")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until it is true."""
        end = time.monotonic() + PATIENCE
        while not self.value(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def type(self, field: str, text: str, enter: bool = False) -> None:
        """Replace the text of the field with this id as a user does, and press Enter."""
        self.value(f"document.getElementById({field!r}).focus()")
        self.value(f"document.getElementById({field!r}).select()")
        self._call("Input.insertText", text=text)
        if enter:
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            self._call("Input.dispatchKeyEvent", type="keyDown", **key)
            self._call("Input.dispatchKeyEvent", type="keyUp", **key)

    def picture(self, file: Path) -> None:
        """A screenshot as PNG."""
        found = self._call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
