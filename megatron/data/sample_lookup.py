"""Where in its files a sample is stored: what every data set reports about its samples, and the
parts of it that the data sets share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import numpy as np

from megatron.data.sampler import Sampler

TOKENS, LABELS, POSITIONS, SUBSET = range(4)  # the lines of a row of packed samples
LOSS_MASK = 4  # the last line of a sample with its own: the bits of its fp32 numbers
NO_LABEL = 0  # the label of a token that predicts nothing
LABEL_OF_ZERO = -1  # the label whose id is 0


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of a sample: tokens `offset .. offset + length` of document `document`.

    `first_byte .. end_byte` is where they are in `<prefix>.bin`; both are None for mock data.
    """

    prefix: str
    document: int
    offset: int
    length: int
    first_byte: int | None
    end_byte: int | None


class Dataset(Protocol):
    """The samples of one split, by number; every data source gives data sets with these methods."""

    index_split: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...

    def order(self) -> dict[str, object]:
        """Everything the order of the samples depends on, in JSON types."""

    def prefixes(self) -> list[str]:
        """Its files, each once, in the order they were given."""

    def spans_of(self, index: int) -> list[TokenSpan]:
        """Where the tokens of sample `index` are stored, in their order."""

    def samples_showing(self, prefix: str, document: int) -> dict[int, int]:
        """{sample: how many tokens of this document of `prefix` it holds}, in rising order. Raises
        ValueError for a document that does not exist."""


class Blend(Dataset, Protocol):
    """The samples of several data sets."""

    datasets: Sequence[Dataset]

    def source(self, index: int) -> tuple[int, int]:
        """(number of the data set, number of the sample in it) of sample `index`."""


class Packed(Dataset, Protocol):
    """Rows of packed samples (`config.tree.Config.packed`); sample `index` is a row, int64
    [4, tokens]."""

    subsets: Sequence[str]  # of the data, by the numbers in the line SUBSET

    def sampler(self, micro_batch_size: int, dp_rank: int, dp_size: int) -> Sampler:
        """What reads a row where it would be `micro_batch_size` samples."""


def is_packed(dataset: Dataset) -> TypeGuard[Packed]:
    """Whether it is of rows."""
    return hasattr(dataset, "subsets")


def is_blend(dataset: Dataset) -> TypeGuard[Blend]:
    """Whether it is of several data sets."""
    return hasattr(dataset, "datasets")


def check_document(document: int, prefix: str, count: int) -> None:
    """Raise ValueError unless `prefix` has this document among its `count`."""
    if not 0 <= document < count:
        raise ValueError(
            f"--document {document}: {prefix} has the documents 0 to {count - 1} "
            "[value-out-of-range]"
        )
