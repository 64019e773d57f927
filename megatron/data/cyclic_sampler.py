"""`--dataloader-type cyclic`: as `sampler.py`, in an order that torch's random numbers reshuffle
each epoch.
"""

import torch

from megatron.data.sampler import Sampler


class CyclicSampler(Sampler):
    """`--dataloader-type cyclic`: a new random order every epoch, for ever; epoch e is shuffled
    with seed e.

    With `data_sharding` each rank keeps to its own range of samples, else ranks take turns in one
    permutation. The order depends on the length of the dataset, the micro-batch size and the
    data-parallel size. Source: Megatron's MegatronPretrainingRandomSampler, except that ranks
    always begin the next epoch together (without sharding and with a length that is no multiple of
    a step, Megatron's ranks can end an epoch at different steps).
    """

    def __init__(
        self,
        total_samples: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        data_sharding: bool = True,
    ) -> None:
        super().__init__(total_samples, micro_batch_size, dp_rank, dp_size)
        self.data_sharding = data_sharding
        self.samples_per_epoch = total_samples - total_samples % self.step
        # the last epoch asked for and its permutation
        self._shuffled: tuple[int, list[int]] = (-1, [])

    def micro_batches_left(self, consumed: int) -> int:
        """How many are left in this epoch: never 0, since the next epoch follows."""
        return (self.samples_per_epoch - consumed % self.samples_per_epoch) // self.step

    def micro_batch(self, consumed: int) -> list[int]:
        """The sample numbers [micro_batch_size]. Raises ValueError if `consumed` is not at a step
        of this layout."""
        epoch, done = divmod(consumed, self.samples_per_epoch)
        if done % self.step:
            raise ValueError(
                f"--dataloader-type cyclic: {consumed} consumed samples do not end at a multiple "
                f"of micro-batch size x data-parallel size ({self.step}) in their epoch of "
                f"{self.samples_per_epoch}; resume with the layout the checkpoint was written "
                "with, or use --dataloader-type single"
            )
        order = self._permutation(epoch)
        if self.data_sharding:
            shard = self.total_samples // self.step * self.micro_batch_size
            first = done // self.dp_size
            return [self.dp_rank * shard + n for n in order[first : first + self.micro_batch_size]]
        return order[done + self.dp_rank : done + self.step : self.dp_size]

    def _permutation(self, epoch: int) -> list[int]:
        if self._shuffled[0] != epoch:
            if self.data_sharding:
                size = self.total_samples // self.step * self.micro_batch_size
            else:  # rounded by the micro-batch only, as in Megatron
                size = self.total_samples // self.micro_batch_size * self.micro_batch_size
            generator = torch.Generator().manual_seed(epoch)
            self._shuffled = epoch, torch.randperm(size, generator=generator).tolist()
        return self._shuffled[1]

    def order(self) -> dict[str, object]:
        """What the order of the samples depends on beyond the dataset, in JSON types."""
        return {
            "dataloader_type": "cyclic",
            "total_samples": self.total_samples,
            "micro_batch_size": self.micro_batch_size,
            "data_parallel_size": self.dp_size,
            "data_sharding": self.data_sharding,
        }
