"""What the commands of tools/convert_checkpoint.py share, and what features add to them. Imports no
torch, so that --help is immediate."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from megatron.arguments import arg
from megatron.config.checkpoint import is_url

if TYPE_CHECKING:
    from tools.convert.family_table import Family
    from tools.shared.program import Command

Answer = str | tuple[str, bool]  # what to print, and whether all is well

# Keys of tools/convert/family_table.py's FAMILIES.
_FAMILY_NAMES = (
    *("apertus", "arcee", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "granite", "helium", "jais2", "llama"),
    *("ministral", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "olmoe", "persimmon"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm"),
    *("starcoder2",),
)


class Formats(Protocol):
    """tools/features/NAME/converter.py: formats of checkpoints."""

    COMMANDS: Mapping[str, Command]
    FAMILY_NAMES: tuple[str, ...]  # of Hugging Face models

    def families(self) -> Mapping[str, Family]:
        """By name; imports what is heavy."""


def of_features() -> list[Formats]:
    """Of each feature that has some."""
    files = sorted(Path(__file__).parent.parent.glob("features/*/converter.py"))
    modules = [f"tools.features.{file.parent.name}.converter" for file in files]
    return [cast(Formats, importlib.import_module(name)) for name in modules]


def family_names() -> tuple[str, ...]:
    """Of every family that is converted."""
    return tuple(
        sorted([*_FAMILY_NAMES, *(n for formats in of_features() for n in formats.FAMILY_NAMES)])
    )


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
