"""The small interface that all tokenizers share."""

import abc
import functools
import hashlib
import importlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from megatron.small_files import read_bytes

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
    extends: Sequence[str] = ()

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

    @property
    def control(self) -> Mapping[str, int]:
        """The special tokens by the text that chat templates write them as."""
        return self.special

    def tokenize_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text in which special tokens are those tokens, int64 [n], and whether each
        is in one of the spans (first, end) of characters, bool [n]. No token crosses the border of
        a span; nothing is added. Raises ValueError as `tokenize` does."""
        check_unicode(text)
        ids: list[int] = []
        inside: list[bool] = []
        borders = [0, *(border for span in spans for border in span), len(text)]
        for number, (first, end) in enumerate(itertools.pairwise(borders)):
            for position, section in enumerate(self._control_pattern.split(text[first:end])):
                if not section:
                    continue
                section_ids = (
                    [self.control[section]] if position % 2 else self.encode_inside(section)
                )
                ids += [int(index) for index in section_ids]
            inside += [number % 2 == 1] * (len(ids) - len(inside))
        return np.asarray(ids, np.int64), np.asarray(inside, bool)

    def encode_inside(self, text: str) -> Ids:
        """The ids of a part of a text: nothing is added before it."""
        return self.encode(text)

    @functools.cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        names = sorted(self.control, key=len, reverse=True)
        return re.compile("(" + ("|".join(map(re.escape, names)) or "$^") + ")")

    def _encode_checked(self, text: str) -> Ids:
        check_unicode(text)
        return self.encode(text)

    def settings(self) -> dict[str, Any]:
        """Settings other than the files that determine the ids."""
        return {}

    def identity(self) -> dict[str, Any]:
        """Which tokenizer this is: class, settings, files and the sha256 of each; all but the paths
        decide the ids. `extends`, where it has any: the fingerprints of tokenizers whose ids it has
        and that it adds tokens to."""
        digests = [hashlib.sha256(read_bytes(file)).hexdigest() for file in self.files]
        return {
            "class": type(self).__name__,
            **self.settings(),
            "files": list(self.files),
            "sha256": digests,
            **({"extends": list(self.extends)} if self.extends else {}),
        }


def check_unicode(text: str) -> None:
    """Raise ValueError if a text holds half of a surrogate pair."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise ValueError(
            f"character {error.start} of the text is {code}, half of a surrogate pair; write the "
            "whole character, or drop it"
        ) from None
