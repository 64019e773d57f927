"""The check of nodes between iterations: one line, and one for each rank that stands out."""

from __future__ import annotations

import socket

from megatron import device as devices
from megatron import log
from megatron.parallel.collectives import gather_objects
from megatron.training.hook import Hook
from megatron.training.result import IterationResult
from megatron.training.run import Run

from .probes import MIB, Measured, measure
from .verdict import judge, slow


class NodeCheck(Hook):
    """--gpu-sniff-test-interval: all ranks are measured, twice where one is slow."""

    after = ("IterationLog",)
    before = ("Skipping",)

    def __init__(self, run: Run, interval: int):
        self._runtime = run.runtime
        self._interval = interval

    def on_start(self) -> None:
        self._check("before training")

    def after_step(self, result: IterationResult) -> None:
        if result.iteration % self._interval == 0:
            self._check(f"at iteration {result.iteration}")

    def _check(self, when: str) -> None:
        world = self._runtime.ctx.world
        rounds: list[list[Measured]] = []
        again = True
        while again:
            mine = measure(self._runtime.device, world, (MIB,))
            facts = (socket.gethostname(), devices.name(self._runtime.device))
            shared = gather_objects((mine, facts), world)
            rounds.append([each for each, _ in shared])
            kinds = [kind for _, (_, kind) in shared]
            again = len(rounds) < 2 and bool(slow(rounds[0], kinds))
        findings = judge(rounds, kinds)
        log.print_rank_last(f"check of nodes {when} | ranks {len(kinds)} | named {len(findings)}")
        for finding in findings:
            log.print_rank_last(f"WARNING: {finding.line([host for _, (host, _) in shared])}")
