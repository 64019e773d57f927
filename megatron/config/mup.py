"""Flags of muP (Yang et al. 2022, Tensor Programs V), and its multipliers of learning rates.

A width m times that of the base: hidden matrices start with standard deviations / sqrt(m) and have
Adam's learning rate and epsilon / m, logits are divided by m, and attention scores by the head's
width instead of its root.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.arguments import arg

# --decoupled-lr is their learning rate.
DECOUPLED_LR_NAMES = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, kw_only=True)
class MupConfig:
    """muP, with which the best learning rate of a narrow model is that of a wide one."""

    use_mup: bool = arg(
        False,
        requires="mup_base_hidden_size",
        excludes=("init_method_xavier_uniform", "init_scheme"),
        trained="attention_scale",
    )
    """muP: initial values, learning rates, attention and logits scaled by the width relative to
    --mup-base-hidden-size (m), so that a learning rate tuned there holds at other widths"""

    mup_base_hidden_size: int | None = arg(
        None, requires="use_mup", minimum=1, trained="logits_divisor"
    )
    """hidden size at which --lr and --init-method-std were tuned"""

    mup_embedding_mult: float = arg(1.0, requires="use_mup", above=0, trained="embedding_factors")
    """factor on the output of the embedding, positions included"""

    mup_output_mult: float = arg(1.0, requires="use_mup", above=0, trained="logits_divisor")
    """factor on the logits instead of 1 / m; 1.0 stands for 1 / m, as in Megatron-LM"""

    mup_base_head_dim: float | None = arg(
        None, requires="use_mup", above=0, trained="attention_scale"
    )
    """head width at which --lr was tuned: attention scores are multiplied by its root, so that
    heads of this width have the usual scale (default: 1)"""

    mup_attn_scale_power: float = arg(1.0, requires="use_mup", minimum=0, trained="attention_scale")
    """attention scores are divided by the head width to this power; 0.5 is the usual root"""


class Multipliers(NamedTuple):
    """Of a weight's learning rate and of Adam's epsilon."""

    lr: float = 1.0
    eps: float = 1.0


def multipliers(
    m: float, optimizer: str, decoupled_lr: bool
) -> Callable[[str, Sequence[int], bool], Multipliers]:
    """Those of the weight of a name and GLOBAL shape in a model `m` times as wide as its base; does
    Muon update it, whose scale has the width in it?

    `decoupled_lr`: the word embedding and the output layer have a learning rate of their own, which
    is not scaled.
    """

    def of(name: str, shape: Sequence[int], by_muon: bool) -> Multipliers:
        # fans in from the width: not embeddings, norms and biases (a gated one has two dims)
        matrix = len(shape) > 1 and not name.startswith("embedding.") and name[-5:] != ".bias"
        own_lr = decoupled_lr and name in DECOUPLED_LR_NAMES
        if optimizer == "sgd":
            return Multipliers(1.0 if matrix or own_lr else m)
        if not matrix or by_muon:
            return Multipliers()
        return Multipliers(1.0 if own_lr else 1.0 / m, 1.0 / m)

    return of
