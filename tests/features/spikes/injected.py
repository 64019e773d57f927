"""Spikes put into runs of tests: a hook for `tests.runs.train`. Knows no action."""

import math
from collections.abc import Mapping

import numpy as np

from megatron.features.spikes import detector as spikes
from megatron.training import loop
from tests.runs import allow_workers


def inject(bad: Mapping[int, float], least: int = 24) -> None:
    """A hook: in iteration n the loss, and so its gradient, is `bad[n]` times what it is. `least`
    accepted values are enough to compare with, so that runs may be short. The rank may have data
    workers."""
    allow_workers()
    spikes.LEAST = least
    train_step = loop.train_step

    def injected(run, forward_step, samples, iteration, own):
        def forward(batch, model):
            output = forward_step(batch, model)
            if model.output_layer is None or iteration not in bad:
                return output
            loss, *rest = output
            return loss * bad[iteration], *rest

        return train_step(run, forward, samples, iteration, own)

    loop.train_step = injected


def noisy(count: int) -> list[tuple[float, float]]:
    """Losses and gradient norms of iterations without a spike."""
    # so that nothing is a mark
    values = np.random.default_rng(1).uniform(-0.01, 0.01, (count, 2))
    return [(3.0 + a, math.exp(b)) for a, b in values.tolist()]
