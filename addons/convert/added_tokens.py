"""A tokenizer that adds tokens to another: compared id by id, and which old tokens spell the new
ones. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.data.tokenizers.base import Tokenizer, library
from megatron.data.tokenizers.bpe import HuggingFaceTokenizer
from megatron.small_files import read_bytes

from . import hf_tokenizer

Way = Literal["pieces", "mean", "drawn"]


@dataclass(frozen=True)
class AddedTokens:
    """Ids from `first` to `size`, whose rows begin in this `way`; `pieces`: of each whose text old
    tokens spell, these."""

    first: int
    size: int
    way: Way
    pieces: Mapping[int, list[int]]

    def __str__(self) -> str:
        means = self.size - self.first - len(self.pieces)
        begin = {
            "mean": f"{means:,} begin as the mean of the old rows",
            "drawn": f"{means:,} are drawn with mean and covariance of the old rows",
            "pieces": f"{len(self.pieces):,} begin as the mean of the old tokens that spell them, "
            f"{means:,} as that of all old rows",
        }
        return f"{self.size:,} tokens, {self.size - self.first:,} of them new; {begin[self.way]}"


def _engine(tokenizer: Tokenizer, source: Path | str) -> Any:
    """The tokenizer as one of the library `tokenizers`. Raises ValueError."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        file = Path(tokenizer.files[0])
        if file.name != "tokenizer.json":
            raise ValueError(
                f"{file.parent}: has no tokenizer.json; save one with transformers "
                "[tokenizer-file-malformed]"
            )
        return library("tokenizers", "HuggingFaceTokenizer").Tokenizer.from_buffer(read_bytes(file))
    engine = hf_tokenizer._engine(tokenizer)
    if engine is None:
        raise ValueError(
            f"{source}: its {type(tokenizer).__name__} has no form as tokenizer.json, with which a "
            "tokenizer could be compared; give a HuggingFaceTokenizer [tokenizer-not-comparable]"
        )
    return engine


def added_tokens(
    old: Tokenizer, new: Tokenizer, way: Way, source: Path | str, place: Path | str
) -> AddedTokens:
    """What `new` adds to the tokenizer of the model `source`. Raises ValueError, said of the
    `place` of the new one, where it gives an old token another id, or adds none."""
    engine = _engine(new, place)
    ids = engine.get_vocab(with_added_tokens=True)
    before = _engine(old, source).get_vocab(with_added_tokens=True)
    moved = [piece for piece, index in before.items() if ids.get(piece) != index]
    if moved:
        raise ValueError(
            f"{place}: {len(moved)} tokens of {source} have another id there or none, as "
            f"{moved[0][:60]!r}; give its own tokenizer with tokens added behind "
            "[vocabulary-ids-moved]"
        )
    first, size = old.vocab_size, new.vocab_size
    if size <= first:
        raise ValueError(
            f"{place}: has no token beyond the {first} of {source}; add some "
            "[vocabulary-not-longer]"
        )
    spelled = _pieces(old, engine, first, size) if way == "pieces" else {}
    return AddedTokens(first, size, way, spelled)


def _pieces(old: Tokenizer, engine: Any, first: int, size: int) -> dict[int, list[int]]:
    """Of each new id whose text old tokens spell, these."""
    added = {index: token.content for index, token in engine.get_added_tokens_decoder().items()}
    pieces = {}
    for index in range(first, size):
        text = added.get(index) or engine.decode([index], skip_special_tokens=False)
        try:
            ids = [] if "\ufffd" in text else [int(each) for each in old.encode(text)]
        except Exception:  # the library raises nothing narrower: no old token for a part of it
            ids = []
        if ids and max(ids) < first:
            pieces[index] = ids
    return pieces
