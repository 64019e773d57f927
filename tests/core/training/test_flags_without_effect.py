"""Flags of which a run says that they have no effect have none: with all of them at once every
number stays as it was."""

from __future__ import annotations

import pytest

from megatron.arguments import Flag, flags_of
from megatron.config.tree import Config
from tests.core.config.checks.checked_flags import checked
from tests.problems import codes_of
from tests.runs import EXACT, SMALL, train, with_flags

BASE = with_flags(SMALL, *"--mock-data --train-iters 3 --lr-warmup-iters 0 --eval-iters 0".split())
RUNS = {
    "sgd": "--optimizer sgd --lr-decay-style constant --position-embedding-type none "
    "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
    "adam": "--swiglu --ffn-hidden-size 64",
}
NUMBERS = {"--min-lr": "0.001", "--lr-power-exponent": "-0.3"}
TEXTS = {"--moe-layer-freq": "[0,1]", "--no-rope-freq": "[0,1]", "--split": "80,10,10"}


def words_of(flag: Flag) -> list[str]:
    """The flag with another value than its default; [] where that takes a file."""
    if flag.kind in ("switch", "off"):
        return [flag.spelling]
    if flag.choices:
        default = flag.default if isinstance(flag.default, tuple) else (flag.default,)
        value = next(str(choice) for choice in flag.choices if choice not in default)
    else:
        value = (TEXTS | NUMBERS).get(flag.spelling) or {int: "3", float: "0.5"}.get(flag.type, "")
    return [flag.spelling, value] if value else []


def without_effect(run: list[str]) -> list[str]:
    """Flags, as many as go together, of each of which this run says that it has no effect."""
    flags: list[str] = []
    for flag in flags_of(Config).values():
        words = words_of(flag) if flag.needs and flag.spelling not in run else []
        typed = {word for word in (*flags, *words) if word.startswith("--")}
        problems, notes = checked([*flags, *words], base=" ".join(run))
        said = {line.partition(":")[0].split()[0] for line in notes if _is_said(line)}
        if not problems and said >= typed:
            flags += words
    return flags


def _is_said(line: str) -> bool:
    return codes_of([line]) == ["flag-has-no-effect"]


@pytest.mark.parametrize("name", RUNS)
def test_all_of_them_leave_every_number_as_it_was(name, tmp_path):
    run = with_flags(BASE, *RUNS[name].split())
    flags = without_effect(run)
    assert sum(word.startswith("--") for word in flags) > 80
    plain = train(tmp_path / "plain", run)
    typed = train(tmp_path / "typed", [*run, *flags])
    assert len(plain.rows) == 3 and typed.series(*EXACT) == plain.series(*EXACT)
