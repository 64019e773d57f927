"""Files of samples that features read for --packed-samples, and samples that they generate, beside
the .bin/.idx pairs of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class SampleFile(Protocol):
    """Samples of one file. A negative id is a token without loss."""

    prefix: str  # the path without .bin
    lengths: np.ndarray  # [n] tokens of each sample

    def read(self, sample: int, first: int, count: int) -> np.ndarray:
        """Ids `first .. first + count` of a sample, int64."""

    def bytes_of(self, sample: int, first: int, count: int) -> tuple[int, int] | None:
        """The bytes of the .bin that hold them; None for generated data."""

    def fingerprint(self) -> bytes:
        """What distinguishes its samples and their order from others, in any directory."""


class CheckedSamples(SampleFile, Protocol):
    """Samples whose file can be checked."""

    bin_bytes: int

    def id_range(self, limit: int | None = None) -> tuple[int, int]:
        """(smallest, largest) id of the first samples until they have `limit` tokens (None: all),
        (0, -1) without any."""


class SampleFormat(Protocol):
    """A format whose files are X.bin and, with what `index` says behind it, a second one."""

    index: str  # such as .meta
    content: str  # such as JSON

    def open(self, path: str) -> CheckedSamples:
        """The samples of X.bin. Raises ValueError and OSError."""


class GeneratedSamples(Protocol):
    """Samples that need no file (--dummy-data)."""

    subsets: tuple[str, ...]  # all samples are of the first
    vocabulary: int  # ids are below

    def open(self, sequence_length: int) -> SampleFile:
        """The samples."""
