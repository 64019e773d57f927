"""--packed-samples: training samples are rows of whole samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron import object_stores
from megatron.config.tree import Config
from megatron.training.feature import Feature, features_of

if TYPE_CHECKING:
    from megatron.data.sources import DataSource


@dataclass(frozen=True)
class FinetuningConfig(Feature):
    """Fine-tuning."""

    def data_source(self, source: DataSource, config: Config) -> DataSource:
        """Rows, of files of all features' formats, or those that --dummy-data names."""
        if not config.data.packed_samples:
            return source
        from .packed_samples import Packed

        formats = [form for feature in features_of(config) for form in feature.sample_formats]
        make = config.added("dummy_data")
        packed: DataSource = Packed(formats, make() if make else None)
        if config.data.object_storage_cache_path:
            packed = object_stores.part("stored_source").InStore(packed)
        return packed
