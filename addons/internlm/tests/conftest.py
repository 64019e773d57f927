"""The converter as its command line calls it."""

from megatron.addons.convert.tests.conftest import _unpickled_in_process, convert  # noqa: F401
