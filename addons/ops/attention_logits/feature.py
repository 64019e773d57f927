"""The largest attention scores of a step: --log-max-attention-logit, and --qk-clip, which scales
the weights that make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.config.tree import Config, Demands
from megatron.model.blocks.attention.facts import Attention
from megatron.training.feature import Feature

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.training.run import Run


@dataclass(frozen=True, kw_only=True)
class LogitsConfig(Feature):
    """Largest attention scores."""

    log_max_attention_logit: bool = arg(False)
    """log the largest attention score of each iteration, before the softmax and any cap; always
    with --qk-clip; its products are computed a second time"""

    qk_clip: bool = arg(False)
    """QK-clip (Kimi K2): after an update the weights of queries and keys of a head whose largest
    attention score in the step was above --qk-clip-threshold are scaled by threshold / score"""

    qk_clip_alpha: float = arg(0.5, needs="qk_clip", minimum=0, maximum=1)
    """power of that factor by which weights of queries are scaled, of keys 1 - this; of queries of
    MLA with rotary positions the whole"""

    qk_clip_threshold: float = arg(100.0, needs="qk_clip", above=0)
    """the largest score that is left alone"""

    def check(self, facts: Facts) -> Iterator[str]:
        """Attention whose scores no weights scale."""
        sizes = ("num_layers", "hidden_size", "num_attention_heads")
        if not self.qk_clip or facts.bad or not facts.ok(*sizes):
            return
        blocks = facts.config.model.blocks
        if any(isinstance(block, Attention) and not block.clipped(1.0) for block in blocks):
            yield (
                "--qk-clip and --qk-layernorm: norms of queries and keys undo what it does to "
                "weights; omit one of them [flags-exclude-each-other]"
            )
        if not any(isinstance(block, Attention) for block in blocks):
            yield (
                f"--qk-clip and {facts.say('experimental_attention_variant')}: no layer has "
                "attention scores; omit one of them [flags-exclude-each-other]"
            )

    def demands(self, config: Config) -> Demands:
        """Scores of all attention."""
        asked = {
            "--qk-clip": self.qk_clip,
            "--log-max-attention-logit": self.log_max_attention_logit,
        }
        return Demands(scores=tuple(flag for flag, is_given in asked.items() if is_given))

    def built(self, run: Run) -> None:
        """The step has one more counter, the update one more part."""
        if not (self.qk_clip or self.log_max_attention_logit):
            return
        from .logits import AttentionLogits

        logits = AttentionLogits(
            run.config,
            run.model,
            run.runtime.ctx,
            run.runtime.device,
            threshold=self.qk_clip_threshold,
            alpha=self.qk_clip_alpha,
        )
        run.counters.append(logits)
        if self.qk_clip:
            run.optimizer.rescale = logits.rescale
