"""Flags of parallelism: sizes of the parallel axes, sharding, and overlap of communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.arguments import Needs, arg

# the layers of each chunk of each pipeline stage
Split = tuple[tuple[range, ...], ...]

# the flags that say which layers a stage has
LAYOUT = "--pipeline-model-parallel-layout"
PATTERN = "--hybrid-layer-pattern"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
EMBEDDING = "--account-for-embedding-in-pipeline-split"
LOSS = "--account-for-loss-in-pipeline-split"


def _timeout(phase: str) -> Any:
    """The field of a --hang-timeout-*-seconds."""
    default = "default: 0.9 x --distributed-timeout-minutes; 0: never"
    return arg(None, minimum=0, help=f"as --hang-timeout-seconds, for {phase} ({default})")


_VIRTUAL_STAGES = Needs(
    "virtual pipeline stages (--num-virtual-stages-per-pipeline-rank or a layout)",
    lambda v: (
        v["pipeline_model_parallel_size"] > 1
        and (
            v["num_virtual_stages_per_pipeline_rank"]
            or v["num_layers_per_virtual_pipeline_stage"]
            or v["pipeline_model_parallel_layout"]
        )
    ),
)


_SHARED = Needs(
    "--use-distributed-optimizer",
    lambda v: v["use_distributed_optimizer"] or v["data_parallel_sharding_strategy"] != "no_shard",
)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism."""

    tensor_model_parallel_size: int = arg(1, minimum=1)
    """tensor-parallel size (TP): number of ranks that share each layer (attention split by heads,
    MLP by width, vocabulary by rows)"""

    pipeline_model_parallel_size: int = arg(1, minimum=1)
    """number of pipeline stages (PP)"""

    num_layers_per_virtual_pipeline_stage: int | None = arg(None)
    """layers per virtual pipeline stage (interleaved schedule, reduces the pipeline bubble)"""

    num_virtual_stages_per_pipeline_rank: int | None = arg(None)
    """virtual pipeline stages per rank (interleaved schedule), instead of
    --num-layers-per-virtual-pipeline-stage"""

    decoder_first_pipeline_num_layers: int | None = arg(None)
    """layers of the first pipeline stage, if it differs from the others"""

    decoder_last_pipeline_num_layers: int | None = arg(None)
    """layers of the last pipeline stage, if it differs from the others"""

    use_tp_pp_dp_mapping: bool = arg(False)
    """number ranks in the order tensor, context, pipeline, data, so that the stages of one replica
    are neighbours; without it tensor, context, data, pipeline"""

    pipeline_model_parallel_layout: str | None = arg(None)
    """layers of each (virtual) pipeline stage, as in Et*3|(tt|)*2L: E embedding, t transformer
    layer, L output layer and loss, | between stages, *N repetition"""

    account_for_embedding_in_pipeline_split: bool = arg(False, needs="pipeline_model_parallel_size")
    """count the embedding as a layer when layers are split over pipeline stages (the first stage
    gets one layer less)"""

    account_for_loss_in_pipeline_split: bool = arg(False, needs="pipeline_model_parallel_size")
    """count output layer and loss as a layer when layers are split over pipeline stages (the last
    stage gets one layer less)"""

    microbatch_group_size_per_vp_stage: int | None = arg(
        None,
        needs=_VIRTUAL_STAGES,
        minimum=1,
        flag="--microbatch-group-size-per-virtual-pipeline-stage",
    )
    """interleaved schedule: micro-batches that pass one virtual pipeline stage before the rank
    continues with its next one (default: the number of pipeline stages)"""

    overlap_p2p_comm: bool = arg(
        True, needs="pipeline_model_parallel_size", off="--no-overlap-p2p-communication"
    )
    """do not overlap the transfers between pipeline stages with computation"""

    context_parallel_size: int = arg(1, minimum=1)
    """context-parallel size (CP): number of ranks that share each sequence; each has two chunks of
    it"""

    hierarchical_context_parallel_sizes: tuple[int, ...] | None = arg(
        None,
        needs=Needs("--cp-comm-type a2a+p2p", lambda v: "a2a+p2p" in v["cp_comm_type"]),
        nargs=2,
        minimum=1,
    )
    """--cp-comm-type a2a+p2p: how many neighbouring context-parallel ranks exchange heads, and how
    many such groups form a ring"""

    expert_model_parallel_size: int = arg(1, requires="num_experts", minimum=1)
    """expert-parallel size (EP): number of data- and context-parallel ranks that share the experts
    of each MoE layer"""

    expert_tensor_parallel_size: int | None = arg(None, minimum=1, needs="num_experts")
    """expert-tensor-parallel size (ETP): number of ranks that share each expert by width (default:
    --tensor-model-parallel-size)"""

    sequence_parallel: bool = arg(False, needs="tensor_model_parallel_size")
    """sequence parallelism (SP): split norms and dropout along the sequence over the
    tensor-parallel ranks; disabled with TP 1"""

    use_distributed_optimizer: bool = arg(False)
    """shard master weights and optimizer state over the data-parallel ranks (ZeRO stage 1)"""

    data_parallel_sharding_strategy: Literal[
        "no_shard", "optim", "optim_grads", "optim_grads_params"
    ] = arg("no_shard")
    """what data-parallel ranks share: optim as --use-distributed-optimizer (ZeRO stage 1),
    optim_grads gradients too (stage 2: each micro-batch's are summed layer by layer),
    optim_grads_params weights too (stage 3, FSDP: gathered for the layer that computes); no_shard:
    what --use-distributed-optimizer says"""

    num_distributed_optimizer_instances: int = arg(1, requires=_SHARED, minimum=1)
    """replicas of the sharded optimizer state; each is sharded over data-parallel size / N ranks"""

    zero_partition: Literal["even", "whole-params"] = arg("even", requires=_SHARED)
    """with --use-distributed-optimizer, how the state is sharded: even (equal ranges) or
    whole-params (whole parameters)"""

    overlap_grad_reduce: bool = arg(False)
    """overlap the reduction of gradient buckets with the backward pass"""

    overlap_param_gather: bool = arg(False, requires=[_SHARED, "overlap_grad_reduce"])
    """overlap the all-gather of parameters with the next forward pass; needs
    --use-distributed-optimizer and --overlap-grad-reduce"""

    ddp_reduce_scatter_with_fp32_accumulation: bool = arg(
        False,
        needs=Needs(
            "--use-distributed-optimizer and --zero-partition even",
            lambda v: _SHARED.met(v) and v["zero_partition"] == "even",
        ),
    )
    """with --use-distributed-optimizer, add 16-bit gradients of several ranks in fp32 and round
    once (always so on the CPU)"""

    ddp_bucket_size: int | None = arg(None, minimum=1)
    """elements per gradient bucket (default: 1 million per data-parallel rank, at least 40 million;
    a single bucket without overlap and distributed optimizer)"""

    ddp_num_buckets: int | None = arg(None, excludes=("ddp_bucket_size",), minimum=1)
    """approximate number of gradient buckets, instead of --ddp-bucket-size"""

    distributed_backend: Literal["nccl", "gloo", "xccl", "ccl"] | None = arg(None)
    """process group backend (default: nccl on CUDA, xccl on XPU, gloo on CPU); ccl is xccl"""

    distributed_timeout_minutes: int = arg(10, minimum=1)
    """timeout of collectives, in minutes"""

    hang_timeout_seconds: float | None = arg(None, minimum=0)
    """seconds without progress (a micro-batch) in an iteration, after which the rank that keeps the
    others waiting is named with its stack and the run ends with exit code 4; ten times as many
    while it computes; of one rank alone a warning (0: never, in no phase; default: the larger of 60
    and 4 times the median iteration; never with --torch-compile)"""

    hang_timeout_startup_seconds: float | None = _timeout(
        "start-up: until all ranks have joined, and from then to the first iteration"
    )
    hang_timeout_first_iteration_seconds: float | None = _timeout(
        "the first iteration of a process"
    )
    hang_timeout_evaluation_seconds: float | None = _timeout("an evaluation")
    hang_timeout_save_seconds: float | None = _timeout(
        "saving a checkpoint, where each MiB written is progress, and the time between iterations"
    )
    restart_forkserver: bool = arg(
        False, no_effect="restarted ranks import torch anew, in 2 to 3 seconds"
    )
    """accepted for compatibility: restarted ranks were forked from a process that had torch
    imported"""

    local_rank: int | None = arg(None, per_run=True, alias=("--local_rank",))
    """rank on this node; set by the launcher"""

    @property
    def shares_optimizer(self) -> bool:
        """Do data-parallel ranks share the optimizer's state?"""
        return self.use_distributed_optimizer or self.data_parallel_sharding_strategy != "no_shard"

    @property
    def shares_gradients(self) -> bool:
        """... and gradients?"""
        return self.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")

    @property
    def shares_weights(self) -> bool:
        """... and weights?"""
        return self.data_parallel_sharding_strategy == "optim_grads_params"

    @property
    def splits_layers(self) -> bool:
        """Are there several stages, or flags that say which layers each has?"""
        flags = (
            self.num_layers_per_virtual_pipeline_stage,
            self.num_virtual_stages_per_pipeline_rank,
            self.decoder_first_pipeline_num_layers,
            self.decoder_last_pipeline_num_layers,
            self.pipeline_model_parallel_layout,
            self.account_for_embedding_in_pipeline_split or None,
            self.account_for_loss_in_pipeline_split or None,
        )
        return self.pipeline_model_parallel_size != 1 or set(flags) != {None}

    def split_context(self, comm_type: str) -> tuple[int, int]:
        """Context-parallel ranks that exchange heads, and that form a ring, where a layer has this
        --cp-comm-type."""
        ranks = self.context_parallel_size
        if comm_type == "a2a":
            return ranks, 1
        heads, ring = self.hierarchical_context_parallel_sizes or (1, ranks)
        return (heads, ring) if comm_type == "a2a+p2p" and ranks > 1 else (1, ranks)

    @property
    def expert_tensor_parallel(self) -> int:
        """Ranks that share each expert by width."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold all experts once."""
        return self.expert_model_parallel_size * self.expert_tensor_parallel

    def expert_replicas(self, world_size: int) -> int:
        """Ranks that hold the same experts."""
        return world_size // max(1, self.pipeline_model_parallel_size * self.expert_ranks)

    @property
    def folds_experts(self) -> bool:
        """Do other ranks hold the same experts than hold the same of all other weights?"""
        return self.expert_ranks != self.tensor_model_parallel_size or (
            self.expert_model_parallel_size > 1
        )
