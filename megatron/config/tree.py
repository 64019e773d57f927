"""All groups of the command line in one frozen tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from typing import Protocol, runtime_checkable

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.kernels import KernelsConfig
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.muon import MuonConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.profiling import ProfilingConfig
from megatron.config.training import TrainingConfig


@dataclass(frozen=True)
class Config:
    """What the user asked for, unchanged; what follows from it lives in
    `megatron.config.plan.plan.Plan`."""

    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    kernels: KernelsConfig
    data: DataConfig
    optimizer: OptimizerConfig
    muon: MuonConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    profiling: ProfilingConfig

    @property
    def attention_backend(self) -> str:
        """The kind of attention that is used: context parallelism and dropout have kernels of their
        own, whatever was requested."""
        backend = self.kernels.attention
        fused = backend in ("flash", "fused")
        if self.parallel.context_parallel_size > 1 or fused and self.model.attention_dropout > 0:
            return "auto"
        return backend

    @property
    def needs_subsets(self) -> bool:
        """Does a feature need the tokens and losses of each subset of the data?"""
        groups = vars(self).values()
        return any(
            isinstance(group, NeedsSubsets) and group.counts_subsets(self) for group in groups
        )

    @property
    def counts_subsets(self) -> bool:
        """Are they counted?"""
        return self.data.packed_samples or self.logging.log_subsets or self.needs_subsets


@runtime_checkable
class NeedsSubsets(Protocol):
    """A group of flags that may need the metrics of subsets, as features do."""

    def counts_subsets(self, config: Config) -> bool:
        """Does it?"""


def with_features(features: Iterable[type]) -> type[Config]:
    """The configuration of a program that has these features, each a dataclass of its flags."""
    groups = [(feature.__name__, feature) for feature in features]
    return make_dataclass("Config", groups, bases=(Config,), frozen=True)
