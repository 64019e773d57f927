"""A keyed permutation of 0 .. n-1 that is computed for one number at a time: nothing is stored,
nothing is walked.
"""

import hashlib
import math
import struct

ROUNDS = 8
MASK = (1 << 64) - 1


def round_keys(*key: int | str) -> tuple[int, ...]:
    """The 64-bit keys of the rounds, from anything that can be written down."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    return struct.unpack(f"<{ROUNDS}Q", digest)


class Permutation:
    """`p[i]` for i in 0 .. size-1 takes each of these values once; which, the key decides.

    A Feistel network on pairs (left, right) of a grid of at least `size` places, where a value
    outside is put through again until it falls inside (less than two passes on average). Sources:
    Luby and Rackoff 1988 (the network), Black and Rogaway 2002 (any size, by walking the cycle);
    the rounds are multiply-and-shift hashes, good for order, not for secrets.

    Half a round adds a hash of one number to the other, modulo its range, and subtraction takes it
    away again: whatever the hash, the network is a permutation. Of a product the high bits depend
    on all bits of its factors, so the low 32 are dropped before the remainder is taken.
    """

    def __init__(self, size: int, *key: int | str) -> None:
        assert size > 0
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        keys = round_keys(size, *key)
        self._keys = tuple(zip(keys[::2], keys[1::2], strict=True))

    def __getitem__(self, index: int) -> int:
        size = self.size
        rows = self._rows
        columns = self._columns
        while True:
            # the place in the grid: high is its row, low its column
            high, low = divmod(index, columns)
            for even, odd in self._keys:
                # Half a round moves the row by a hash of the column, the other half the column by
                # a hash of the new row; 4294967296 is 2^32, which drops the weak low bits.
                mixed = (low ^ even) * 0x9E3779B97F4A7C15 & MASK
                high = (
                    high + ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & MASK) // 4294967296
                ) % rows
                mixed = (high ^ odd) * 0x94D049BB133111EB & MASK
                low = (
                    low + ((mixed ^ mixed >> 31) * 0x9E3779B97F4A7C15 & MASK) // 4294967296
                ) % columns
            # The grid has a few places more than there are values: one of those is put through
            # again, which ends, since the cycle goes on to a value.
            index = high * columns + low
            if index < size:
                return index

    def index(self, value: int) -> int:
        """The i for which p[i] is `value`: the network backwards."""
        size = self.size
        rows = self._rows
        columns = self._columns
        while True:
            high, low = divmod(value, columns)
            for even, odd in reversed(self._keys):
                mixed = (high ^ odd) * 0x94D049BB133111EB & MASK
                low = (
                    low - ((mixed ^ mixed >> 31) * 0x9E3779B97F4A7C15 & MASK) // 4294967296
                ) % columns
                mixed = (low ^ even) * 0x9E3779B97F4A7C15 & MASK
                high = (
                    high - ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & MASK) // 4294967296
                ) % rows
            value = high * columns + low
            if value < size:
                return value
