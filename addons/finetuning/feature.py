"""--packed-samples: training samples are rows of whole samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron import object_stores
from megatron.arguments import Needs, arg
from megatron.config.tree import Config
from megatron.training.feature import Feature, features_of

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.data.sources import DataSource

    from .packed_dataset import Mode


@dataclass(frozen=True)
class FinetuningConfig(Feature):
    """Packed samples."""

    packed_samples: bool = arg(False)
    """packed samples: each micro-batch is one row of micro-batch-size x seq-length tokens, filled
    with whole samples; attention, positions and labels do not cross samples (docs/data.md)"""

    pack_into_one: bool = arg(False, needs="packed_samples")
    """with --packed-samples: attention crosses the samples within each seq-length tokens"""

    pad_samples: bool = arg(False, needs="packed_samples")
    """with --packed-samples: each row has micro-batch-size samples, each truncated or padded to
    seq-length"""

    min_sample_length: int = arg(
        0,
        minimum=0,
        needs=[
            "packed_samples",
            Needs(
                "files of data (--dummy-data has all its samples)",
                lambda v: v["dummy_data"] is None,
            ),
        ],
    )
    """with --packed-samples: omit samples of fewer tokens"""

    @property
    def packs(self) -> bool:
        """The flag."""
        return self.packed_samples

    @property
    def mode(self) -> Mode:
        """How samples fill a row (`packed_dataset.PackingRule`)."""
        if self.pack_into_one:
            return "blocks"
        return "padded" if self.pad_samples else "pieces"

    @property
    def names_data(self) -> bool:
        """It chooses how files are read; `check` says where none is named."""
        return self.packed_samples

    def check(self, facts: Facts) -> Iterator[str]:
        """What has no meaning with --packed-samples, and data that is not here."""
        if self.packed_samples:
            from .packed_rules import problems

            yield from problems(facts)

    def data_source(self, source: DataSource, config: Config) -> DataSource:
        """Rows, of files of all features' formats, or those that --dummy-data names."""
        if not self.packed_samples:
            return source
        from .packed_samples import Packed

        formats = [form for feature in features_of(config) for form in feature.sample_formats]
        make = config.added("dummy_data")
        packed: DataSource = Packed(
            self.mode, self.min_sample_length, formats, make() if make else None
        )
        if config.data.object_storage_cache_path:
            packed = object_stores.part("stored_source").InStore(packed)
        return packed
