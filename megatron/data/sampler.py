"""Which samples make up a micro-batch on one data-parallel rank: pure functions of the samples
consumed so far.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator


class Sampler(ABC):
    """What all samplers are: from the samples that all ranks have consumed to this rank's next
    ones."""

    def __init__(
        self, total_samples: int, micro_batch_size: int, dp_rank: int = 0, dp_size: int = 1
    ) -> None:
        assert micro_batch_size > 0 and 0 <= dp_rank < dp_size
        self.total_samples = total_samples
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        # samples all ranks together take for one micro-batch each
        self.step = micro_batch_size * dp_size
        if total_samples < self.step:
            raise ValueError(
                f"--micro-batch-size {micro_batch_size} on {dp_size} data-parallel ranks needs "
                f"{self.step} samples, the dataset has {total_samples}; use more data, a smaller "
                "batch or fewer ranks [data-too-small]"
            )

    def micro_batches(self, consumed: int) -> Iterator[list[int]]:
        """The micro-batches from `consumed` on, one after the other, until none is left (cyclic:
        for ever)."""
        while self.micro_batches_left(consumed) > 0:
            yield self.micro_batch(consumed)
            consumed += self.step

    @abstractmethod
    def micro_batches_left(self, consumed: int) -> int:
        """How many full micro-batches of each rank are left."""

    @abstractmethod
    def micro_batch(self, consumed: int) -> list[int]:
        """The sample numbers [micro_batch_size] of this rank when all ranks together have consumed
        `consumed`."""

    @abstractmethod
    def order(self) -> dict[str, object]:
        """What the order of the samples depends on beyond the dataset, in JSON types."""


class SequentialSampler(Sampler):
    """`--dataloader-type single`: samples in order, one pass; rank r takes the r-th micro-batch of
    each chunk.

    A global batch is the same run of samples whatever the data-parallel size and micro-batch size
    are.
    """

    def micro_batches_left(self, consumed: int) -> int:
        """How many full micro-batches of each rank are left; an incomplete last one is dropped."""
        return max(0, self.total_samples - consumed) // self.step

    def micro_batch(self, consumed: int) -> list[int]:
        """The sample numbers [micro_batch_size]. Raises ValueError when the samples are used up."""
        if self.micro_batches_left(consumed) == 0:
            raise ValueError(
                f"no samples left: {consumed} of {self.total_samples} are consumed and a step "
                f"takes {self.step}; lower --train-iters or --train-samples (for validation "
                "--eval-iters), or read data more than once: give weights, or --data-order epoch "
                "[data-exhausted]"
            )
        first = consumed + self.dp_rank * self.micro_batch_size
        return list(range(first, first + self.micro_batch_size))

    def order(self) -> dict[str, object]:
        """See `Sampler`."""
        return {"dataloader_type": "single"}
