"""How the work is split over ranks and how they talk. Knows no torch and no model."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is split over ranks."""
    tensor_model_parallel_size: int = arg(1, help="ranks one layer is split over: attention by heads, the "
                                                    "MLP by width, the vocabulary by rows")
    pipeline_model_parallel_size: int = arg(1, help="stages the depth is split over (only 1 in this version)")
    context_parallel_size: int = arg(1, help="ranks one sequence is split over, each with an early and a late part")
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = arg(
        "p2p", dump=False, help="how keys and values reach the queries of the other context-parallel ranks: p2p (round a "
                                "ring, in parts) or all_gather (all at once); the others are not supported")
    expert_model_parallel_size: int = arg(1, help="ranks the experts are split over (only 1 in this version)")
    sequence_parallel: bool = arg(False, help="split norms and dropout, by position, over the "
                                               "tensor-parallel ranks too; off while there is only one")
    use_distributed_optimizer: bool = arg(False, help="each data-parallel rank keeps its part of the optimizer "
                                                       "state (not in this version)")
    overlap_grad_reduce: bool = arg(False, help="reduce gradient buckets while the backward pass runs (not in "
                                                 "this version)")
    overlap_param_gather: bool = arg(False, help="gather weights while the forward pass runs (not in this "
                                                  "version)")
    ddp_bucket_size: int | None = arg(None, dump=False, help="elements of a gradient bucket (no effect in this "
                                                              "version)")
    distributed_backend: Literal["nccl", "gloo"] | None = arg(None, help="process group backend; without it nccl "
                                                                         "on CUDA and gloo on CPU")
    distributed_timeout_minutes: int = arg(10, help="minutes a collective may wait")
    local_rank: int | None = arg(None, help="rank on this node, given by the launcher", alias=("--local_rank",))
