"""What a flag's declaration says is refused or noted, for every flag."""

import math
from typing import Any

import pytest

from megatron.arguments import Limits, config_from, flags_of
from megatron.config.checks import declared
from megatron.config.checks.facts import Facts
from megatron.features.registry import RunConfig
from tests.problems import codes_of

FLAGS = flags_of(RunConfig)
LIMITED = [name for name, flag in FLAGS.items() if flag.limits]


def problems(name: str, value: Any) -> list[str]:
    facts = Facts(config_from(RunConfig, {name: value}), 1, {name})
    found = list(declared.limits(facts))
    assert facts.bad == ({name} if found else set())
    assert all(line.startswith(FLAGS[name].spelling) for line in found)
    return codes_of(found)


@pytest.mark.parametrize("name", LIMITED)
def test_a_number_is_accepted_within_its_limits_and_refused_outside(name):
    limits = FLAGS[name].limits
    kind = int if FLAGS[name].type is int else float  # also of a number with a unit
    step = 1 if kind is int else 1e-9
    for limit, inside, outward in (
        (limits.minimum, 0, -step),
        (limits.above, step, 0),
        (limits.maximum, 0, step),
        (limits.below, -step, 0),
    ):
        if limit is not None:
            assert problems(name, kind(limit + inside)) == []
            assert problems(name, kind(limit + outward)) == ["value-out-of-range"]
    if kind is float:
        for value in (math.inf, -math.inf, math.nan):
            assert problems(name, value) == ["value-not-finite"]
    if FLAGS[name].default is not None:
        assert problems(name, FLAGS[name].default) == []


def test_limits_of_every_kind():
    assert [Limits(minimum=1).problem(value) is None for value in (0, 1, 2)] == [False, True, True]
    assert [Limits(above=0).problem(value) is None for value in (-1, 0, 1)] == [False, False, True]
    assert [Limits(0, below=1).problem(value) is None for value in (0, 1)] == [True, False]
    assert [Limits(above=0, maximum=1).problem(value) is None for value in (1, 2)] == [True, False]


def test_names_in_declarations_are_flags_or_properties():
    for flag in FLAGS.values():
        for need in (*flag.needs, *flag.requires, *flag.excludes):
            name = need if isinstance(need, str) else need[0] if type(need) is tuple else None
            assert name is None or name in FLAGS
            if type(need) is tuple and FLAGS[name].choices:
                assert need[1] in FLAGS[name].choices
        assert not flag.trained or flag.group in ("model", "data")
