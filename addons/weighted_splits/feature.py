"""--train-weighted-split-paths: data of each split by weight and range of documents, several
validation sets by name, as BigScience's and BigCode's Megatron have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron.arguments import Needs, arg
from megatron.config.tree import Config
from megatron.training.feature import Feature

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.data.sources import DataSource

    from .groups import Group

# What else names data or cuts them, and sources that are not asked then.
_OTHERS = tuple(
    "data_path train_data_path valid_data_path test_data_path data_args_path "
    "per_split_data_args_path split mock_data packed_samples dummy_data continue_data_mix "
    "multiple_validation_sets full_validation object_storage_cache_path".split()
)
_TRAIN = Needs(
    "--train-weighted-split-paths or --train-weighted-split-paths-path",
    lambda v: v["train_weighted_split_paths"] or v["train_weighted_split_paths_path"],
)
_GROUP = "'NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX'"
_of_train = partial(arg, excludes=_OTHERS)
_of_more = partial(arg, requires=_TRAIN)

SPLITS = ("train", "valid", "test")  # as megatron.data.blend.splits, which loads numpy


@dataclass(frozen=True)
class WeightedSplitsConfig(Feature):
    """Data of each split by weight and range of documents."""

    train_weighted_split_paths: tuple[str, ...] = _of_train(
        (),
        metavar="GROUP",
        help=f"training data: {_GROUP}, of each data set the documents from START to END, "
        "as fractions of all of it",
    )

    train_weighted_split_paths_path: str | None = _of_train(None, metavar="FILE")
    """file with the same on one line, in double quotes"""

    valid_weighted_split_paths: tuple[str, ...] = _of_more((), metavar="GROUP")
    """validation data, each group evaluated by itself"""

    valid_weighted_split_paths_path: str | None = _of_more(
        None, metavar="FILE", help='file with the same on one line: "GROUP" "GROUP"'
    )
    test_weighted_split_paths: tuple[str, ...] = _of_more((), metavar="GROUP")
    """data of the test"""

    test_weighted_split_paths_path: str | None = _of_more(None, metavar="FILE")
    """file with the same on one line, in double quotes"""

    @property
    def names_data(self) -> bool:
        """They name all data."""
        return bool(self.train_weighted_split_paths or self.train_weighted_split_paths_path)

    def _groups(self, split: str) -> tuple[list[Group], list[str]]:
        """(those of a split, problems). Raises OSError."""
        name = f"{split}_weighted_split_paths"
        words, path = getattr(self, name), getattr(self, f"{name}_path")
        if not words and path is None:
            return [], []
        from .groups import groups_of

        return groups_of(split, words, path)

    def groups(self) -> Mapping[str, list[Group]]:
        """The data of each split. Raises ValueError and OSError."""
        read = {split: self._groups(split) for split in SPLITS}
        for _, problems in read.values():
            if problems:
                raise ValueError(problems[0])
        return {split: groups for split, (groups, _) in read.items()}

    def check(self, facts: Facts) -> Iterator[str]:
        """What is wrong with the groups, of files as far as they are here."""
        for split in SPLITS:
            name = f"{split}_weighted_split_paths"
            if facts[name] and facts[f"{name}_path"]:
                yield (
                    f"{facts.say(f'{name}_path')} and --{name.replace('_', '-')}: each names the "
                    f"data of {split}; give only one of them [two-data-sources]"
                )
                continue
            try:
                yield from self._groups(split)[1]
            except OSError:
                pass  # `missing` says it
        for name in ("stage_file", "phase_transition_iterations"):
            if self.names_data and facts.values.get(name):
                yield (
                    f"--train-weighted-split-paths and {facts.say(name)}: only one of these can be "
                    "given [flags-exclude-each-other]"
                )

    def missing(self) -> Iterator[str]:
        """Files of groups and pairs that are not here."""
        from megatron.config.checks.data_paths import missing_pair

        for split in SPLITS:
            flag = f"--{split}-weighted-split-paths"
            try:
                groups, _ = self._groups(split)
            except OSError as error:
                path = getattr(self, f"{split}_weighted_split_paths_path")
                yield (
                    f"{flag}-path {path}: cannot be read ({error.strerror or error}); give a file "
                    "of groups [data-file-not-readable]"
                )
                continue
            parts = [part for group in groups for part in group.parts]
            for part in parts:
                yield from missing_pair(flag, part.prefix, len(parts))

    def prepare(self, config: Config) -> None:
        """What the indexes show. Raises ValueError and FileNotFoundError."""
        if self.names_data:
            from .source import spans

            for split, groups in self.groups().items():
                spans(config.data, split, groups, config.model.seq_length)

    def data_source(self, source: DataSource, config: Config) -> DataSource:
        """The groups."""
        if not self.names_data:
            return source
        from .source import WeightedSource

        return WeightedSource(self.groups)
