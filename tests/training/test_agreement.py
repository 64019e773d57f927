"""The requests of ranks, counted over all of them: without limit, and none disturbs another."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import torch

from megatron.training.agreement import Agreement, Requests
from megatron.training.run import Services


def of_many(ranks: int, **config) -> Agreement:
    """The agreement of one rank among so many that request the same."""
    services = Services(
        signals=SimpleNamespace(received=signal.SIGTERM),
        clock=lambda: 600.0,
        all_reduce=lambda x, axis, op="sum": x * ranks if op == "sum" else x,
    )
    run = SimpleNamespace(
        config=SimpleNamespace(
            checkpoint=SimpleNamespace(control_file=None),
            training=SimpleNamespace(exit_duration_in_mins=5),
        ),
        runtime=SimpleNamespace(
            rank=1, world_size=ranks, device=torch.device("cpu"), ctx=SimpleNamespace(world=None)
        ),
        services=services,
        under_way=object(),
        writer=SimpleNamespace(done=lambda: True),
    )
    return Agreement(run, started=0.0)


def test_a_million_ranks_are_counted():
    """A count in one slot never reaches the next slot."""
    ranks = 1_000_000
    agreed = of_many(ranks).of_all(7)
    assert agreed == Requests(signal=ranks, time_up=ranks, written=ranks)


def test_one_rank_needs_no_collective():
    agreement = of_many(1)
    assert agreement.of_all(7) == agreement.own(7) == Requests(1, 1, 0, 0, 1)
    assert agreement.signal_name() == "SIGTERM" and agreement.minutes() == 10.0
    assert agreement.out_of_time()
