"""A model by its name on the Hugging Face hub: fetched by huggingface_hub, where that is installed
and may use the network."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron.config.checkpoint import is_url

_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")
_OFF = ("1", "ON", "YES", "TRUE")  # what huggingface_hub reads in HF_HUB_OFFLINE


def is_name(source: Path | str) -> bool:
    """Is it ORG/NAME, and no path that is there?"""
    word = str(source)
    return bool(_NAME.fullmatch(word)) and not os.path.exists(word) and not _is_file_name(word)


def _is_file_name(word: str) -> bool:
    return word.endswith((".gguf", ".safetensors", ".bin", ".json"))


def problems(source: Path | str) -> Iterator[str]:
    """Why the source cannot be read, before torch is loaded."""
    word = str(source)
    if is_url(word) or os.path.isdir(word):
        return
    if word.endswith(".gguf"):
        yield (
            f"HF_FOLDER {word}: is GGUF; gguf-import reads it, or give the folder of the model it "
            "was made of, with config.json and .safetensors files [not-converted]"
        )
    elif os.path.exists(word):
        yield (
            f"HF_FOLDER {word}: is a file; give the folder with config.json and .safetensors "
            "files [not-converted]"
        )
    elif not is_name(word):
        yield (
            f"HF_FOLDER {word}: no such directory; give one with config.json and .safetensors "
            "files, or ORG/NAME of the Hugging Face hub [directory-missing]"
        )
    elif importlib.util.find_spec("huggingface_hub") is None:
        yield (
            f"HF_FOLDER {word}: no such directory, and a model of the Hugging Face hub needs "
            "huggingface_hub; pip install huggingface_hub, or make hf [package-missing]"
        )
    elif os.environ.get("HF_HUB_OFFLINE", "").upper() in _OFF:
        yield (
            f"HF_FOLDER {word}: no such directory, and HF_HUB_OFFLINE is set, so nothing is "
            "fetched; unset it, or give a folder [directory-missing]"
        )


def fetched(name: str, wanted: tuple[str, ...]) -> Path:
    """The folder in huggingface_hub's cache with the model's safetensors and the `wanted` files.
    Raises ConversionError where the hub does not give them."""
    import huggingface_hub
    from huggingface_hub import errors

    from .links import ConversionError

    print(f"{name}: from the Hugging Face hub, into its cache", flush=True)
    try:
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=["*.safetensors", *wanted])
        )
    except errors.GatedRepoError:
        reason = "its licence must be accepted on the hub first, and `hf auth login` used"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no model of this name, or hides it from this user"
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        reason = f"the hub cannot be reached ({str(error).splitlines()[0][:200]})"
    raise ConversionError(
        f"{name}: no such directory, and {reason}; download it elsewhere (hf download {name} "
        "--local-dir DIR) and give DIR"
    )
