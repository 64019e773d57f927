"""Draws from several sources in exact proportion to whole-number weights: source and place of draw
i, from i alone.
"""

from collections.abc import Sequence
from itertools import accumulate

RESOLUTION = 1 << 40  # what weights that are no whole numbers are rounded to


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers, each within 2**-40 of its share."""
    total = sum(weights)
    return [max(1, round(weight / total * RESOLUTION)) for weight in weights]


class Shares:
    """Draw i of sources with positive whole-number weights; after sum(weights) draws each source
    gave exactly its weight.

    A binary tree over the sources: of the first i draws that reach a node, floor((i * left + total
    // 2) / total) go left. So a source is never off its share by more than one draw for each level
    of the tree.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        assert len(weights) > 0 and min(weights) > 0
        self.weights = list(weights)
        self._ends = [0, *accumulate(weights)]

    def source(self, draw: int) -> tuple[int, int]:
        """(number of the source, how many draws it gave before) of draw number `draw`."""
        ends = self._ends
        low = 0
        high = len(self.weights)
        while high - low > 1:
            middle = (low + high) >> 1
            total = ends[high] - ends[low]
            left_weight = ends[middle] - ends[low]
            before, remainder = divmod(draw * left_weight + (total >> 1), total)
            if remainder + left_weight >= total:
                high = middle
                draw = before
            else:
                low = middle
                draw = draw - before
        return low, draw

    def counts(self, draws: int) -> list[int]:
        """How many of the first `draws` draws each source gave."""
        ends = self._ends
        of_sources = [0] * len(self.weights)
        open_nodes = [(0, len(self.weights), draws)]
        while open_nodes:
            low, high, count = open_nodes.pop()
            if high - low == 1:
                of_sources[low] = count
                continue
            middle = (low + high) >> 1
            total = ends[high] - ends[low]
            left_weight = ends[middle] - ends[low]
            before = (count * left_weight + (total >> 1)) // total
            open_nodes += [(low, middle, before), (middle, high, count - before)]
        return of_sources
