"""Weights that the ranks of a sharded optimizer have updated, gathered bucket by bucket, and what
waits for them."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.parallel.collectives import Pending, start_all_gather_, start_broadcast_shards_
from megatron.parallel.flat_buffers import FlatBuffers, GradBucket


class Gathering:
    """Gives every rank the weights of all shards of `buffers`; with `overlap` while the forward
    passes already run. The weights of a bucket of whole parameters are broadcast by their
    owners."""

    def __init__(self, buffers: FlatBuffers, overlap: bool):
        self._buffers = buffers
        self._overlap = overlap
        self._started: dict[GradBucket, Pending] = {}

    def start(self) -> None:
        """After an update of `owned`: gather all weights; with overlap they are only under way
        then."""
        weights = self._buffers.weights
        if weights is None:
            return
        for bucket in reversed(self._buffers.buckets):  # the first layers lie last
            shard = bucket.replicas.shard
            if bucket.layout.whole_params and shard.size > 1:
                self._started[bucket] = start_broadcast_shards_(bucket.shards(weights), shard)
            elif shard.size > 1:
                self._started[bucket] = start_all_gather_(weights[bucket.range], shard)
            if not self._overlap:
                self._wait_for([bucket])

    def wait(self) -> None:
        """Wait for weights under way, before something other than a forward pass reads them."""
        self._wait_for(self._buffers.buckets)

    def _wait_for(self, buckets: Iterable[GradBucket]) -> None:
        for bucket in buckets:
            if bucket in self._started:
                self._started.pop(bucket)()

    def _before_forward(self, buckets: list[GradBucket], module: nn.Module, args: Any) -> None:
        self._wait_for(buckets)

    def wait_in_forward(self, model: nn.Module) -> None:
        """From now on each module of `model`, when called, waits for its own weights; a compiled
        one for all inside it."""
        if self._buffers.weights is None or not self._overlap:
            return
        bucket_of: dict[nn.Parameter, GradBucket] = {
            p: bucket for bucket in self._buffers.buckets for p in bucket.params
        }

        def visit(module: nn.Module) -> None:
            compiled = module._compiled_call_impl is not None
            params = [p for p in module.parameters(recurse=compiled) if p in bucket_of]
            buckets = list(dict.fromkeys(bucket_of[p] for p in params))
            hook = partial(self._before_forward, buckets)
            if buckets:
                module.register_forward_pre_hook(torch.compiler.disable(hook) if compiled else hook)
            if not compiled:
                for child in module.children():
                    visit(child)

        visit(model)
