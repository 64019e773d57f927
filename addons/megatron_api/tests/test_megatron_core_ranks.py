"""mpu gives the ranks and groups of megatron-core's parallel_state."""

import pytest
import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.parallel.context import ParallelContext
from megatron.training import is_first_or_last_pipeline_stage, mpu, script_args
from tests.forkrun import run_ranks

pytest.importorskip("megatron.core.parallel_state")
pytestmark = [pytest.mark.peers, pytest.mark.campaign]

RANKS = (
    "tensor_model_parallel",
    "pipeline_model_parallel",
    "data_parallel",
    "context_parallel",
    "expert_model_parallel",
    "expert_tensor_parallel",
    "expert_data_parallel",
)
NAMES = (
    *(f"get_{axis}_{what}" for axis in RANKS for what in ("rank", "world_size", "group")),
    "get_model_parallel_group",
    "get_context_parallel_global_ranks",
    *(f"get_{axis}_src_rank" for axis in ("tensor_model_parallel", "model_parallel")),
    "get_data_parallel_src_rank",
    "get_expert_model_parallel_src_rank",
    *(f"get_pipeline_model_parallel_{which}_rank" for which in ("first", "last", "next", "prev")),
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_initialized",
)
LAYOUTS = {
    "tp2 pp2 dp2": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "tp2 cp2 dp2": dict(tensor_model_parallel_size=2, context_parallel_size=2),
    "pp2 ep2": dict(pipeline_model_parallel_size=2, expert_model_parallel_size=2),
    "tp2 ep2, whole experts": dict(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    ),
}


def shown(source, name: str, **arguments) -> object:
    answer = getattr(source, name)(**arguments)
    return dist.get_process_group_ranks(answer) if name.endswith("_group") else answer


def all_compared(rank: int, world: int) -> dict[str, list]:
    """What differs in each layout."""
    return {name: compared(rank, world, layout) for name, layout in LAYOUTS.items()}


def compared(rank: int, world: int, layout: dict) -> list:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**layout)
    config = ParallelConfig(**layout)
    script_args._run["context"] = ParallelContext(config, world, rank)
    asked = [(name, {}) for name in NAMES]
    for what in ("rank", "world_size", "group", "src_rank"):
        asked.append((f"get_data_parallel_{what}", {"with_context_parallel": True}))
    assert is_first_or_last_pipeline_stage() == (
        mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    )
    return [
        (name, ours, theirs)
        for name, arguments in asked
        if (ours := shown(mpu, name, **arguments))
        != (theirs := shown(parallel_state, name, **arguments))
    ]


def test_ranks_and_groups():
    assert run_ranks(8, all_compared, seconds=120.0) == [dict.fromkeys(LAYOUTS, [])] * 8
