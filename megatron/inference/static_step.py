"""A decoding step of fixed shapes, which a CUDA graph holds: the host starts it with one call
instead of one for each kernel."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron.kernels.cuda_graph import Graphs
from megatron.model.blocks.cache import CachedTokens

SHORTEST = 256  # positions that attention looks at; above it twice as many, and so on


def bucket(size: int, smallest: int, largest: int) -> int:
    """The first of `smallest`, 2 `smallest`, 4 `smallest`, ..., `largest` that is at least
    `size`."""
    return min(largest, smallest << ((size - 1) // smallest).bit_length())


class StaticStep:
    """One token of each of the first rows of a cache of `rows` x `length`.

    compute (tokens [b, 1], where they are in the cache) -> logits [b, vocab]. Numbers of rows and
    of positions that attention looks at are rounded up to few (`bucket`), each pair of them a
    graph (`Graphs`). The weights must stay where they are.
    """

    def __init__(
        self,
        compute: Callable[[torch.Tensor, CachedTokens], torch.Tensor],
        rows: int,
        length: int,
        device: torch.device,
    ):
        self._compute = compute
        self._rows = rows
        self._length = length
        self._inputs = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._graphs = Graphs(device)

    def __call__(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Logits [b, vocab] after a token of each of the first b rows at these positions; the next
        call overwrites them. Raises NotStatic, and computes nothing any more that counts."""
        unused = [0] * (self._rows - len(tokens))
        self._inputs.copy_(torch.tensor([[*tokens, *unused], [*positions, *unused]]))
        rows = bucket(len(tokens), 1, self._rows)
        end = bucket(max(positions) + 1, SHORTEST, self._length)
        logits: torch.Tensor = self._graphs.run((rows, end), partial(self.region, rows, end))
        return logits[: len(tokens)]

    @torch.inference_mode(False)  # in it operations come to Watch undivided
    @torch.no_grad()
    def region(self, rows: int, end: int) -> torch.Tensor:
        """What is recorded: the step of so many rows that looks at so many positions."""
        tokens, positions = self._inputs[:, :rows].unsqueeze(-1)
        return self._compute(tokens, CachedTokens(0, self._length, None, positions, end))
