"""The features of this folder. registry.py has those of add-ons, too, which few runs use."""

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.config.tree import with_features
from megatron.training.feature import Feature

# Flags of the core with which a run may use what add-ons have, with none of theirs: formats of
# files and of log lines, checkpoints of other programs, tables of another program's arguments.
ASKING = frozenset(("load", "log_format", "log_subsets", "print_arguments", "use_checkpoint_args"))


def features_in(modules: Iterable[str]) -> Iterator[type[Feature]]:
    """The classes derived from `Feature` of these modules."""
    for name in modules:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and value.__module__ == name and issubclass(value, Feature):
                yield value


_folders = sorted(file.parent.name for file in Path(__file__).parent.glob("*/feature.py"))
OWN = tuple(features_in(f"megatron.features.{folder}.feature" for folder in _folders))
OwnConfig = with_features(OWN)
