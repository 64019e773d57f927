"""--check-weight-hash-across-dp-replicas-interval: do all ranks have the same weights?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.training.hook import Hook


@dataclass(frozen=True)
class WeightComparisonConfig(Feature):
    """Comparison of weights."""

    check_weight_hash_across_dp_replicas_interval: int | None = arg(None, minimum=1)
    """iterations between comparisons of the weights of data-parallel ranks by hash; the run ends if
    they differ (default: never)"""

    def check(self, facts: Facts) -> Iterator[str]:
        """Where no rank has a replica."""
        name = "check_weight_hash_across_dp_replicas_interval"
        if facts[name] and facts.config.parallel.shares_weights:
            yield (
                f"{facts.say(name)}: not supported with "
                f"{facts.say('data_parallel_sharding_strategy')}; omit it, or use "
                "--data-parallel-sharding-strategy optim [flags-exclude-each-other]"
            )

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """The comparison."""
        if interval := self.check_weight_hash_across_dp_replicas_interval:
            from .hook import WeightComparison

            yield WeightComparison(loop.run, interval)
