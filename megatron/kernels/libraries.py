"""Whether an optional library of kernels can be imported."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec


@cache
def load_problem(module: str, name: str, install: str) -> str | None:
    """Why `module` of the library `name` cannot be imported; None once it is.

    It is imported and not only looked for: an extension built for another torch is there and fails
    at its first import, which would be in the middle of a step.
    """
    if find_spec(module) is None:
        return f"{name} is not installed; {install}"
    try:
        import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"{name} is installed but does not load ({reason}); reinstall it: {install}"
    return None
