"""Sorts parameters into groups of equal weight decay and learning-rate limits, by name and global
shape."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megatron.config.mup import DECOUPLED_LR_NAMES, Multipliers
from megatron.config.optimizer import OptimizerConfig
from megatron.parallel.sharding import sharding_of


def has_weight_decay(
    name: str,
    shape: Sequence[int],
    apply_wd_to_qk_layernorm: bool = False,
    apply_wd_to_all: bool = False,
) -> bool:
    """Whether the parameter of this global name and GLOBAL shape is decayed.

    Biases (also the two-row bias [2, ffn] of a gated MLP) and every 1-D parameter are not;
    embeddings and position embeddings are. `apply_wd_to_qk_layernorm` puts the query and key norms
    back among the decayed ones, `apply_wd_to_all` everything. The rule is Megatron-LM's.
    """
    if (
        apply_wd_to_all
        or apply_wd_to_qk_layernorm
        and (".q_layernorm." in name or ".k_layernorm." in name)
    ):
        return True
    return not name.endswith(".bias") and len(shape) != 1


def build_param_groups(
    params: Iterable[torch.Tensor],
    config: OptimizerConfig,
    muon: bool = False,
    multipliers: Callable[[str, Sequence[int], bool], Multipliers] | None = None,
) -> list[dict[str, Any]]:
    """Groups of `params` in Megatron's order: decayed, not decayed, then the same two with the
    decoupled learning rate. With `muon` what it updates comes first.

    Each parameter must carry `.sharding` with the global `.name` and `.shape`. A group is a dict of
    `params`, `names` (same order), `muon`, `wd_mult` (1.0 or 0.0), `lr_mult` (1.0, or
    that of `multipliers(name, shape, by_muon)`, which may also give it an `eps` of its own) and,
    with --decoupled-lr (for the word embedding and the output layer), `max_lr` and perhaps
    `min_lr`.
    Empty groups are omitted. Raises ValueError on a name given twice.
    """
    groups: dict[tuple[bool, bool, bool, Multipliers], dict[str, Any]] = {}
    names: set[str] = set()
    for param in params:
        name = sharding_of(param).name
        shape = sharding_of(param).shape
        if name in names:
            raise ValueError(
                f"parameter {name} was given to the optimizer twice; pass each parameter once"
            )
        names.add(name)
        decoupled = config.decoupled_lr is not None and name in DECOUPLED_LR_NAMES
        decayed = has_weight_decay(
            name, shape, config.apply_wd_to_qk_layernorm, config.apply_wd_to_all
        )
        by_muon = muon and sharding_of(param).matrices is not None
        own = Multipliers() if multipliers is None else multipliers(name, shape, by_muon)
        group = groups.get((decoupled, decayed, by_muon, own))
        if group is None:
            group = {"params": [], "names": [], "muon": by_muon}
            group |= {"wd_mult": 1.0 if decayed else 0.0, "lr_mult": own.lr}
            if own.eps != 1.0:
                group["eps"] = config.adam_eps * own.eps
            if decoupled:
                group["max_lr"] = config.decoupled_lr
                if config.decoupled_min_lr is not None:
                    group["min_lr"] = config.decoupled_min_lr
            groups[decoupled, decayed, by_muon, own] = group
        group["params"].append(param)
        group["names"].append(name)
    order = sorted(groups, key=lambda key: (key[0], not key[1], not key[2], key[3]))
    return [groups[key] for key in order]
