"""Ranks that torchrun restarts: each attempt has a store of its own."""

import os
import time
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist

from megatron.training.launch import rendezvous

LIMIT = timedelta(seconds=60)


def as_rank(rank: int, port: int) -> dist.Store:
    os.environ["RANK"] = str(rank)
    return rendezvous.open_store("127.0.0.1", port, LIMIT)


def test_a_restarted_rank_waits_for_the_restarted_rank_0(monkeypatch):
    """Agents restart their ranks at different times: rank 1 comes again while the rank 0 of the
    attempt before still answers."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    first = as_rank(0, agent.port)
    first.set("attempt", "0")
    assert as_rank(1, agent.port).get("attempt") == b"0"
    served = []

    def rank_0_is_restarted(seconds: float) -> None:
        served.append(as_rank(0, agent.port))
        served[-1].set("attempt", "1")
        os.environ["RANK"] = "1"

    # its name alone: other threads of this process sleep, too
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=rank_0_is_restarted)
    monkeypatch.setattr(rendezvous, "time", clock)
    assert as_rank(1, agent.port).get("attempt") == b"1" and len(served) == 1
