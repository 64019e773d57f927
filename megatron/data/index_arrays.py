"""Arrays of an index by name."""

from collections.abc import Mapping

import numpy as np


class IndexArrays:
    """Index arrays by name, in memory; `file_access.MappedArrays` has those of files."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = dict(arrays)

    def check_files(self) -> None:
        """Raise ValueError if a file that is mapped was cut short."""

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]
