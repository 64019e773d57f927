"""Add-ons, each whole in a folder: addons/NAME of a checkout; a wheel has it here. Either way its
package is megatron.addons.NAME. The core finds them by their folders and names none."""

import importlib
import sys
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
if (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT / "addons"))


def files(name: str) -> list[Path]:
    """All files of that name in add-ons, in order."""
    return sorted(file for folder in __path__ for file in Path(folder).glob(f"*/**/{name}"))


def modules(name: str) -> list[str]:
    """The dotted names of all name.py in add-ons."""
    return [
        ".".join([__name__, *file.relative_to(folder).parts[:-1], name])
        for folder in map(Path, __path__)
        for file in sorted(folder.glob(f"*/**/{name}.py"))
    ]


def load_import_finders() -> None:
    """Let add-ons answer to other names below `megatron`, which scripts import."""
    for name in modules("import_finder"):
        importlib.import_module(name)


# pretrain_gpt.py is no script of another program, unless somebody edits it: then what it imports
# (core.py, training/__init__.py) loads them.
_main = getattr(sys.modules["__main__"], "__file__", None)
if _main is None or Path(_main).resolve() != _CHECKOUT / "pretrain_gpt.py":
    load_import_finders()
