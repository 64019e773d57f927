"""TensorBoard and Weights & Biases: --tensorboard-dir, --wandb-project."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.tree import Config, Demands
from megatron.features.boards.flags import BoardFlags
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.training.hook import Hook
    from megatron.training.logging.iteration import ResultWriter


@dataclass(frozen=True, kw_only=True)
class BoardsConfig(BoardFlags, Feature):
    """TensorBoard and Weights & Biases."""

    def missing(self) -> Iterator[str]:
        """Directories that cannot be written."""
        from megatron.config.checks.paths import directory_to_write

        if self.tensorboard_dir is not None:
            yield from directory_to_write("--tensorboard-dir", self.tensorboard_dir)
        if self.wandb_save_dir:
            yield from directory_to_write("--wandb-save-dir", self.wandb_save_dir)

    def demands(self, config: Config) -> Demands:
        """TensorBoard shows profiles beside its scalars."""
        return Demands(profile_folder=self.tensorboard_dir)

    def writers(self, config: Config, world_size: int) -> Iterator[ResultWriter]:
        """All boards as one. Raises ValueError or OSError where one cannot be opened."""
        if self.written:
            from megatron.features.boards.points import open_boards

            yield open_boards(self, config, world_size)

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """The iterations at which something is written."""
        if self.written:
            from megatron.features.boards.points import BoardIntervals

            yield BoardIntervals(self, loop.run, loop.lines.writers)

    @classmethod
    def read_points(cls, path: str) -> Iterator[tuple[str, int, float]] | None:
        """Those of a directory or file of TensorBoard. Raises ValueError where the package is
        missing."""
        from megatron.features.boards.reader import read_points

        return read_points(path)
