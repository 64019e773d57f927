"""Add-ons, each whole in a folder: addons/NAME of a checkout; a wheel has it here. Either way its
package is megatron.addons.NAME. The core finds them by their folders and names none."""

import importlib
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


def find_other_names() -> None:
    """Let add-ons answer to other names below `megatron`, which scripts import."""
    for name in modules("import_finder"):
        importlib.import_module(name)
