"""Command lines and logs of Megatron-LM: its flags that have no field here, its log formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.arguments import OtherFlags
from megatron.training.feature import Feature

if TYPE_CHECKING:
    from megatron.config.plan.plan import Plan
    from megatron.config.tree import Config
    from megatron.training.launch.initialize import Runtime
    from megatron.training.logging.iteration import LogFormat


@dataclass(frozen=True)
class MegatronCliConfig(Feature):
    """Megatron-LM's command line and log."""

    adds = {
        "log_format": {
            "megatron": "Megatron-LM's lines",
            "aurora": "AuroraGPT's iteration lines",
        }
    }

    @classmethod
    def other_flags(cls) -> OtherFlags:
        """Megatron's flags that have no field here."""
        from megatron.features.megatron_cli import foreign

        return foreign.other_flags()

    def argument_table(self, values: dict[str, Any], foreign: Mapping[str, Any]) -> dict[str, Any]:
        """With Megatron's flags that have no field here."""
        from megatron.features.megatron_cli.flags import dumped

        if values.get("log_format") == "megatron":  # Megatron's has no such name
            del values["log_format"]
        return values | dumped(foreign)

    def log_format(self, config: Config, plan: Plan, runtime: Runtime | None) -> LogFormat | None:
        """The lines of Megatron or of AuroraGPT, a fork of it."""
        match config.logging.log_format:
            case "megatron":
                from megatron.features.megatron_cli.megatron_format import MegatronLines

                return MegatronLines(config, plan, runtime)
            case "aurora":
                from megatron.features.megatron_cli.aurora_format import AuroraLines

                return AuroraLines(config, plan, runtime)
        return None
