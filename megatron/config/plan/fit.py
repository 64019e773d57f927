"""What the fullest rank of a run holds by the plan, and whether that fits. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.plan.costs import activations
from megatron.config.plan.plan import Plan
from megatron.config.plan.state_bytes import bytes_per_rank
from megatron.config.tree import Config

GIB = 2**30
# Of a device's memory, what CUDA, NCCL and fragmentation may take beside the plan's tensors.
SPARE = 0.08


@dataclass(frozen=True)
class RankMemory:
    """Bytes by kind of what a rank of a pipeline stage holds at the peak of a step."""

    stage: int
    kinds: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def largest(self, count: int = 3) -> str:
        """Its largest kinds, as text."""
        kinds = sorted(self.kinds.items(), key=lambda kind: -kind[1])[:count]
        return ", ".join(f"{kind} {gib(size)}" for kind, size in kinds if size)


def fullest(config: Config, plan: Plan) -> RankMemory:
    """The rank that holds most."""
    ranks = []
    for stage in range(len(plan.layers_per_stage)):
        state = bytes_per_rank(config, plan, stage)
        kinds = {
            "weights": state["weights"],
            "gradients": state["gradients"],
            "optimizer": state["main weights"] + state["optimizer moments"] + state["FP8 scales"],
            "whole units": state.get("whole units", 0),
            **{name: state[name] for name in config.other_models},
            "activations": activations(config, plan, stage).total,
        }
        ranks.append(RankMemory(stage, kinds))
    return max(ranks, key=lambda rank: rank.total)


def state_of_a_rank(config: Config, plan: Plan) -> int:
    """Bytes that a rank holds of what a checkpoint has, at most."""
    states = (bytes_per_rank(config, plan, stage) for stage in range(len(plan.layers_per_stage)))
    unsaved = ("gradients", "whole units", *config.other_models)
    return max(sum(size for kind, size in state.items() if kind not in unsaved) for state in states)


def host_copies(config: Config, plan: Plan) -> dict[str, int]:
    """Bytes of copies of the run that a rank keeps in host memory, by the flag that asks for
    them."""
    saved = state_of_a_rank(config, plan)
    return {
        user: count * saved
        for demands in config.demands
        for user, count in demands.host_copies.items()
    }


def verdict(config: Config, plan: Plan, limit: int) -> tuple[bool, str]:
    """Whether a device of `limit` bytes holds the fullest rank, and a line that says so."""
    rank = fullest(config, plan)
    usage = f"the fullest rank (stage {rank.stage}) has {gib(rank.total)} of {gib(limit)}"
    if rank.total > limit:
        return False, f"does not fit: {usage}; largest: {rank.largest()}. {remedy(config)}"
    barely = rank.total > (1 - SPARE) * limit
    return True, (
        f"fits{' barely' * barely}: {usage}, which leaves {gib(limit - rank.total)} for CUDA, NCCL "
        "and fragmentation" + f"; {remedy(config)}" * barely
    )


def remedy(config: Config) -> str:
    """Flags with which a rank holds less: those that cost little speed and are not given, then
    sizes."""
    p = config.parallel
    t = config.training
    cheap = {
        "--use-distributed-optimizer": not p.shares_optimizer,
        "--data-parallel-sharding-strategy optim_grads_params": (
            p.shares_optimizer and not p.shares_weights
        ),
        "--sequence-parallel": not p.sequence_parallel and p.tensor_model_parallel_size > 1,
        "--micro-batch-size 1": t.micro_batch_size > 1,
        "--recompute-granularity full": t.recompute != "full",
    }
    flags = [flag for flag, differs in cheap.items() if differs]
    sizes = ["tensor-model", "pipeline-model", *["expert-model"] * bool(config.model.num_experts)]
    flags += [f"a larger --{name}-parallel-size" for name in sizes]
    return f"less memory: {', '.join(flags)}"


def gib(size: float) -> str:
    """Bytes as text."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"
