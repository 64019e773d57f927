"""--cuda-graph-impl local: forward and backward of a micro-batch are one CUDA graph, which adds to
the same gradients each time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron import cuda
from megatron.kernels.cuda_graph import Graphs, NotStatic
from megatron.parallel.random import DropoutSeeds, Place
from megatron.training.batch import MicroBatch

if TYPE_CHECKING:
    from megatron.config.tree import Config
    from megatron.model.gpt import GPTModel
    from megatron.parallel.ddp import GradBuffers

# (samples, seeds of dropout, factor of the loss) on the device -> what is read of a micro-batch
Region = Callable[[MicroBatch, DropoutSeeds, torch.Tensor], Any]


class MicroBatchGraphs:
    """The graphs of a run, after the `warm_up` iterations, and what they read of a micro-batch,
    which is copied to where it always is. All else that they read, weights and gradients, stays
    where it is; so every micro-batch adds to gradients, the first of a step to zeros."""

    def __init__(self, model: GPTModel, buffers: GradBuffers, device: torch.device, warm_up: int):
        self._device = device
        self._warm_up = warm_up
        self._graphs = Graphs(device)
        self._samples: dict[Hashable, MicroBatch] = {}
        self._seeds = StaticSeeds(model.dropout_places(), device)
        self._factor = torch.zeros((), dtype=torch.float64, device=device)
        for p in buffers.params:
            p.overwrites = False

    def due(self) -> bool:
        """Asked once an iteration: are its micro-batches graphs?"""
        self._warm_up -= 1
        return self._warm_up < 0

    def run(
        self,
        region: Region,
        samples: MicroBatch,
        seeds: DropoutSeeds,
        factor: float,
        *key: Hashable,
    ) -> Any:
        """What `region` gives, which the next run overwrites. It is another region with another
        `key`. Raises ValueError where it is nothing that a graph can hold."""
        key = (samples.rows.shape, samples.packed, samples.subset, samples.counted, *key)
        if key not in self._samples:
            rows = torch.empty_like(samples.rows, device=self._device)
            self._samples[key] = samples._replace(rows=rows, hash=0)
        static = self._samples[key]
        self._copy(samples.rows, static.rows)
        self._copy(self._seeds.on_host(seeds), self._seeds.values)
        self._factor.fill_(factor)
        try:
            return self._graphs.run(key, partial(region, static, self._seeds, self._factor))
        except NotStatic as why:
            raise ValueError(
                f"--cuda-graph-impl local: a graph cannot repeat this micro-batch: {why}; omit the "
                "flag [cuda-graph-cannot-hold]"
            ) from why

    def _copy(self, on_host: torch.Tensor, to: torch.Tensor) -> None:
        """Behind what the device computes now; the host goes on."""
        to.copy_(on_host.pin_memory() if to.is_cuda else on_host, non_blocking=True)


def micro_batch_graphs(
    config: Config, model: GPTModel, buffers: GradBuffers, device: torch.device, own_model: bool
) -> MicroBatchGraphs | None:
    """Those that the flags ask for; none in a trace on the meta device. Raises ValueError where
    there are none, and for a script's own model, whose dropout takes its seed from the host."""
    kernels = config.kernels
    if not kernels.cuda_graphs or device.type == "meta":
        return None
    if not cuda.has_graphs(device):
        raise ValueError(
            f"--cuda-graph-impl local: needs a CUDA device, but the device is {device.type}; omit "
            "it [cuda-device-needed]"
        )
    if own_model:
        raise ValueError(
            "--cuda-graph-impl local: the model of a script takes the seed of its dropout from the "
            "host; omit the flag [cuda-graph-cannot-hold]"
        )
    return MicroBatchGraphs(model, buffers, device, kernels.cuda_graph_warmup_steps)


class StaticSeeds(DropoutSeeds):
    """Those at `places` of one micro-batch after another in the same memory of a device, `values`,
    which a CUDA graph reads."""

    def __init__(self, places: Iterable[Place], device: torch.device):
        self._rows = {place: row for row, place in enumerate(places)}
        self.values = torch.zeros(len(self._rows), dtype=torch.int64, device=device)

    def on_host(self, seeds: DropoutSeeds) -> torch.Tensor:
        """Those of a micro-batch, to be copied into `values`."""
        return torch.tensor([seeds.seed(*place) for place in self._rows], dtype=torch.int64)

    def seed(self, layer: int, site: str, tp_part: int = 0) -> int:
        """Raises NotStatic: a graph would draw the same mask each time."""
        raise NotStatic(f"the seed of {site} in layer {layer} is a number of Python's")

    def tensor(self, layer: int, site: str, tp_part: int = 0) -> torch.Tensor:
        """As of any, on the device."""
        return self.values[self._rows[layer, site, tp_part]]
