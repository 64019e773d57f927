"""GPT-2's byte-level BPE in plain Python: the definition that the engines of
megatron/data/tokenizers/bpe.py must equal.

Source of the algorithm: Sennrich et al. 2016 (arXiv:1508.07909) over bytes, as Radford et al. 2019
(GPT-2) apply it. Megatron's particulars: `<|endoftext|>` in a text is ordinary text, and a piece
without an id becomes id 0.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import regex

from megatron.data.tokenizers.gpt2_bpe import (
    GPT2_PATTERN,
    byte_alphabet,
    read_merges,
    read_vocabulary,
)


def merge_symbols(symbols: Sequence[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Merge neighbours until no pair has a rank: find the best pair, merge all its occurrences from
    the left, again. As many passes as pairs are merged, each over all pieces."""
    pieces = list(symbols)
    while True:
        pairs = zip(pieces, pieces[1:], strict=False)
        best = min(pairs, key=lambda pair: ranks.get(pair, 10**9), default=None)
        if best not in ranks:
            return pieces
        merged: list[str] = []
        taken = False  # the piece before is the first of a pair that this one completes
        for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
            if taken:
                taken = False
                continue
            taken = (piece, following) == best
            merged.append("".join(best) if taken else piece)
        pieces = merged


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
