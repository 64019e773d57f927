"""Flags of mixture-of-experts layers: routers, experts and their auxiliary losses."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from megatron.arguments import Needs, arg

# by --moe-router-load-balancing-type, the names of the losses in the log
BALANCING_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
ROUTER_LOSSES = (*BALANCING_LOSSES.values(), "z_loss")
# first part of the names of a single layer's numbers in the log, as in Megatron
PER_LAYER = "moe/"
# what the router of a layer sums over tokens, in addition to its selections of each expert
ROUTER_SUMS = (*ROUTER_LOSSES, "router_entropy")


_BALANCING_LOSS = Needs(
    "--moe-router-load-balancing-type aux_loss, seq_aux_loss or global_aux_loss",
    lambda v: v["moe_router_load_balancing_type"] not in (("none",), ("sinkhorn",)),
)
_NO_SOFTMAX = Needs(
    "--moe-router-score-function sigmoid or sqrtsoftplus",
    lambda v: v["moe_router_score_function"] != "softmax",
)
_moe = functools.partial(arg, needs="num_experts")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts."""

    num_experts: int | None = arg(None, minimum=1, trained=True)
    """mixture of experts (MoE): number of experts of each MoE layer"""

    moe_layer_freq: str = _moe("1", trained="moe_pattern")
    """which layers are MoE layers: N for layers 0, N, 2N ..., or a pattern of 0 (dense) and 1 (MoE)
    such as [0]*1+[1]*26"""

    moe_ffn_hidden_size: int | None = _moe(None, minimum=1, trained="expert_width")
    """MLP hidden size of one expert (default: --ffn-hidden-size)"""

    moe_shared_expert_intermediate_size: int | None = _moe(None, minimum=1, trained=True)
    """MLP hidden size of the shared expert, which computes every token, of an MoE layer (default:
    no shared expert)"""

    moe_shared_expert_gate: bool = _moe(
        False,
        requires=Needs(
            "--moe-shared-expert-intermediate-size",
            lambda v: v["moe_shared_expert_intermediate_size"] or v["num_experts"] is None,
        ),
        trained=True,
    )
    """multiply the shared expert's output by the sigmoid of a learned gate (Qwen2-MoE)"""

    moe_router_topk: int = _moe(2, minimum=1, trained=True)
    """number of experts that compute each token"""

    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = _moe(
        "softmax", trained="router_function"
    )
    """function from router logits to the experts' probabilities; sqrtsoftplus: square root of
    softplus (DeepSeek-V4)"""

    moe_router_pre_softmax: bool = arg(
        False,
        needs=["num_experts", ("moe_router_score_function", "softmax")],
        trained="router_function",
    )
    """softmax over all experts before the top-k selection, instead of over the selected ones after
    it"""

    moe_router_normalization: Literal["auto", "always", "never"] = arg(
        "auto", needs=["num_experts", _NO_SOFTMAX], trained="router_function"
    )
    """divide the scores of a token's selected experts by their sum; auto: where there are several
    (norm_topk_prob of Hugging Face)"""

    moe_router_topk_scaling_factor: float | None = _moe(None, above=0, trained="router_scale")
    """factor on the probabilities of the selected experts"""

    moe_router_dtype: Literal["fp32", "fp64"] | None = _moe(None)
    """dtype of the router's GEMM and of its logits (default: the model's)"""

    moe_router_num_groups: int | None = _moe(None, minimum=1, trained=True)
    """group-limited routing: divide the experts into this many groups, of which a token uses
    --moe-router-group-topk"""

    moe_router_group_topk: int | None = _moe(None, minimum=1, trained=True)
    """group-limited routing: number of groups of experts per token"""

    moe_router_group_score_topk: int | None = arg(
        None, minimum=1, needs="moe_router_num_groups", trained="group_score_topk"
    )
    """group-limited routing: a group counts as the sum of this many of its best scores (default:
    --moe-router-topk / --moe-router-group-topk; 1 in DeepSeek-V2, 2 in V3)"""

    moe_router_enable_expert_bias: bool = _moe(False, trained=True)
    """load balancing without a loss: a bias per expert, added to its score when experts are
    selected, follows the number of tokens"""

    moe_router_bias_update_rate: float = arg(1e-3, minimum=0, needs="moe_router_enable_expert_bias")
    """change of the expert bias per iteration"""

    moe_router_load_balancing_type: tuple[str, ...] = _moe(
        ("aux_loss",), trained="router_function", choices=(*BALANCING_LOSSES, "sinkhorn", "none")
    )
    """load balancing of MoE layers, one or several, each with its --moe-aux-loss-coeff: aux_loss
    (Switch Transformer's loss over a micro-batch), seq_aux_loss (over each sequence),
    global_aux_loss (with the loads of all data-parallel ranks and of the earlier micro-batches of
    the iteration, so that it depends on how many each rank has), sinkhorn (without a loss: in
    training, balanced selection; probabilities are a softmax over all experts, a sigmoid for top-1)
    or none"""

    moe_router_force_load_balancing: bool = _moe(False)
    """for benchmarks of evenly loaded experts: training selects them at random, whatever the router
    computes, so that the weights are of no use"""

    moe_input_jitter_eps: float | None = _moe(None, minimum=0, below=1)
    """in training, multiply each input of routers by a random number between 1 - eps and 1 + eps,
    which follows from seed, iteration and rank, so another layout has others"""

    moe_expert_capacity_factor: float | None = _moe(None, above=0)
    """capacity of each expert in training and validation: this many times an equal share of a
    micro-batch's tokens; what exceeds it is dropped (default: no token is dropped)"""

    moe_token_drop_policy: Literal["probs", "position"] = arg(
        "probs", needs="moe_expert_capacity_factor"
    )
    """with --moe-expert-capacity-factor: an expert computes the tokens with its largest
    probabilities (probs) or the first ones (position)"""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = arg(
        "allgather", needs="expert_model_parallel_size"
    )
    """expert parallelism: send all tokens to all expert-parallel ranks (allgather), or each to
    those that have its experts (alltoall; flex is read as alltoall)"""

    moe_aux_loss_coeff: tuple[float, ...] = arg((0.0,), needs=["num_experts", _BALANCING_LOSS])
    """coefficient of each load-balancing loss of MoE layers, e.g. 1e-2 (default: 0.0)"""

    moe_z_loss_coeff: float | None = _moe(None, minimum=0)
    """coefficient of the z-loss of router logits, e.g. 1e-3"""

    moe_per_layer_logging: bool = _moe(False)
    """log the losses, the entropy and the largest load of the router of each MoE layer to
    TensorBoard, Weights & Biases and --metrics-file"""

    @property
    def sends_to_experts(self) -> bool:
        """With expert parallelism, goes each token to the ranks of its experts alone?"""
        return self.moe_token_dispatcher_type != "allgather"

    @property
    def experts(self) -> int:
        """Experts of an MoE layer; 0 in a dense model."""
        return self.num_experts or 0

    def is_moe_layer(self, layer: int) -> bool:
        """Has the layer of this (global) number experts?"""
        if self.num_experts is None:
            return False
        if self.moe_layer_freq.isdecimal():
            return layer % int(self.moe_layer_freq) == 0
        return parse_layer_pattern(self.moe_layer_freq)[layer]

    @property
    def balancing_losses(self) -> dict[str, float]:
        """Coefficients of the load-balancing losses that are trained on, by type."""
        types = self.moe_router_load_balancing_type
        pairs = zip(types, self.moe_aux_loss_coeff, strict=False)
        return {kind: coeff for kind, coeff in pairs if coeff and kind in BALANCING_LOSSES}

    @property
    def sinkhorn(self) -> bool:
        """Are experts selected by Sinkhorn's algorithm in training?"""
        return self.moe_router_load_balancing_type == ("sinkhorn",)

    @property
    def router_probabilities(self) -> str:
        """The function from router logits to the probabilities of the selected experts, without
        their scaling factor; in evaluation, where Sinkhorn's algorithm does not select."""
        if self.sinkhorn and self.moe_router_topk == 1:
            return "sigmoid"
        if self.moe_router_score_function != "softmax":
            usual = self.moe_router_topk > 1
            scale = "normalized" if self.normalizes_scores else "not normalized"
            return self.moe_router_score_function + (
                "" if self.normalizes_scores == usual else f", {scale}"
            )
        everyone = self.sinkhorn or self.moe_router_pre_softmax
        return f"softmax over {'all' if everyone else 'the selected'} experts"

    @property
    def router_scale(self) -> float:
        """Factor on the probabilities of the selected experts."""
        return self.moe_router_topk_scaling_factor or 1.0

    @property
    def normalizes_scores(self) -> bool:
        """Do scores other than softmax of the selected experts sum to 1?"""
        choice = self.moe_router_normalization
        return self.moe_router_topk > 1 if choice == "auto" else choice == "always"

    @property
    def group_score_topk(self) -> int | None:
        """How many experts' scores are a group's; None without groups."""
        chosen = self.moe_router_group_topk
        if not (self.moe_router_num_groups and chosen):
            return None
        return self.moe_router_group_score_topk or self.moe_router_topk // chosen

    @property
    def router_losses(self) -> dict[str, float]:
        """Coefficients of all losses of routers that are trained on, by their names in the log."""
        losses = {BALANCING_LOSSES[kind]: coeff for kind, coeff in self.balancing_losses.items()}
        return losses | ({"z_loss": self.moe_z_loss_coeff} if self.moe_z_loss_coeff else {})


def parse_layer_pattern(text: str) -> list[bool]:
    """Layer by layer, does the pattern select it? `text` is a sum of lists of 0 and 1, each, and
    each sum in parentheses, perhaps times a number: "([1]*3+[0]*1)*3". Raises ValueError."""
    text = f"({text.replace(' ', '')})"
    while group := re.search(r"\(([^()]*)\)(?:\*(\d{1,5}))?", text):
        digits = "".join(map(_digits, group[1].split("+"))) * int(group[2] or 1)
        if len(digits) >= 100_000:
            raise ValueError(f"{len(digits)} layers are too many")
        text = f"{text[: group.start()]}[{','.join(digits)}]{text[group.end() :]}"
    return [digit == "1" for digit in _digits(text)]


def _digits(term: str) -> str:
    match = re.fullmatch(r"\[((?:[01](?:,[01])*)?)\](?:\*(\d{1,5}))?", term)
    if match is None:
        raise ValueError(f"{term!r} is not a list of 0 and 1 such as [1] or [0,1]*4")
    return match[1].replace(",", "") * int(match[2] or 1)
