"""Files of samples that features read for --packed-samples, and samples that they generate, beside
the .bin/.idx pairs of the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from megatron.config.tree import Config


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


@runtime_checkable
class HasFormats(Protocol):
    """A group of flags with formats of its own, as features are."""

    sample_formats: Sequence[SampleFormat]


def formats_of(config: Config) -> tuple[SampleFormat, ...]:
    """Those of all features."""
    groups = (group for group in vars(config).values() if isinstance(group, HasFormats))
    return tuple(sample_format for group in groups for sample_format in group.sample_formats)


def generated_by(config: Config) -> GeneratedSamples | None:
    """What --dummy-data names."""
    make = config.added("dummy_data")
    return make() if make else None
