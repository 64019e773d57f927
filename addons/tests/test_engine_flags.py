"""Engine and the flags of other add-ons."""

from __future__ import annotations

import pytest

from megatron.training import Engine
from tests.problems import raises
from tests.runs import SMALL


@pytest.mark.parametrize("flags", ["--ema-decay 0.9", "--merge-window 2 --save run"])
def test_averages_that_nothing_would_update_are_refused(flags):
    with raises(ValueError, "engine-flag", flags.split()[0]):
        Engine([*SMALL, "--train-iters", "8", *flags.split()])
