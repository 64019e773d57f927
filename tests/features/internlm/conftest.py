"""The converter as its command line calls it."""

from tests.tools.convert.conftest import _unpickled_in_process, convert  # noqa: F401
