"""Which data set of a mix a sample is of, and what the data sets are called in logs."""

import os
from collections.abc import Sequence
from typing import Any

from megatron.data.sample_lookup import Dataset, is_blend, is_packed


def subset_names(dataset: Dataset) -> list[str]:
    """The subsets of packed samples; the data sets of a blend, each by what its prefix has beyond
    the folder that all are in; of no blend the one."""
    if is_packed(dataset):
        return list(dataset.subsets)
    members = dataset.datasets if is_blend(dataset) else [dataset]
    return shortened([_called(member) for member in members])


def subset_of(dataset: Dataset, index: int) -> int:
    """The number of the data set that sample `index` of a blend is of; 0 without a blend."""
    return dataset.source(index)[0] if is_blend(dataset) else 0


def _called(member: Any) -> str:
    return member.corpus.path_prefix if hasattr(member, "corpus") else member.name


def shortened(prefixes: Sequence[str]) -> list[str]:
    """Names of prefixes, all different: one that stands twice gets a number."""
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(prefix)) for prefix in prefixes])
    names: list[str] = []
    for prefix in prefixes:
        name = (
            prefix.lstrip("-")
            if prefix.startswith("--")
            else os.path.relpath(os.path.abspath(prefix), folder)
        )
        name = name.replace(" ", "_")
        names.append(f"{name}#{names.count(name) + 1}" if name in names else name)
    return names
