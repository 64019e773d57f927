"""A mixture-of-experts layer: router, experts, shared expert, and the losses that balance them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.config.model_flags import ModelFlags
from megatron.config.moe import BALANCING_LOSSES, ROUTER_SUMS
from megatron.kernels.activations import implementations
from megatron.kernels.dropout import jitter, seeded
from megatron.kernels.grouped_linear import (
    Copies,
    Counts,
    add_bias,
    combine,
    dispatch,
    grouped_linear,
    in_one_call,
    weighted_swiglu,
)
from megatron.kernels.kernels import Kernels
from megatron.kernels.linear_implementations import Gemms, ParameterGemms
from megatron.kernels.rows import RowModule
from megatron.model.blocks.mlp.module import MLP
from megatron.model.blocks.module import (
    AddLoss,
    BlockModule,
    LayerInputs,
    Recompute,
    RouterStep,
    Seeds,
)
from megatron.model.blocks.moe.facts import MixtureOfExperts
from megatron.parallel.collectives import (
    all_gather,
    all_reduce_,
    copy_to,
    gather_sequence,
    my_slice,
    reduce_from,
    scatter_sequence,
)
from megatron.parallel.context import ParallelContext
from megatron.parallel.exchange import all_to_all
from megatron.parallel.layers import LinearLayer
from megatron.parallel.recompute import recompute as recomputed
from megatron.parallel.recompute import recompute_input
from megatron.parallel.sharding import Parameter, ParameterFactory
from megatron.parallel.zigzag import chunks_of

if TYPE_CHECKING:
    from megatron.parallel.fp8 import LayerScaling


def random_logits(logits: torch.Tensor, seed: int) -> torch.Tensor:
    """Normal random numbers in the place of logits [n, experts], which get their gradient: a pure
    function of (seed, shape) on a kind of device."""
    noise = torch.empty_like(logits).normal_(generator=seeded(logits.device, seed))
    return noise + (logits - logits.detach())


def top_experts(scores: torch.Tensor, config: ModelFlags) -> torch.Tensor:
    """Numbers [n, topk] of the experts with the largest scores [n, experts]; with groups only of
    those whose best experts together have the largest (DeepSeek-V2 and V3)."""
    k = config.moe_router_topk
    if config.moe_router_num_groups and config.moe_router_group_topk:
        assert config.group_score_topk is not None
        groups = scores.unflatten(1, (config.moe_router_num_groups, -1))
        best = groups.topk(config.group_score_topk).values.sum(-1)
        chosen = best.topk(config.moe_router_group_topk).indices
        not_chosen = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
        scores = groups.masked_fill(not_chosen.unsqueeze(-1), -torch.inf).flatten(1)
    return scores.topk(k).indices


def expert_scores(logits: torch.Tensor, config: ModelFlags) -> torch.Tensor:
    """Scores [n, experts] of router logits, each by itself unless it is a softmax."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    match config.moe_router_score_function:
        case "sigmoid":
            return logits.to(wide).sigmoid()
        case "sqrtsoftplus":
            return nn.functional.softplus(logits.to(wide)).sqrt()
        case _:
            return logits.softmax(-1, dtype=wide)


