"""Compares two configurations: whether they describe the same trained model, with whichever
flags."""

import functools
from typing import Any, NamedTuple

from megatron.arguments import flags_of_group
from megatron.config.model import ModelConfig


class Difference(NamedTuple):
    """One thing that two models do not share: its name in messages, the fields that spell it, both
    values."""

    name: str
    fields: tuple[str, ...]
    saved: Any
    now: Any


@functools.cache
def _spelled() -> dict[str, tuple[str, tuple[str, ...]]]:
    """What determines the function of trained weights, from `trained=` of the flags: {name in
    messages: (attribute of ModelConfig, fields that spell it)}. What several fields spell together
    is called by its property."""
    fields: dict[str, tuple[str, ...]] = {}
    for name, flag in flags_of_group(ModelConfig, "model").items():
        if flag.trained:
            attribute = name if flag.trained is True else flag.trained
            fields[attribute] = (*fields.get(attribute, ()), name)
    return {
        attribute if len(names) > 1 else names[0]: (attribute, names)
        for attribute, names in fields.items()
    }


def values(model: ModelConfig) -> dict[str, Any]:
    """What the shapes and the function of trained weights depend on, by its name in messages."""
    return {name: getattr(model, attribute) for name, (attribute, _) in _spelled().items()}


def differences(saved: ModelConfig, now: ModelConfig) -> list[Difference]:
    """Everything in which weights of the one are not a model of the other; empty if they are the
    same."""
    before, after = values(saved), values(now)
    return [
        Difference(name, fields, before[name], after[name])
        for name, (_, fields) in _spelled().items()
        if before[name] != after[name]
    ]


def typed_differences(saved: ModelConfig, now: ModelConfig) -> list[Difference]:
    """`differences`, without those that only follow from others: their flags have one value."""
    found = differences(saved, now)
    typed = [one for one in found if any(getattr(saved, f) != getattr(now, f) for f in one.fields)]
    return typed or found
