"""What a run requests of its data, whichever source they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Before:
    """Where a run is resumed: the data order of the checkpoint's training split, the samples
    consumed, and whether another mix may continue from there."""

    order: dict[str, Any]
    consumed: int
    other_mix: bool = False


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Samples of `sequence_length` tokens, so many for each of train, valid and test.

    `sizes`: samples needed (`megatron.config.plan.plan.Targets`), None for one epoch, 0 for none.
    `vocab_size` and `eod` are the tokenizer's; mock data are made of them, and with `check_tokens`
    the head of each file is compared with the first. `identity`: the tokenizer's, which data must
    be made by, where the source checks that itself. `before`: where a run in epoch order is
    resumed. The batch sizes matter to packed samples alone. Without `indices` the data sets are
    asked for their `order()` alone. `trains`: whether training samples are among those requested.
    """

    sizes: Sequence[int | None]
    sequence_length: int
    seed: int = 1234
    vocab_size: int | None = None
    eod: int | None = 0
    check_tokens: bool = True
    indices: bool = True
    trains: bool = True
    identity: Mapping[str, object] | None = None
    before: Before | None = None
    micro_batch_size: int = 1
    global_batch_size: int = 1

    @property
    def checked_vocab_size(self) -> int | None:
        """The vocabulary that the files are compared with, if any."""
        return self.vocab_size if self.check_tokens else None


def number_needed(size: int | None, split: str) -> int:
    """`size`, of a blend with weights. Raises ValueError for None: weights do not say where one
    epoch ends."""
    if size is None:
        raise ValueError(
            f"--data-path: weights need a number of {split} samples; drop the weights "
            "[weights-without-number-of-samples]"
        )
    return size
