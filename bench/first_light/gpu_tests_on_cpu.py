"""A pytest plugin (`-p gpu_tests_on_cpu`): the GPU tests of our own kernels run on a CPU."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop the skip of tests/plugin.py, and name the CPU as the device."""
    for item in items:
        item.own_markers = [marker for marker in item.own_markers if marker.name != "skip"]
        if isinstance(item, pytest.Function):
            item.module.DEVICE = "cpu"
