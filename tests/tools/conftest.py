"""Programs take over signals; each test gives them back."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def handlers_as_they_were() -> Iterator[None]:
    """Of Ctrl-C and of a request to end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
