"""Dropout seeds are a stable pure function; recompute repeats a mask without any saved state."""

import itertools

import torch

from megatron.parallel.random import DropoutSeeds, dropout_seed
from tests.core.kernels.functional import dropout


def test_seeds_never_change():
    """Resumed runs on other machines and versions draw the same masks: these values may not
    move."""
    assert dropout_seed(1234, 1, 0, 0, "attention", 0) == 3164804928296670605
    assert dropout_seed(1234, 250000, 7, -1, "embedding", (3, 1)) == 4764114029056150889


def test_each_argument_matters():
    uses = list(
        itertools.product(
            (1, 2), (1, 11), (0, 1), (-1, 0, 1), ("attention", "mlp_output"), (0, (0, 1))
        )
    )
    seeds = {dropout_seed(*use) for use in uses}
    assert len(seeds) == len(uses)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_stream_of_a_micro_batch():
    streams = [DropoutSeeds(1234, *use) for use in ((5, 0), (6, 0), (5, 1), (5, 0, 1))]
    seeds = [
        stream.seed(layer, site, part)
        for stream in streams
        for layer in (0, 1)
        for site in ("a", "b")
        for part in (0, 1)
    ]
    assert len(set(seeds)) == len(seeds)
    assert streams[0].seed(1, "a") == DropoutSeeds(1234, 5, 0, 0).seed(1, "a", 0)


def test_dropout_ignores_and_leaves_the_global_generator():
    x = torch.ones(64, 64)
    seeds = DropoutSeeds(1, 1, 0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = dropout(x, 0.25, seeds.seed(3, "a"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(dropout(x, 0.25, seeds.seed(3, "a")), first)
    assert set(first.unique().tolist()) == {0.0, x.div(0.75)[0, 0].item()}
    assert abs((first == 0).float().mean().item() - 0.25) < 0.03
