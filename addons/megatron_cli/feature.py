"""Command lines and logs of Megatron-LM: its flags that have no field here, its log formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import AddedValue, ForeignFlags
from megatron.training.feature import Feature

if TYPE_CHECKING:
    from megatron.config.plan.plan import Plan
    from megatron.config.tree import Config
    from megatron.training.launch.initialize import Runtime

    from .aurora_format import AuroraLines
    from .megatron_format import MegatronLines


def _megatron(config: Config, plan: Plan, runtime: Runtime | None) -> MegatronLines:
    from .megatron_format import MegatronLines

    return MegatronLines(config, plan, runtime)


def _aurora(config: Config, plan: Plan, runtime: Runtime | None) -> AuroraLines:
    from .aurora_format import AuroraLines

    return AuroraLines(config, plan, runtime)


@dataclass(frozen=True)
class MegatronCliConfig(Feature):
    """Megatron-LM's command line and log."""

    adds = {
        "log_format": {
            "megatron": AddedValue("Megatron-LM's lines", _megatron),
            "aurora": AddedValue("AuroraGPT's iteration lines", _aurora),
        }
    }

    @classmethod
    def foreign_flags(cls) -> ForeignFlags:
        """Megatron's flags that have no field here."""
        from . import foreign

        return foreign.foreign_flags()