def select_experts(
    logits: torch.Tensor, config: ModelFlags, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [n, experts] -> (probabilities, numbers) [n, topk] of the selected experts.
    `bias` [experts] is added to scores for the selection alone."""
    after = config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax
    scores = logits if after and bias is None else expert_scores(logits, config)
    experts = top_experts(scores if bias is None else scores + bias, config)
    if after:
        wide = torch.promote_types(logits.dtype, torch.float32)
        probs = logits.gather(1, experts).softmax(-1, dtype=wide)
    else:
        probs = scores.gather(1, experts)
        if config.moe_router_score_function != "softmax" and config.normalizes_scores:
            probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    return probs * config.router_scale, experts


def within_capacity(scores: torch.Tensor, capacity: int, policy: str) -> torch.Tensor:
    """Which of the tokens [n, experts] that selected an expert it computes, at most `capacity`:
    those with the largest scores (policy `probs`), or the first ones (`position`). `scores` are
    negative where an expert is not selected."""
    selected = scores >= 0
    if policy == "position":
        return selected & (selected.cumsum(0) <= capacity)
    best = scores.argsort(dim=0, descending=True, stable=True)[:capacity]
    return selected & torch.zeros_like(selected).scatter(0, best, True)


def sinkhorn(logits: torch.Tensor, tolerance: float = 1e-4) -> torch.Tensor:
    """exp(logits) [n, experts], with rows and columns scaled until all rows have equal sums, and
    all columns (Sinkhorn and Knopp 1967)."""
    cost = logits.to(torch.promote_types(logits.dtype, torch.float32)).exp()
    n, experts = cost.shape
    columns = cost.new_ones(experts)
    change = math.inf
    while change > tolerance:
        rows = 1 / (n * ((cost * columns).sum(1) + 1e-8))
        before = columns
        columns = 1 / (experts * ((cost * rows.unsqueeze(1)).sum(0) + 1e-8))
        change = float((columns - before).abs().mean())
    return cost * columns * rows.unsqueeze(1)


def balancing_scores(logits: torch.Tensor, config: ModelFlags) -> torch.Tensor:
    """Scores [n, experts] that sum to 1, of which the load-balancing loss is made."""
    scores = expert_scores(logits, config)
    if config.moe_router_score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores


class Router(nn.Module):
    """Selects the experts of each token (Shazeer et al. 2017): weight [experts, h], bias [experts]
    or none.

    Losses: load balancing (Fedus et al. 2021, Switch Transformer) over the tokens of a micro-batch,
    wherever they are, of each sequence, or (Qiu et al. 2025) of the iteration so far, and the
    z-loss of the logits (Zoph et al. 2022, ST-MoE).
    """

    def __init__(self, config: ModelFlags, params: ParameterFactory, ctx: ParallelContext, n: int):
        super().__init__()
        self.config = config
        self.number = n
        self.weight = params("weight")
        self.bias = params.optional("bias")
        self.expert_bias = params.optional("expert_bias")
        self.dtype = {"fp32": torch.float32, "fp64": torch.float64, None: self.weight.dtype}[
            config.moe_router_dtype
        ]
        # neither groups nor a bias nor Sinkhorn's algorithm selects others
        self.selects_largest = not (
            config.moe_router_num_groups or self.expert_bias is not None or config.sinkhorn
        )
        # the ranks that have other tokens of the same samples
        self.axes = (ctx.cp, ctx.tp) if ctx.sequence_parallel else (ctx.cp,)
        self.capacity_factor = config.moe_expert_capacity_factor or 0.0
        self.cp = ctx.cp
        self.data = ctx.dp
        self.tp_part = ctx.tp.rank if ctx.sequence_parallel else 0
        self.split = ctx.tp if ctx.sequence_parallel else None

    def forward(
        self, x: torch.Tensor, step: RouterStep | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [s, b, h] -> (probabilities, numbers) [s b, topk] of the experts of each token. What
        exceeds the capacity of an expert has the number `num_experts`; without a step nothing
        does, so that no sequence depends on the others of its batch."""
        sequences = x.shape[1]
        training = step is not None and step.loss_scale is not None
        if self.config.moe_input_jitter_eps and step is not None and step.seeds is not None:
            seed = step.seeds.seed(self.number, "router_input", self.tp_part)
            x = jitter(x, self.config.moe_input_jitter_eps, seed)
        dtype = torch.promote_types(self.dtype, x.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = nn.functional.linear(x.flatten(0, 1).to(dtype), self.weight.to(dtype), bias)
        if self.config.moe_router_force_load_balancing and step is not None and step.seeds:
            logits = random_logits(logits, step.seeds.seed(self.number, "router", self.tp_part))
        if self.config.sinkhorn:
            probs, experts = self.balance(logits, sequences, training)
        else:
            probs, experts = select_experts(logits, self.config, self.expert_bias)
        selected = experts
        if self.capacity_factor and step is not None:
            experts = self.drop(probs.detach(), experts, sequences)
        if step is not None and training:
            probs = self.add_losses(probs, logits, selected, experts, step, sequences)
        return probs, experts

    def drop(self, probs: torch.Tensor, experts: torch.Tensor, sequences: int) -> torch.Tensor:
        """`experts` [s b, topk] within the capacity, which is one of the tokens of a micro-batch,
        wherever they are; `num_experts` where a token is dropped."""
        m = self.config
        scores = probs.new_full((len(probs), m.experts), -1.0).scatter(1, experts, probs)
        scores, own_rows = self.gather(scores, sequences)
        share = len(scores) * m.moe_router_topk / m.experts
        capacity = math.ceil(share * self.capacity_factor)
        within = within_capacity(scores, capacity, m.moe_token_drop_policy)
        return experts.where(within[own_rows].gather(1, experts), m.experts)

    def balance(
        self, logits: torch.Tensor, sequences: int, training: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `select_experts`, in training by Sinkhorn's algorithm over the tokens of a
        micro-batch, wherever they are."""
        k = self.config.moe_router_topk
        wide = torch.promote_types(logits.dtype, torch.float32)
        scores = logits.to(wide).sigmoid() if k == 1 else logits.softmax(-1, dtype=wide)
        if training:
            all_logits, own_rows = self.gather(logits.detach().to(wide), sequences)
            experts = sinkhorn(all_logits)[own_rows].topk(k).indices
        else:
            experts = scores.topk(k).indices
        return scores.gather(1, experts), experts

    def gather(self, scores: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(`scores` [s b, experts] of all tokens of the micro-batch, by position and sequence;
        numbers of the rows [s b] that are this rank's)."""
        for axis in reversed(self.axes):  # tp, then cp
            scores = all_gather(scores, axis)
        order = torch.arange(len(scores), device=scores.device).view(-1, sequences)
        ranks = self.cp.size
        chunks = [order] if ranks == 1 else [chunks_of(order, i, ranks, 0) for i in range(ranks)]
        rows = torch.cat(chunks).flatten()
        own_rows = chunks[self.cp.rank]
        own_rows = (own_rows if self.split is None else my_slice(own_rows, self.split)).flatten()
        return scores[rows.argsort()], own_rows

    def add_losses(
        self,
        probs: torch.Tensor,
        logits: torch.Tensor,
        selected: torch.Tensor,
        experts: torch.Tensor,
        step: RouterStep,
        sequences: int,
    ) -> torch.Tensor:
        """`probs`, with the router's losses in their graph. `experts`: what is left of `selected`
        within the capacity."""
        assert step.loss_scale is not None, "an evaluation adds no losses"
        mask = None if step.loss_mask is None else self.mask(step.loss_mask)
        m = self.config
        losses = {}
        if m.balancing_losses:
            scores = balancing_scores(logits, m)
            if not self.selects_largest:
                selected = scores.topk(m.moe_router_topk).indices
        for kind in m.balancing_losses:
            groups = sequences if kind == "seq_aux_loss" else 1
            so_far = step if kind == "global_aux_loss" else None
            loss = self.balancing_loss(scores, selected, mask, groups, so_far)
            losses[BALANCING_LOSSES[kind]] = loss
        if m.moe_z_loss_coeff:
            losses["z_loss"] = z_loss(logits, mask)
        for name, coeff in m.router_losses.items():
            probs = AddLoss.apply(probs, losses[name], coeff * step.loss_scale)
        if m.moe_per_layer_logging:
            losses["router_entropy"] = entropy(balancing_scores(logits.detach(), m), mask)
        zero = logits.new_zeros(())
        sums = torch.stack([losses.get(name, zero).detach().double() for name in ROUTER_SUMS])
        step.sums[self.number] = torch.cat((sums, count(experts, m.experts, mask)))
        return probs

    def balancing_loss(
        self,
        scores: torch.Tensor,
        selected: torch.Tensor,
        mask: torch.Tensor | None,
        groups: int = 1,
        so_far: RouterStep | None = None,
    ) -> torch.Tensor:
        """Number of experts x (share of the selections that each expert has) . (sum of its scores
        over tokens): Megatron's loss times the number of tokens. `selected` [s b, topk] have the
        largest scores. Tokens [s b] are in `groups`
        groups, token i in group i modulo groups, each with shares of its own. With `so_far` the
        shares are those of all data-parallel ranks and earlier micro-batches too."""
        experts = scores.shape[1]
        if mask is not None:
            scores = scores * mask.unsqueeze(-1)
        group = torch.arange(len(scores), device=scores.device).unsqueeze(1) % groups
        counts = count(selected + experts * group, groups * experts, mask).to(scores.dtype)
        for axis in (*self.axes, self.data) if so_far else self.axes:
            all_reduce_(counts, axis)
        if so_far:
            counts = so_far.add_earlier(self.number, counts)
        share = counts * groups / counts.sum().clamp(min=1)
        return experts * (share * scores.view(-1, groups * experts).sum(0)).sum()

    def mask(self, loss_mask: torch.Tensor) -> torch.Tensor:
        """Which of this rank's tokens train, [s b]."""
        mask = loss_mask.t()
        return (mask if self.split is None else my_slice(mask, self.split)).flatten()


def count(experts: torch.Tensor, size: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """How often each number below `size` is in experts [n, topk], of rows that `mask` [n] has;
    `size` itself, of dropped tokens, is not counted."""
    ones = torch.ones(experts.shape, dtype=torch.float64, device=experts.device)
    if mask is not None:
        ones = ones * mask.unsqueeze(-1)
    return ones.new_zeros(size + 1).index_add_(0, experts.flatten(), ones.flatten())[:size]


def z_loss(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Sum over tokens of the squared logarithm of the softmax's denominator."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square()
    return (z if mask is None else z * mask).sum()


def entropy(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Sum over tokens of the entropy of their scores [n, experts], in nats."""
    values = torch.special.entr(scores).sum(-1)
    return (values if mask is None else values * mask).sum()


class ExpertGemms(ParameterGemms):
    """Those in the parameter dtype, of all experts at once."""

    grouped_linear = staticmethod(grouped_linear)


class GroupedLinear(LinearLayer):
    """A linear layer of every expert: weight [experts, out, in] or, gated, [experts, 2, out, in]
    (gate first); bias [experts, (2,) out], which `Experts` adds."""

    weight: Parameter
    gemms = ExpertGemms

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None = None,
        scaling: LayerScaling | None = None,
        kernels: Kernels = Kernels(),
    ):
        super().__init__(weight, scaling, kernels)
        self.bias = bias
        # of most models with experts nearly all memory: zeros are not worth a pass over it
        self.weight.overwrites = self.accumulate and self.scaling is None
        self.in_one_call = self.scaling is None and in_one_call(weight)

    def is_first(self) -> bool:
        """To be asked for each gradient: does it replace what is in `main_grad`?"""
        stale = getattr(self.weight, "is_stale", False)
        self.weight.is_stale = False
        return stale

    def compute(
        self,
        gemms: Gemms,
        x: torch.Tensor,
        counts: Counts,
        of: Copies | None = None,
        to: Copies | None = None,
    ) -> torch.Tensor:
        """x [n, in], sorted by expert, of which each has so many rows (as `grouped_linear`'s) ->
        [n, out] or [n, 2 out]. `of`: x has the tokens whose copies the rows are; `to`: the results
        of a token are added up."""
        weight = self.weight.flatten(1, -2)
        main_grad = getattr(self.weight, "main_grad", None) if self.accumulate else None
        if main_grad is not None:
            main_grad = main_grad.flatten(1, -2)
        return gemms.grouped_linear(x, weight, counts, main_grad, self.is_first, of=of, to=to)


class Experts(RowModule):
    """The MLPs of all experts, each split over etp as a dense one is over tp; where there are
    biases, linear_fc1's [experts, (2,) ffn] is split alike."""

    activation: Callable[..., torch.Tensor]

    linear_fc1: GroupedLinear
    linear_fc2: GroupedLinear

    def __init__(
        self,
        config: ModelFlags,
        params: ParameterFactory,
        kernels: Kernels,
        recompute_activation: bool,
        etp: int,
    ):
        super().__init__()
        self.config = config
        self.etp = etp
        self.recompute_activation = recompute_activation
        self.fused_swiglu = kernels.fused_swiglu
        for name in ("linear_fc1", "linear_fc2"):
            scaling = params.scaling(name, experts=True)
            weight, bias = params(f"{name}.weight"), params.optional(f"{name}.bias")
            self.add_module(name, GroupedLinear(weight, bias, scaling, kernels))
        rows, numbers = implementations(config)
        spec = kernels.activation(config.activation, self.linear_fc1.weight)
        self.choose("activation", rows, spec, **numbers)

    @property
    def in_one_call(self) -> bool:
        """Are all experts one GEMM, which reads on the device how many rows each has?"""
        return self.linear_fc1.in_one_call and self.linear_fc2.in_one_call

    def forward(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        copies: Copies,
        counts: Counts,
    ) -> torch.Tensor:
        """Tokens x [n, h], their copies, sorted by expert, of which each has so many (as
        `grouped_linear`'s), with probabilities -> this rank's part of the sums of the results of
        each token's copies, [n, h]."""
        x = self.linear_fc1(x, counts, copies)
        if self.linear_fc1.bias is not None:
            x = add_bias(x, self.linear_fc1.bias.flatten(1), counts)

        def fc2(x: torch.Tensor) -> torch.Tensor:
            bias = self.linear_fc2.bias
            if bias is None:
                return self.linear_fc2(x, counts, None, copies)
            y = self.linear_fc2(x, counts)
            # the results of the expert-tensor-parallel ranks are added up
            return combine(add_bias(y, bias, counts, probs / self.etp), copies)

        if self.recompute_activation and torch.is_grad_enabled():
            return recompute_input(fc2, self.activate, x, probs)
        return fc2(self.activate(x, probs))

    def activate(self, x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Activation function, times the probabilities."""
        if self.config.activation == "swiglu" and not self.config.changed_glu:
            x = x.unflatten(-1, (2, -1))
            return weighted_swiglu(x, probs, self.fused_swiglu, self.activation)
        x = self.activation(x.unflatten(-1, (2, -1)) if self.config.gated else x)
        return (x * probs.unsqueeze(-1)).to(x.dtype)


class SharedExpert(MLP):
    """An MLP that computes every token; gate_weight [1, h], if there is one, scales its output."""

    def __init__(self, facts: MixtureOfExperts, params: ParameterFactory, **parts: Any):
        super().__init__(facts, params, **parts)
        self.gate_weight = params.optional("gate_weight")

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, h] -> [s, b, h]."""
        y = super().compute(x)
        if self.gate_weight is None:
            return y
        return y * nn.functional.linear(x, self.gate_weight).sigmoid()


class MoELayer(BlockModule):
    """The experts that the router selects for a token, weighted by its probabilities, plus the
    shared expert. Without a capacity, or without a step, no token is dropped.

    Experts are split over ep and, as dense MLPs are over tp, over etp. All tokens of an
    expert-tensor-parallel group go to each of its ranks. From there either copies of tokens go to
    the ranks that have their experts (all-to-all), or all tokens to all ranks (all-gather).
    """

    def __init__(
        self,
        facts: MixtureOfExperts,
        params: ParameterFactory,
        ctx: ParallelContext,
        number: int,
        kernels: Kernels,
        recompute: Recompute,
    ):
        super().__init__()
        config = facts.model
        self.ctx = ctx
        self.recompute_shared = recompute.includes("shared_experts")
        self.own_tokens = ctx.sequence_parallel or ctx.tp.size == 1
        self.topk = config.moe_router_topk
        self.num_experts = config.experts
        self.exchange = config.sends_to_experts and ctx.ep.size > 1
        self.router = Router(config, params.scope("router"), ctx, number)
        self.experts = Experts(
            config,
            params.scope("experts"),
            kernels,
            recompute.includes("moe_act"),
            ctx.etp.size,
        )
        self.shared_experts = (
            SharedExpert(
                facts,
                params.scope("shared_experts"),
                ctx=ctx,
                number=number,
                kernels=kernels,
                recompute=recompute,
            )
            if facts.shared
            else None
        )

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """x [s, b, h] ([s/tp, b, h] with sequence parallelism) -> the same shape."""
        y = self.selected(x, inputs.router_step)
        if self.shared_experts is None:
            return y
        compute = self.shared_experts.compute
        again = self.recompute_shared and torch.is_grad_enabled()
        return y + (recomputed(compute, x) if again else compute(x))

    def selected(self, x: torch.Tensor, step: RouterStep | None) -> torch.Tensor:
        """What the experts of each token add to it: x [s, b, h] -> the same shape."""
        return self.route(x.flatten(0, 1), *self.router(x, step)).view(x.shape)

    def outside_graph(self) -> list[tuple[nn.Module, str]]:
        """How many rows an expert has changes every step."""
        return [(self, "selected")]

    def route(self, x: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Tokens [n, h], with probabilities and numbers [n, topk] of their experts -> [n, h]."""
        etp = self.ctx.etp
        compute = self.by_all_to_all if self.exchange else self.by_all_gather
        if self.own_tokens:
            x = gather_sequence(x, etp)
            probs = gather_sequence(probs, etp)
            return scatter_sequence(compute(x, probs, all_gather(experts, etp)), etp)
        tp = self.ctx.tp  # etp has the same ranks
        return reduce_from(compute(copy_to(x, tp), copy_to(probs, tp), experts), tp)

    def by_all_gather(
        self, x: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Every rank computes, of all tokens of ep, the copies for its own experts."""
        ep = self.ctx.ep
        x = gather_sequence(x, ep)
        probs = gather_sequence(probs, ep)
        order, counts = self.sort(all_gather(experts, ep))
        if ep.size == 1:
            return self.compute(x, probs, order, self.topk, counts)
        on_host = counts.tolist()
        local = len(on_host) // ep.size
        own = slice(ep.rank * local, (ep.rank + 1) * local)
        first = sum(on_host[: own.start])
        order = order[first : first + sum(on_host[own])]
        y = self.compute(x, probs, order, self.topk, counts[own], on_host[own])
        return scatter_sequence(y, ep)

    def by_all_to_all(
        self, x: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """A rank gets the copies for its own experts and sends the results back."""
        ep = self.ctx.ep
        order, counts = self.sort(experts)
        # Of every rank, how many of its copies each expert gets: [source, owner of expert, its
        # experts]. On the host too, since all_to_all needs lengths; this is the layer's one wait.
        counts = all_gather(counts.unsqueeze(0), ep)
        by_rank, on_host = (t.view(ep.size, ep.size, -1) for t in (counts, counts.cpu()))
        received = by_rank[:, ep.rank]  # [source, expert]
        send = on_host[ep.rank].sum(-1).tolist()
        receive = on_host[:, ep.rank].sum(-1).tolist()
        # Sorted by expert, copies are sorted by owner as well: they leave in this order. What a
        # capacity drops is behind them.
        order = order[: sum(send)]
        copies = Copies.of(order, self.topk, len(x))
        rows = all_to_all(dispatch(x, copies), ep, send, receive)
        weights = dispatch(probs.view(-1, 1), copies.single(order))
        weights = all_to_all(weights, ep, send, receive)
        # What arrives is sorted by source, then by expert; experts want it by expert. The number of
        # each row's expert, sorted stably, is that order.
        local = torch.arange(received.shape[1], device=x.device).repeat(ep.size)
        inner = local.repeat_interleave(received.flatten(), output_size=sum(receive))
        inner = inner.argsort(stable=True)
        of_experts = on_host[:, ep.rank].sum(0).tolist()
        y = self.compute(rows, weights, inner, 1, received.sum(0), of_experts)
        return combine(all_to_all(y, ep, receive, send), copies)

    def sort(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(numbers of the copies [n topk] by expert, last those that are dropped; number of copies
        of each expert). Nothing is read from the device."""
        experts, order = experts.flatten().sort(stable=True)
        bounds = torch.arange(self.num_experts + 1, device=experts.device)
        return order, torch.searchsorted(experts, bounds).diff()

    def compute(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        order: torch.Tensor,
        per_token: int,
        counts: torch.Tensor,
        on_host: list[int] | None = None,
    ) -> torch.Tensor:
        """Sum of the results of the copies `order`, sorted by expert, of tokens x [n, h] with
        probabilities [n, per_token] -> [n, h]. `counts`: how many each expert has, `on_host` where
        the host knows them; what is behind them in `order` is dropped."""
        groups: Counts
        kept = None
        if self.experts.in_one_call and len(order):
            groups = counts.cumsum(0, dtype=torch.int32)
            kept = groups[-1] if self.router.capacity_factor else None
        else:
            groups = counts.tolist() if on_host is None else on_host
            order = order[: sum(groups)]
        copies = Copies.of(order, per_token, len(x), kept)
        weights = dispatch(probs.reshape(-1, 1), copies.single(order)).squeeze(1)
        return self.experts(x, weights, copies, groups)
