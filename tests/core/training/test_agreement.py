"""The requests of ranks, counted over all of them: without limit, and none disturbs another."""

import signal
from types import SimpleNamespace

import torch

from megatron.training.agreement import Agreement
from megatron.training.result import Requests
from megatron.training.run import Services


def of_many(ranks: int, *requests: Requests | None) -> Agreement:
    """The agreement of one rank among so many that request the same, and what its hooks do."""
    hooks = [SimpleNamespace(requests=lambda iteration, one=one: one) for one in requests]
    services = Services(
        signals=SimpleNamespace(received=signal.SIGTERM),
        clock=lambda: 600.0,
        all_reduce=lambda x, axis, op="sum": x * ranks if op == "sum" else x,
    )
    run = SimpleNamespace(
        config=SimpleNamespace(
            training=SimpleNamespace(exit_duration_in_mins=5),
        ),
        runtime=SimpleNamespace(
            rank=1, world_size=ranks, device=torch.device("cpu"), ctx=SimpleNamespace(world=None)
        ),
        services=services,
    )
    return Agreement(run, started=0.0, hooks=hooks)


def test_a_million_ranks_are_counted():
    """A count in one slot never reaches the next slot."""
    ranks = 1_000_000
    agreement = of_many(ranks, Requests(written=1), None)
    agreed = agreement.of_all(agreement.own(3))
    assert agreed == Requests(signal=ranks, time_up=ranks, written=ranks)


def test_one_rank_needs_no_collective():
    agreement = of_many(1)
    assert agreement.of_all(agreement.own(3)) == Requests(signal=1, time_up=1)
    assert of_many(1, Requests(save_now=1)).own(3) == Requests(1, 1, save_now=1)
    assert agreement.signal_name() == "SIGTERM" and agreement.minutes() == 10.0
    assert agreement.out_of_time()
