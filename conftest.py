"""Hooks and fixtures of all tests, those of add-ons and benchmarks too (tests/plugin.py)."""

from tests.plugin import *  # noqa: F403
