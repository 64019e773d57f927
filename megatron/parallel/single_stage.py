"""Forward and backward of micro-batches on a rank that holds the whole model."""

from collections.abc import Callable

import torch
from torch.autograd.graph import GradientEdge

# (micro-batch, chunk, hidden states or None for the first chunk of all) -> hidden states, or the
# loss of the last chunk.
Forward = Callable[[int, int, torch.Tensor | None], torch.Tensor]
# (loss, None), or (edge of the graph of hidden states that were sent, their gradient).
Backward = Callable[[torch.Tensor | GradientEdge, torch.Tensor | None], None]


class SingleStage:
    """What `Pipeline` is on several stages."""

    actions_done = 0  # since the start: how the rank monitor sees progress

    def is_last(self, chunk: int) -> bool:
        """It computes the loss."""
        return True

    def play(self, micro_batches: int, forward: Forward, backward: Backward | None = None) -> None:
        """Forward and backward of that many micro-batches in turn; without `backward` (and under
        no_grad) forward alone."""
        for micro_batch in range(micro_batches):
            loss = forward(micro_batch, 0, None)
            if backward is not None:
                backward(loss, None)
            del loss  # before the next forward
            self.actions_done += 1
