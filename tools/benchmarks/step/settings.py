"""The thread settings of a contestant: the environment variables that its process gets for CPU
threads.

A setting is a text: `default`, or NAME=VALUE pairs separated by spaces.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

DEFAULT = "default"
CPU_SETTINGS = (
    "OMP_WAIT_POLICY=active",
    "OMP_WAIT_POLICY=passive",
    "OMP_WAIT_POLICY=active OMP_PROC_BIND=true",
)
THREAD_PREFIXES = ("OMP_", "GOMP_", "KMP_")
THREAD_VARIABLES = ("MKL_NUM_THREADS", "MKL_DYNAMIC", "MKL_DOMAIN_NUM_THREADS")


def parse_setting(text: str) -> str:
    """That setting. Raises ValueError on another form."""
    pairs = _pairs(text)
    if text != DEFAULT and (not pairs or not all(name and equals for name, equals, _ in pairs)):
        raise ValueError(
            f"{text!r} is not {DEFAULT} or NAME=VALUE pairs, as in 'OMP_WAIT_POLICY=active'"
        )
    return text


def _pairs(text: str) -> list[tuple[str, str, str]]:
    return [word.partition("=") for word in shlex.split(text)]


def thread_variables(environment: Mapping[str, str]) -> list[str]:
    """The variables that are there for CPU threads; no contestant's defaults include them."""
    return sorted(
        name for name in environment if name.startswith(THREAD_PREFIXES) or name in THREAD_VARIABLES
    )


def environment_of(
    setting: str, inherited: Mapping[str, str], threads: int | None = None
) -> dict[str, str]:
    """The inherited environment without its variables for CPU threads, with the number of threads
    if one is given, and with the variables of the setting."""
    removed = thread_variables(inherited)
    environment = {name: value for name, value in inherited.items() if name not in removed}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    if setting != DEFAULT:
        environment.update((name, value) for name, _, value in _pairs(setting))
    return environment
