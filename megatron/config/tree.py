"""All groups of the command line in one frozen tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from megatron.arguments import Extension, values_of
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.kernels import KernelsConfig
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.muon import MuonConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig


@dataclass(frozen=True)
class Demands:
    """What a feature asks of the run."""

    subsets: bool = False  # tokens and losses of each subset of the data
    step_numbers: int = 0  # of its `StepCounter`s, in the sum over ranks of each step
    vetoes: bool = False  # it is asked before each update, so that each step has its norm
    # copies of the run that a rank keeps in host memory, by the flag that asks for them
    host_copies: Mapping[str, int] = field(default_factory=dict)
    # averages of the main weights: a rank has as much of them, and a checkpoint
    averages: int = 0
    averages_on_host: bool = False  # and not on the device
    # by the names of other models their bytes, with what they compute, on a device, by `Plan` and
    # pipeline stage; and the operations of all of them for a sample, by `Plan`
    other_models: Mapping[str, Callable[[Any, int], int]] = field(default_factory=dict)
    other_flops: Callable[[Any], int] = lambda plan: 0
    profile_folder: str | None = None  # where it shows profiles
    # the flags that ask for the largest attention scores of a step
    scores: tuple[str, ...] = ()
    # fields of which a run may have other values than the checkpoint that it loads, and of which
    # iterations that has to be
    changing: frozenset[str] = frozenset()
    changes_after: tuple[int, ...] = ()


class FeatureFlags(Extension):
    """A group of flags of a feature, as checks and plan see it."""

    def check(self, facts: Any) -> Iterable[str]:
        """One line for each problem of its flags (`checks.facts.Facts`) that their declarations do
        not say."""
        return ()

    @property
    def packs(self) -> bool:
        """Do they ask for packed samples (`Config.packed`)?"""
        return False

    @property
    def names_data(self) -> bool:
        """Do they name or choose the data, so that the core's need not?"""
        return False

    def missing(self) -> Iterable[str]:
        """One line for each file that they name and a run would not find here."""
        return ()

    @staticmethod
    def converter_command(load: str) -> str | None:
        """The command and source of tools/convert_checkpoint.py with which it reads a directory
        that --load names; None if it cannot."""
        return None

    def demands(self, config: Config) -> Demands:
        """What it asks of the run."""
        return Demands()


@dataclass(frozen=True)
class Config:
    """What the user asked for, unchanged; what follows from it lives in
    `megatron.config.plan.plan.Plan`."""

    model: ModelConfig
    training: TrainingConfig
    data: DataConfig
    optimizer: OptimizerConfig
    muon: MuonConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    kernels: KernelsConfig

    @property
    def has_rings(self) -> bool:
        """Do keys and values go from rank to rank in attention of a layer?"""
        types = self.model.cp_comm_type
        return any(self.parallel.split_context(comm_type)[1] > 1 for comm_type in types)

    @property
    def attention_backend(self) -> str:
        """The kind of attention that is used: blocks of keys and dropout have kernels of their own,
        whatever was requested."""
        backend = self.kernels.attention
        fused = backend in ("flash", "fused")
        if self.has_rings or fused and self.model.attention_dropout > 0:
            return "auto"
        return backend

    @property
    def of_features(self) -> list[FeatureFlags]:
        """The groups of features."""
        return [group for group in vars(self).values() if isinstance(group, FeatureFlags)]

    @property
    def demands(self) -> list[Demands]:
        """Those of its features."""
        return [group.demands(self) for group in self.of_features]

    @property
    def other_models(self) -> dict[str, Callable[[Any, int], int]]:
        """Those beside the model, as `Demands` has them."""
        return {name: size for one in self.demands for name, size in one.other_models.items()}

    @property
    def needs_subsets(self) -> bool:
        """Does a feature need the tokens and losses of each subset of the data?"""
        return any(demands.subsets for demands in self.demands)

    @property
    def scored_by(self) -> list[str]:
        """The flags for which attention records its largest scores."""
        return [flag for demands in self.demands for flag in demands.scores]

    def changing_after(self, iteration: int) -> set[str]:
        """The fields that a checkpoint of this iteration may have with other values."""
        return {
            name
            for demands in self.demands
            if iteration in demands.changes_after
            for name in demands.changing
        }

    @property
    def packed(self) -> bool:
        """Is each micro-batch one row of micro-batch-size samples, which has labels, positions and
        subsets of its own, and in which attention stays inside a sample?"""
        return any(group.packs for group in self.of_features)

    @property
    def counts_subsets(self) -> bool:
        """Are they counted?"""
        return self.packed or self.logging.log_subsets or self.needs_subsets

    def added(self, name: str) -> Callable[..., Any] | None:
        """What makes that which the value of a flag names, if a feature adds this value."""
        value = values_of(self)[name]
        for group in self.of_features:
            if value in group.adds.get(name, {}):
                return group.adds[name][value].make
        return None


def with_features(features: Iterable[type]) -> type[Config]:
    """The configuration of a program that has these features, each a dataclass of its flags."""
    groups = [(feature.__name__, feature) for feature in features]
    return make_dataclass("Config", groups, bases=(Config,), frozen=True)
