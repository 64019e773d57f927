"""--verify-step-interval: gradients are computed a second time and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.arguments import arg
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.training.hook import Hook


@dataclass(frozen=True)
class StepVerificationConfig(Feature):
    """Verification of training steps."""

    verify_step_interval: int | None = arg(None, minimum=1, excludes=("fp8",), metavar="N")
    """compute the gradients of every N-th iteration a second time on another data-parallel rank and
    their sums twice, compare them and the replicas' weights by hash; on GPUs with
    --deterministic-mode (default: never)"""

    verify_step_action: Literal["exit", "majority"] = arg("exit", needs="verify_step_interval")
    """with --verify-step-interval, where gradients differ and a third computation has named a rank:
    exit, or continue with the gradients of the majority"""

    def check(self, facts: Facts) -> Iterator[str]:
        """Gradients that are not one rank's."""
        if self.verify_step_interval and facts["expert_model_parallel_size"] > 1:
            yield (
                f"{facts.say('verify_step_interval')}: gradients of experts on several ranks are "
                "not one rank's; omit it, or use --expert-model-parallel-size 1 "
                "[flags-exclude-each-other]"
            )

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """What takes the place of the training step."""
        if self.verify_step_interval:
            from .hook import StepVerification

            yield StepVerification(
                loop.run,
                loop.forward_step,
                self.verify_step_interval,
                keep_majority=self.verify_step_action == "majority",
            )
