"""Sorts parameters into groups of equal weight decay and learning-rate limits; knows names and
shapes, no model."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

DECOUPLED_LR_NAMES = ("embedding.word_embeddings.weight", "output_layer.weight")


def has_weight_decay(
    name: str,
    shape: Sequence[int],
    apply_wd_to_qk_layernorm: bool = False,
    apply_wd_to_all: bool = False,
) -> bool:
    """Whether the parameter of this global name and GLOBAL shape is decayed.

    Biases (also the two-row bias [2, ffn] of a gated MLP) and every 1-D parameter are not;
    embeddings and position embeddings are. `apply_wd_to_qk_layernorm` puts the query and key norms
    back among the decayed ones, `apply_wd_to_all` everything. Source: facts/megatron.md 6
    (Megatron-LM's rule).
    """
    if (
        apply_wd_to_all
        or apply_wd_to_qk_layernorm
        and (".q_layernorm." in name or ".k_layernorm." in name)
    ):
        return True
    return not name.endswith(".bias") and len(shape) != 1


def build_param_groups(
    params: Iterable[torch.nn.Parameter],
    *,
    apply_wd_to_qk_layernorm: bool = False,
    apply_wd_to_all: bool = False,
    decoupled_lr: float | None = None,
    decoupled_min_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Groups of `params` in Megatron's order: decayed, not decayed, then the same two with the
    decoupled learning rate.

    Each parameter must carry `.sharding` with the global `.name` and `.shape`. A group is a dict of
    `params`, `names` (same order), `wd_mult` (1.0 or 0.0), `lr_mult` (1.0) and, with `decoupled_lr`
    (for the word embedding and the output layer), `max_lr` and perhaps `min_lr`. Empty groups are
    left out. Raises ValueError on a name given twice.
    """
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    seen: set[str] = set()
    for param in params:
        name = param.sharding.name
        shape = param.sharding.shape
        if name in seen:
            raise ValueError(
                f"parameter {name} was given to the optimizer twice; pass each parameter once"
            )
        seen.add(name)
        decoupled = decoupled_lr is not None and name in DECOUPLED_LR_NAMES
        decayed = has_weight_decay(name, shape, apply_wd_to_qk_layernorm, apply_wd_to_all)
        group = groups.get((decoupled, decayed))
        if group is None:
            group = {"params": [], "names": [], "wd_mult": 1.0 if decayed else 0.0, "lr_mult": 1.0}
            if decoupled:
                group["max_lr"] = decoupled_lr
                if decoupled_min_lr is not None:
                    group["min_lr"] = decoupled_min_lr
            groups[decoupled, decayed] = group
        group["params"].append(param)
        group["names"].append(name)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], not key[1]))]
