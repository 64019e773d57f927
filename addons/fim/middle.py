"""Fill in the middle: how the tokens of a sample are rearranged (Bavarian et al. 2022), draw for
draw as Megatron-LM's GPTFIMDataset does it.

A sample is cut at its end-of-document tokens. A part that is drawn becomes text, is cut at two
random characters into prefix, middle and suffix, and these are tokens again, behind one token each
that says what follows. The sample keeps its length: what no longer fits is omitted at its end, and
what is missing there is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from megatron.data.tokenizers.base import Tokenizer

Flags = Any  # those of the feature, which imports this module
_NAMES = ("prefix", "middle", "suffix", "pad", "eod")


class Ids(NamedTuple):
    """The ids of the tokens that fill in the middle needs; `fragment` cuts documents."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    fragment: int | None

    @classmethod
    def of(cls, flags: Flags, tokenizer: Tokenizer) -> Ids:
        """As this tokenizer has them. Raises ValueError where it lacks one, or two of those that
        say what follows are the same."""
        names = {f"--fim-{name}-token": getattr(flags, f"fim_{name}_token") for name in _NAMES}
        if flags.fim_split_sample is not None:
            names["--fim-split-sample"] = flags.fim_split_sample
        ids = _ids_of(tokenizer, names)
        prefix, middle, suffix, pad, eod = (ids[f"--fim-{name}-token"] for name in _NAMES)
        if len({prefix, middle, suffix}) < 3:
            shown = " ".join(f"{flag} {word}" for flag, word in list(names.items())[:3])
            raise ValueError(
                f"{shown}: two of them are one token, so that nothing says what follows; give "
                "three different ones [fim-tokens-equal]"
            )
        return cls(prefix, middle, suffix, pad, eod, ids.get("--fim-split-sample"))


def _ids_of(tokenizer: Tokenizer, names: Mapping[str, str]) -> dict[str, int]:
    """The id of each flag's token: a special one of this name, or that whose text it is. Raises
    ValueError."""
    special = {**tokenizer.special, **tokenizer.control}
    ids = {word: [special[word]] for word in names.values() if word in special}
    wanted: dict[str, list[int]] = {word: [] for word in names.values() if word not in ids}
    for index in range(tokenizer.vocab_size) if wanted else ():
        text = tokenizer.detokenize([index])
        if text in wanted:
            wanted[text].append(index)
    ids |= wanted
    for flag, word in names.items():
        if len(ids[word]) != 1:
            has = f"has {len(ids[word])} tokens of this text" if ids[word] else "has no such token"
            raise ValueError(
                f"{flag} {word}: {type(tokenizer).__name__} {has}, which --fim-data needs; name "
                "one of its tokens, or give the tokenizer that the data were made with and that "
                "has it [fim-token-missing]"
            )
    return {flag: ids[word][0] for flag, word in names.items()}


class FillInMiddle:
    """Rearranges samples by the rates of `flags`. `apply` is given the random numbers, of which it
    draws as many as it needs: the same ones give the same tokens."""

    def __init__(self, flags: Flags, tokenizer: Tokenizer) -> None:
        self.ids = Ids.of(flags, tokenizer)
        self._flags = flags
        self._tokenizer = tokenizer
        kept = flags.fim_keep_special_tokens
        self._omitted = np.array([] if kept else [*tokenizer.control.values()], np.int64)

    def apply(self, sample: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """int64 [n] -> int64 [n]."""
        ids = self.ids

        def document(tokens: np.ndarray) -> np.ndarray:
            return self._document(tokens, random)

        changed = np.concatenate([*_parts(sample, ids.eod, document)])
        missing = max(0, len(sample) - len(changed))
        return np.concatenate((changed[: len(sample)], np.full(missing, ids.pad, np.int64)))

    def _document(self, tokens: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """A document, or its part in a sample; its fragments by themselves."""
        flags = self._flags
        cut = self.ids.fragment
        if cut is None or not (tokens == cut).any():
            return self._rearranged(tokens, flags.fim_rate, random)
        if not random.binomial(1, flags.fim_rate):
            return tokens
        rate = flags.fim_fragment_rate or 0.0

        def fragment(part: np.ndarray) -> np.ndarray:
            return self._rearranged(part, rate, random)

        return np.concatenate([*_parts(tokens, cut, fragment)])

    def _rearranged(
        self, tokens: np.ndarray, rate: float, random: np.random.RandomState
    ) -> np.ndarray:
        """Prefix, suffix and middle of tokens that are drawn with this rate."""
        if not random.binomial(1, rate):
            return tokens
        text = self._tokenizer.detokenize(tokens[~np.isin(tokens, self._omitted)].tolist())
        stays = self._flags.fim_no_prefix
        if stays is not None and text.startswith(stays):
            return tokens
        first, last = sorted(random.randint(low=0, high=len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (
            np.asarray(self._tokenizer.encode_inside(part), np.int64)
            for part in (text[:first], text[first:last], text[last:])
        )
        ids = self.ids
        pieces: list[list[int] | np.ndarray] = [[ids.prefix], prefix, [ids.suffix], suffix]
        pieces += [[ids.middle], middle]
        if random.binomial(1, self._flags.fim_spm_rate):
            pieces = [[ids.prefix, ids.suffix], suffix, [ids.middle], prefix, middle]
        return np.concatenate(pieces)


def _parts(
    tokens: np.ndarray, cut: int, change: Callable[[np.ndarray], np.ndarray]
) -> Iterator[np.ndarray]:
    """What `change` makes of the parts between tokens `cut`, and these. As in Megatron-LM, an empty
    part vanishes with the cut behind it, but for the last one, which is a part like the others."""
    first = 0
    for place in np.flatnonzero(tokens == cut).tolist():
        if place > first:
            yield change(tokens[first:place])
            yield tokens[place : place + 1]
        first = place + 1
    yield change(tokens[first:])
