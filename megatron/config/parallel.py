"""How the work is split over ranks and how they talk. Knows no torch and no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is split over ranks."""

    tensor_model_parallel_size: int = arg(
        1,
        help="ranks one layer is split over: attention by heads, the "
        "MLP by width, the vocabulary by rows",
    )
    pipeline_model_parallel_size: int = arg(
        1, help="stages the depth is split over, as evenly as can be"
    )
    num_layers_per_virtual_pipeline_stage: int | None = arg(
        None,
        help="layers of a virtual stage: a rank has several "
        "that are not neighbours, which shortens idle time",
    )
    num_virtual_stages_per_pipeline_rank: int | None = arg(
        None, dump=False, help="the same by their number on a rank"
    )
    decoder_first_pipeline_num_layers: int | None = arg(
        None, dump=False, help="layers of the first stage, where it has others than the rest"
    )
    decoder_last_pipeline_num_layers: int | None = arg(
        None, dump=False, help="layers of the last stage, likewise"
    )
    use_tp_pp_dp_mapping: bool = arg(
        False,
        dump=False,
        help="number ranks in the order tensor, context, pipeline, data, so that the stages of one "
        "replica are neighbours; without it tensor, context, data, pipeline",
    )
    overlap_p2p_comm: bool = arg(
        True,
        off="--no-overlap-p2p-communication",
        help="wait for each transfer between stages where it starts, not where its tensor is used",
    )
    context_parallel_size: int = arg(
        1, help="ranks one sequence is split over, each with an early and a late part"
    )
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = arg(
        "p2p",
        dump=False,
        help="how keys and values reach the queries of the other context-parallel ranks: p2p "
        "(round a ring, in parts) or all_gather (all at once); the others are not supported",
    )
    expert_model_parallel_size: int = arg(
        1, help="ranks the experts are split over (only 1 in this version)"
    )
    sequence_parallel: bool = arg(
        False,
        help="split norms and dropout, by position, over the "
        "tensor-parallel ranks too; off while there is only one",
    )
    use_distributed_optimizer: bool = arg(
        False,
        help="each data-parallel rank keeps and updates only its part of main "
        "weights and optimizer state (ZeRO stage 1)",
    )
    num_distributed_optimizer_instances: int = arg(
        1,
        dump=False,
        help="copies of the optimizer state, each shared by as many data-parallel ranks",
    )
    zero_partition: Literal["even", "whole-params"] = arg(
        "even",
        dump=False,
        help="which part of them: even, or whole-params, as InternLM gives out whole parameters",
    )
    overlap_grad_reduce: bool = arg(
        False, help="sum gradient buckets over ranks while the backward pass runs"
    )
    overlap_param_gather: bool = arg(
        False,
        help="gather weights while the next forward pass runs, with "
        "--use-distributed-optimizer and --overlap-grad-reduce",
    )
    ddp_bucket_size: int | None = arg(
        None,
        dump=False,
        help="elements of a gradient bucket (default: one million a data-parallel rank, at least "
        "40 million; without overlap and distributed optimizer all in one)",
    )
    ddp_num_buckets: int | None = arg(
        None, dump=False, help="number of gradient buckets, about, instead of their size"
    )
    distributed_backend: Literal["nccl", "gloo"] | None = arg(
        None, help="process group backend; without it nccl on CUDA and gloo on CPU"
    )
    distributed_timeout_minutes: int = arg(10, help="minutes a collective may wait")
    local_rank: int | None = arg(
        None, help="rank on this node, given by the launcher", alias=("--local_rank",)
    )
