"""--data-loss-weights: how much the loss of a token counts, by the source that it is of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.config.tree import Config, Demands
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.training.hook import Hook


@dataclass(frozen=True)
class LossWeightsConfig(Feature):
    """Loss weights."""

    data_loss_weights: tuple[float, ...] = arg((), minimum=0, excludes=("mtp_num_layers",))
    """weight of the loss of each source's tokens in training, in the order of the sources of
    --data-path: a token's loss times its source's weight, over the sum of the weights of all
    tokens; the log has each source's loss without weights"""

    def check(self, facts: Facts) -> Iterable[str]:
        """As many weights as sources, not all of them 0."""
        weights = self.data_loss_weights
        if weights and not any(weights):
            yield (
                f"{facts.say('data_loss_weights')}: nothing would be trained; give a weight above "
                "0 [loss-weights-all-zero]"
            )
        words = facts["train_data_path"] or facts["data_path"]
        if weights and words and not facts.config.packed:
            from megatron.data.blend.blended_dataset import parse_blend

            try:
                sources, _ = parse_blend(words)
            except ValueError:  # is an error of the flag with the sources
                return
            if wrong := wrong_number(weights, [source[:200] for source in sources]):
                yield wrong

    def demands(self, config: Config) -> Demands:
        """Which source each token is of, and the losses of the sources."""
        return Demands(subsets=bool(self.data_loss_weights))

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """Weigh the losses, and log those of the sources. Raises ValueError for another number of
        weights than of sources."""
        if self.data_loss_weights:
            from .hook import SourceLosses, weigh_by_source

            losses = SourceLosses(loop.run)
            if not losses.sources:  # a run without training
                return
            if wrong := wrong_number(self.data_loss_weights, losses.sources):
                raise ValueError(wrong)
            weigh_by_source(loop.run, self.data_loss_weights)
            yield losses


def wrong_number(weights: tuple[float, ...], sources: list[str]) -> str | None:
    """The error of more or fewer weights than sources."""
    if len(weights) == len(sources):
        return None
    shown = ", ".join(sources[:10]) + ", ..." * (len(sources) > 10)
    return (
        f"--data-loss-weights {' '.join(f'{weight:g}' for weight in weights[:10])}: "
        f"{len(weights)} weights for {len(sources)} sources ({shown}); give one for each, in "
        "their order [loss-weights-count]"
    )
