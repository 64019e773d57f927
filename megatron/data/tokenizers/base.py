"""The small interface that all tokenizers share."""

from __future__ import annotations

import abc
import hashlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

Ids = Sequence[int] | np.ndarray


def library(name: str, tokenizer_type: str) -> ModuleType:
    """Import a tokenizer library, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type}: needs the package {name} ({error}); run: pip "
            f"install {name} [package-missing]"
        ) from None


class Tokenizer(abc.ABC):
    """What every tokenizer is. `eod` ends a document; it, `bos`, `eos` and `pad` are None where
    there is no such id."""

    vocab_size: int
    eod: int | None = None
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    files: tuple[str, ...] = ()
    # pieces that stay text in a text, with their ids, where asked for
    special: Mapping[str, int] = MappingProxyType({})

    @abc.abstractmethod
    def encode(self, text: str) -> Ids:
        """The ids of a text that is valid Unicode."""

    @abc.abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of ids."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text. Raises ValueError if it holds half of a surrogate pair, which no
        engine can encode."""
        return self.tokenize_batch([text])[0].tolist()

    def tokenize_batch(
        self, texts: Iterable[str], dtype: np.dtype | type = np.int64
    ) -> list[np.ndarray]:
        """The ids of each text: arrays [n] of `dtype`. Raises ValueError as `tokenize` does."""
        return [np.asarray(self._encode_checked(text), dtype=dtype) for text in texts]

    def _encode_checked(self, text: str) -> Ids:
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                code = f"U+{ord(text[error.start]):04X}"
                raise ValueError(
                    f"character {error.start} of the text is {code}, half of a surrogate pair; "
                    "write the whole character, or drop it"
                ) from None
        return self.encode(text)

    def settings(self) -> dict[str, Any]:
        """What other than the files decides about the ids."""
        return {}

    def identity(self) -> dict[str, Any]:
        """Which tokenizer this is: class, settings, files and the sha256 of each; all but the paths
        decide the ids."""
        digests = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in self.files]
        return {
            "class": type(self).__name__,
            **self.settings(),
            "files": list(self.files),
            "sha256": digests,
        }
