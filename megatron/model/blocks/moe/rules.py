"""Rules of mixture-of-experts models."""

import math
from collections.abc import Iterator

from megatron.config.checks.ddp import data_ranks
from megatron.model.blocks.block import Rules


def rule(f: Rules) -> Iterator[str]:
    """One line for each thing about experts that cannot be."""
    yield from _expert_parallel(f)
    yield from _router(f)
    yield from _balance(f)
    yield from _sinkhorn(f)
    yield from _groups(f)
    yield from _widths(f)
    for name, off, remedy in (
        ("xielu", False, "use another activation function"),
        ("init_method_xavier_uniform", False, "use --init-method-std"),
        ("init_scheme", "megatron", "use --init-scheme megatron"),
        ("zero_partition", "even", "use --zero-partition even"),
    ):
        if f[name] != off:
            yield (
                f"{f.say(name)}: not supported with --num-experts; {remedy} "
                "[not-supported-with-experts]"
            )


def _expert_parallel(f: Rules) -> Iterator[str]:
    """Experts, and the ranks of a pipeline stage, must be multiples of EP and of EP x ETP."""
    p = f.config.parallel
    ep = p.expert_model_parallel_size
    etp = p.expert_tensor_parallel
    flag = f.say("expert_model_parallel_size")
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    if not f.ok("expert_model_parallel_size", *names) or not p.folds_experts:
        return
    if f["expert_tensor_parallel_size"] is not None:
        if not f.ok("expert_tensor_parallel_size"):
            return
        if ep == 1 or etp != p.tensor_model_parallel_size:
            flag = f.say("expert_tensor_parallel_size")
    if f.ok("num_experts") and f["num_experts"] % ep:
        yield (
            f"{f.say('expert_model_parallel_size')}: {f.say('num_experts')} is not a multiple of "
            "it; use a divisor [expert-parallel-does-not-divide-experts]"
        )
    if etp != p.tensor_model_parallel_size > 1 and not p.sequence_parallel:
        yield (
            f"{flag}: differs from {f.say('tensor_model_parallel_size')}, whose ranks have the "
            "same tokens; add --sequence-parallel [expert-tensor-parallel-needs-sequence-parallel]"
        )
    ranks = data_ranks(p, f.world_size) * p.tensor_model_parallel_size
    instances = 1
    if p.shares_optimizer and f.ok("num_distributed_optimizer_instances"):
        instances = f["num_distributed_optimizer_instances"]
    if ranks % (p.expert_ranks * instances):
        instance = f" in each of {instances} optimizer instances" if instances > 1 else ""
        yield (
            f"{flag}: the {ranks // instances} ranks of a pipeline stage{instance} are not a "
            f"multiple of expert-parallel x expert-tensor-parallel size {ep} x {etp}; use a "
            "divisor, or more ranks [expert-parallel-does-not-divide-ranks]"
        )


def _router(f: Rules) -> Iterator[str]:
    topk = f["moe_router_topk"]
    if f.ok("num_experts", "moe_router_topk") and topk > f["num_experts"]:
        yield (
            f"{f.say('moe_router_topk')}: there are only {f['num_experts']} experts "
            "(--num-experts); use at most that [router-topk-above-num-experts]"
        )
    if topk == 1 and f["moe_router_score_function"] == "softmax":
        if not f["moe_router_pre_softmax"] and not f.config.model.sinkhorn:
            yield (
                "--moe-router-topk 1: the softmax over one selected expert is always 1, and the "
                "router would not learn; add --moe-router-pre-softmax [router-does-not-learn]"
            )
    elif topk == 1 and f.config.model.normalizes_scores:
        yield (
            f"{f.say('moe_router_normalization')}: with --moe-router-topk 1 the probability is "
            "always 1, and the router would not learn; omit it [router-does-not-learn]"
        )


def _balance(f: Rules) -> Iterator[str]:
    """Each type once, with a coefficient of its own; none stands alone."""
    types = f["moe_router_load_balancing_type"]
    coeffs = f["moe_aux_loss_coeff"]
    alone = {"none", "sinkhorn"} & set(types)
    if len(set(types)) < len(types) or (alone and len(types) > 1):
        yield (
            f"{f.say('moe_router_load_balancing_type')}: give each type once, and none or sinkhorn "
            "alone [balancing-types-wrong]"
        )
    elif any(coeffs) and len(coeffs) != len(types):
        yield (
            f"{f.say('moe_aux_loss_coeff')}: {len(coeffs)} given, {len(types)} types in "
            f"{f.say('moe_router_load_balancing_type')}; give one coefficient for each type "
            "[balancing-types-wrong]"
        )
    if not all(0 <= coeff < math.inf for coeff in coeffs):
        yield f"{f.say('moe_aux_loss_coeff')}: must not be negative [value-out-of-range]"


def _sinkhorn(f: Rules) -> Iterator[str]:
    """It has a selection and probabilities of its own."""
    if not f.config.model.sinkhorn:
        return
    for name, off in (
        ("moe_router_score_function", "softmax"),
        ("moe_router_pre_softmax", False),
        ("moe_router_topk_scaling_factor", None),
        ("moe_router_num_groups", None),
        ("moe_router_enable_expert_bias", False),
    ):
        if f[name] != off:
            yield (
                f"{f.say(name)}: has no effect on the selection by sinkhorn "
                "(--moe-router-load-balancing-type); omit one of the two "
                "[flags-exclude-each-other]"
            )


def _groups(f: Rules) -> Iterator[str]:
    groups = f["moe_router_num_groups"]
    chosen = f["moe_router_group_topk"]
    if (groups is None) != (chosen is None):
        name = "moe_router_group_topk" if groups is None else "moe_router_num_groups"
        missing_flag = "--moe-router-num-groups" if groups is None else "--moe-router-group-topk"
        yield f"{f.say(name)}: needs {missing_flag}; give both or none [flag-needs-other-flag]"
    names = ("num_experts", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk")
    if not f.ok(*names):
        return
    experts, topk = f["num_experts"], f["moe_router_topk"]
    of_group = f["moe_router_group_score_topk"]
    if of_group is not None and groups <= experts and of_group > experts // groups:
        yield (
            f"{f.say('moe_router_group_score_topk')}: a group has {experts // groups} experts "
            f"({f.say('num_experts')}, {f.say('moe_router_num_groups')}); use at most that "
            "[router-groups-do-not-fit]"
        )
    uneven = of_group is None and topk % chosen
    if experts % groups or uneven or chosen > groups or topk > chosen * (experts // groups):
        yield (
            f"{f.say('moe_router_num_groups')} and {f.say('moe_router_group_topk')}: "
            f"{f.say('num_experts')} must be a multiple of the groups, {f.say('moe_router_topk')} "
            "one of the groups of a token, and a group must have enough experts; change one of "
            "them [router-groups-do-not-fit]"
        )


def _widths(f: Rules) -> Iterator[str]:
    tp = "tensor_model_parallel_size"
    etp = tp if f["expert_tensor_parallel_size"] is None else "expert_tensor_parallel_size"
    of_experts = "ffn_hidden_size" if f["moe_ffn_hidden_size"] is None else "moe_ffn_hidden_size"
    for name, size in ((of_experts, etp), ("moe_shared_expert_intermediate_size", tp)):
        if f.ok(name, size) and f[name] % f[size]:
            yield (
                f"{f.say(name)}: not a multiple of {f.say(size)}; use "
                f"{(f[name] // f[size] + 1) * f[size]} [tensor-parallel-does-not-divide-experts]"
            )
