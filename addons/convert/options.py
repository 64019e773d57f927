"""What the commands of tools/convert_checkpoint.py share, and what features add to them. Imports no
torch, so that --help is immediate."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from megatron import addons
from megatron.arguments import arg
from megatron.config.checkpoint import is_url

from .family_table import FAMILIES, Family

if TYPE_CHECKING:
    from tools.shared.program import Command

FOLDER = "hf"  # in the run directory: what --save-hf-interval writes
SHARD_BYTES = 5 * 10**9  # of a file of weights, as transformers' save_pretrained writes them
Answer = str | tuple[str, bool]  # what to print, and whether all is well


class Formats(Protocol):
    """addons/NAME/converter.py: formats of checkpoints."""

    FAMILIES: Mapping[str, Family]  # of Hugging Face models, by model_type

    def commands(self) -> Mapping[str, Command]:
        """Commands of tools/convert_checkpoint.py, by name. Training reads the families alone."""


def of_features() -> list[Formats]:
    """Of each feature that has some."""
    return [cast(Formats, importlib.import_module(name)) for name in addons.modules("converter")]


def families() -> dict[str, Family]:
    """Of Hugging Face models, by model_type: all that are converted."""
    found = dict(FAMILIES)
    for formats in of_features():
        found |= formats.FAMILIES
    return found


def path_or_url(word: str) -> Path | str:
    """A path, or the URL of an object store."""
    return word if is_url(word) else Path(word)


def local(word: str) -> Path:
    """A path. Raises ValueError for a URL."""
    if is_url(word):
        raise ValueError(
            "is in an object store; give a directory (only Hugging Face folders may be URLs) "
            "[url-not-supported]"
        )
    return Path(word)


def path_of(metavar: str, text: str, parse: Any = local) -> Any:
    """A positional path."""
    return arg(position="positional", metavar=metavar, parse=parse, help=text)


def step_option() -> Any:
    """--ckpt-step."""
    return arg(None, help="load this iteration instead of the newest")


def unverified_option(text: str = "") -> Any:
    """--unverified."""
    return arg(
        False,
        alias=("--no-verify",),
        help="skip the comparison with transformers, which loads both models into memory in "
        f"float32 and removes what was written if they differ{text}",
    )


def ignored_keys(keys: str) -> Any:
    """--ignore-config-key."""
    return arg((), metavar="KEY", help=f"{keys} that are not known and change nothing")


def finish(options: Any) -> int:
    """Run a command and print its answer; the exit code."""
    done = options.run()
    text, good = done if isinstance(done, tuple) else (done, True)
    print(text)
    return 0 if good else 1
