"""The pairs that the words of a blend name, in Megatron's order: which of them a split reads, and
how many samples of each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data import index_helpers
from megatron.data.blend.blended_dataset import EpochCounts
from megatron.data.blend.indices import build_blending_indices
from megatron.data.blend.paths import expand
from megatron.data.blend.splits import Blend, normalize

# Draws of a blend that are counted one by one; beyond, each data set's share of them is close
# enough for a table.
COUNTED = 20_000_000 if index_helpers.IMPLEMENTATION == "C++" else 20_000


@dataclass(frozen=True)
class Member:
    """A pair of a blend, and the word that named it: itself, or a directory or pattern that names
    `pairs` of them."""

    prefix: str
    word: str
    number: int  # of the word among those of the blend
    weight: float | None  # of the word
    pairs: int


def members_of(blend: Blend) -> list[Member]:
    """The pairs in the order of the words. Raises ValueError for epochs, which Megatron's order
    cannot keep."""
    words, weights = blend
    if isinstance(weights, EpochCounts):
        raise ValueError(
            "--data-path epochs: is kept by --data-order epoch only; add it, or give weights "
            "[epochs-need-data-order-epoch]"
        )
    members = []
    for number, word in enumerate(words):
        prefixes = expand(word)
        weight = None if weights is None else weights[number]
        members += [Member(prefix, word, number, weight, len(prefixes)) for prefix in prefixes]
    return members


def read_in(
    split: str, members: Sequence[Member], tokens: Sequence[int], sequence_length: int
) -> list[int]:
    """Numbers of the members that a split reads, `tokens` being those of each in it.

    A directory or pattern is one data set, so pairs of it that are too small to fill a sample of
    this split are omitted. Raises ValueError where that leaves none. A pair that the user named is
    never omitted.
    """
    numbers = [
        n for n, member in enumerate(members) if member.pairs == 1 or tokens[n] > sequence_length
    ]
    words = {members[n].number for n in numbers}
    for member in members:
        if member.number not in words:
            most = max(
                count
                for count, sibling in zip(tokens, members, strict=True)
                if sibling.number == member.number
            )
            raise ValueError(
                f"{member.word}: none of its {member.pairs} pairs fills a sample of {split}: "
                f"--seq-length {sequence_length} needs {sequence_length + 1} tokens, the most "
                f"that one has in {split} is {most}; give {split} more data (--split) or lower "
                "--seq-length [data-too-small]"
            )
    return numbers


def weights_of(members: Sequence[Member], tokens: Sequence[int]) -> list[float]:
    """The weight of each member of a blend with weights, normalized: the pairs of a word share its
    weight in proportion to all their `tokens`."""
    together: Counter[int] = Counter()
    for member, count in zip(members, tokens, strict=True):
        together[member.number] += count
    weights: list[float] = []
    for member, count in zip(members, tokens, strict=True):
        assert member.weight is not None  # a blend has weights for all words or for none
        weights.append(
            member.weight if member.pairs == 1 else member.weight * count / together[member.number]
        )
    return normalize(weights)


def samples_of_epoch(tokens: int, sequence_length: int) -> int:
    """Samples of one epoch of so many tokens; neighbours share one token."""
    return max(0, tokens - 1) // sequence_length


def draws(weights: Sequence[float], size: int) -> list[float]:
    """How many of the first `size` samples of a blend come from each data set; of a large blend its
    shares of them."""
    if size * len(weights) > COUNTED:
        return [size * weight for weight in normalize(weights)]
    drawn, _ = build_blending_indices(normalize(weights), size)
    return np.bincount(drawn, minlength=len(weights)).tolist()
