"""Files of samples that features read for --packed-samples, and samples that they generate, beside
the .bin/.idx pairs of the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megatron.config.tree import Config

if TYPE_CHECKING:
    from megatron.data.packed.packed_dataset import CheckedSamples, SampleFile


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
