"""What the declaration of each flag says, as rules: it must be given, its range, what it needs."""

from collections.abc import Collection, Iterator
from typing import Any

from megatron.arguments import Need, Needs, config_from, flags_of, values_of
from megatron.config.checks.facts import Facts
from megatron.config.tree import Config


def required(f: Facts) -> Iterator[str]:
    """Flags that must be given and are not."""
    for name, flag in f.flags.items():
        if flag.missing and f[name] is None:
            yield f"{flag.spelling} is missing: {flag.missing} [flag-missing]"
    if f["train_iters"] is None and f["train_samples"] is None:
        yield "--train-iters is missing: give it, or --train-samples [flag-missing]"


def limits(f: Facts) -> Iterator[str]:
    """Numbers out of range, which later rules do not compute with."""
    for name, flag in f.flags.items():
        value = f[name]
        if not flag.limits or value is None:
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        if problem := next(filter(None, map(flag.limits.problem, numbers)), None):
            f.bad.add(name)
            yield f"{f.say(name)}: {problem}"


def required_and_excluded(f: Facts) -> Iterator[str]:
    """Flags that are given without one that they require, or with one that they exclude."""
    for name, flag in f.flags.items():
        if f[name] == flag.default:
            continue
        for need in flag.requires:
            if not is_met(need, f):
                yield (
                    f"{f.say(name)}: needs {in_words(need, f)}; add that, or omit it "
                    "[flag-needs-other-flag]"
                )
        for excluded in flag.excludes:
            if excluded in f.flags and f[excluded] != f.flags[excluded].default:
                yield (
                    f"{f.say(excluded)} and {f.say(name)}: only one of these can be given "
                    "[flags-exclude-each-other]"
                )


def without_effect(
    config: Config, world_size: int, typed: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """The typed flags that change nothing: {name: default} of those that lack what they need, so
    that nothing reads their values, and one line for each."""
    taken_back: dict[str, Any] = {}
    lines: list[str] = []
    while True:  # what was taken back may be what another flag needs
        f = Facts(config_from(type(config), {**values_of(config), **taken_back}), world_size, typed)
        lacking = {
            name: needs
            for name in set(typed) - taken_back.keys()
            if (needs := [need for need in f.flags[name].needs if not is_met(need, f)])
        }
        if not lacking:
            lines += [
                f"{f.say(name)}: no effect here, because {flag.no_effect} [flag-has-no-effect]"
                for name, flag in f.flags.items()
                if flag.no_effect and name in f.typed and f[name] != flag.default
            ]
            return taken_back, lines
        for name in filter(lacking.get, f.flags):
            taken_back[name] = f.flags[name].default
            lines += [
                f"{f.say(name)}: no effect without {in_words(need, f)} [flag-has-no-effect]"
                for need in lacking[name]
            ]


def effective(config: Config) -> Config:
    """The same without values that have no effect, as checkpoints of version 0.1.0 have them, and
    scripts with a model of their own."""
    taken_back, _ = without_effect(config, 1, flags_of(type(config)))
    return config_from(type(config), {**values_of(config), **taken_back})


def in_words(need: Need, f: Facts) -> str:
    """The condition, as messages say it."""
    if isinstance(need, Needs):
        return need.condition
    if isinstance(need, str):
        return f.flags[need].spelling
    name, value = need
    return f"{f.flags[name].spelling} {value}"


def is_met(need: Need, f: Facts) -> bool:
    """Do the values of a command line meet it?"""
    if isinstance(need, Needs):
        return bool(need.met(f))
    if isinstance(need, str):
        return f[need] != f.flags[need].default
    name, value = need
    return f[name] == value
