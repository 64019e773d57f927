"""GPT-2's byte-level BPE in plain Python: the definition that the engines of
megatron/data/tokenizers/bpe.py must equal.

Source of the algorithm: Sennrich et al. 2016 (arXiv:1508.07909) over bytes, as Radford et al. 2019
(GPT-2) apply it. Megatron's particulars: `<|endoftext|>` in a text is ordinary text, and a piece
without an id becomes id 0.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

import regex

from megatron.data.tokenizers.gpt2_bpe import (
    GPT2_PATTERN,
    byte_alphabet,
    read_merges,
    read_vocabulary,
)


def merge_symbols(symbols: Sequence[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Merge neighbours until no pair has a rank: always the best pair left, all its occurrences
    from left to right.

    O(n log n) in the number of symbols, so that one endless run of letters does not stop a job.
    """
    pieces: list[str | None] = list(symbols)
    before = list(range(-1, len(pieces) - 1))
    after = list(range(1, len(pieces) + 1))
    heap = [
        (ranks[pair], left)
        for left, pair in enumerate(zip(symbols, symbols[1:], strict=False))
        if pair in ranks
    ]
    heapq.heapify(heap)

    def offer(left: int) -> None:
        rank = ranks.get((pieces[left], pieces[after[left]]))
        if rank is not None:
            heapq.heappush(heap, (rank, left))

    while heap:
        rank = heap[0][0]
        places = []
        while heap and heap[0][0] == rank:
            places.append(heapq.heappop(heap)[1])
        for left in places:
            right = after[left]
            if (
                right == len(pieces)
                or pieces[left] is None
                or ranks.get((pieces[left], pieces[right])) != rank
            ):
                continue  # an earlier merge took one of the two
            pieces[left], pieces[right] = pieces[left] + pieces[right], None
            after[left] = after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
                offer(left)
            if before[left] >= 0:
                offer(before[left])
    return [piece for piece in pieces if piece is not None]


class PlainBPE:
    """Text to GPT-2 ids and back by the book: cut with `GPT2_PATTERN`, merge each cut's bytes, look
    the pieces up."""

    def __init__(self, vocab_file: str, merge_file: str):
        self.vocabulary = read_vocabulary(vocab_file)
        self.ranks = {pair: rank for rank, pair in enumerate(read_merges(merge_file))}
        self._byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
        self._cut_ids: Callable[[str], list[int]] = functools.lru_cache(maxsize=1 << 17)(
            self._encode_cut
        )

    @functools.cached_property
    def _pieces(self) -> dict[int, str]:
        return {index: piece for piece, index in self.vocabulary.items()}

    def _encode_cut(self, cut: str) -> list[int]:
        alphabet = byte_alphabet()
        pieces = merge_symbols([alphabet[byte] for byte in cut.encode("utf-8")], self.ranks)
        return [self.vocabulary.get(piece, 0) for piece in pieces]

    def encode(self, text: str) -> list[int]:
        """The ids of a text; nothing in it is special."""
        ids: list[int] = []
        for cut in regex.findall(GPT2_PATTERN, text):
            ids += self._cut_ids(cut)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        text = bytearray()
        for index in ids:
            piece = self._pieces[int(index)]
            if all(character in self._byte_of for character in piece):
                text += bytes(self._byte_of[character] for character in piece)
            else:  # an added piece that was written as plain text
                text += piece.encode("utf-8")
        return text.decode("utf-8", errors="replace")
