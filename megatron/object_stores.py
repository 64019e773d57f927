"""Object stores (s3://bucket/path): the door to the add-on that has them, the folder with an
object_stores.py. Flags, their rules and the names of what is stored are the core's."""

import contextlib
import importlib
from typing import Any

from megatron import addons

MISSING = (
    "this installation has nothing that reads object stores; install the suite with its add-on "
    "for them, or give a directory of this machine [feature-not-installed]"
)


def is_installed() -> bool:
    """Whether there is such an add-on."""
    return bool(addons.modules("object_stores"))


def part(name: str) -> Any:
    """A module of the add-on: `run_directories`, `mirror`, `remote_tokens`, `read_ahead`,
    `store_reads`, `stored_source` or `url_names`. Raises ValueError where there is none."""
    for module in addons.modules("object_stores"):
        return importlib.import_module(f"{module.rpartition('.')[0]}.{name}")
    raise ValueError(MISSING)


def urls_in_errors(data: Any) -> contextlib.AbstractContextManager[object]:
    """Errors of what is read below name what is in a store by its URL."""
    if not data.object_storage_cache_path:
        return contextlib.nullcontext()
    naming: contextlib.AbstractContextManager[object] = part("url_names").urls_in_errors(data)
    return naming
