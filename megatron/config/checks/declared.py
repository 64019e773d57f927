"""What the declaration of each flag says, as rules: it must be given, its range, what it needs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.arguments import Need, Needs
from megatron.config.checks.facts import Facts


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
            condition, met = _need(need, f)
            if not met:
                yield (
                    f"{f.say(name)}: needs {condition}; add that, or omit it "
                    "[flag-needs-other-flag]"
                )
        for excluded in flag.excludes:
            if f[excluded] != f.flags[excluded].default:
                yield (
                    f"{f.say(excluded)} and {f.say(name)}: only one of these can be given "
                    "[flags-exclude-each-other]"
                )


def without_effect(f: Facts) -> Iterator[str]:
    """One line for each flag that was typed and changes nothing."""
    for name in f.flags:
        if name not in f.typed:
            continue
        flag = f.flags[name]
        for need in flag.needs:
            condition, met = _need(need, f)
            if not met:
                yield f"{f.say(name)}: no effect without {condition} [flag-has-no-effect]"
        if flag.no_effect and f[name] != flag.default:
            yield f"{f.say(name)}: no effect here, because {flag.no_effect} [flag-has-no-effect]"


def _need(need: Need, f: Facts) -> tuple[str, bool]:
    """The condition in words, and whether it is met."""
    if isinstance(need, Needs):
        return need.condition, bool(need.met(f))
    if isinstance(need, str):
        return f.flags[need].spelling, f[need] != f.flags[need].default
    name, value = need
    return f"{f.flags[name].spelling} {value}", f[name] == value
