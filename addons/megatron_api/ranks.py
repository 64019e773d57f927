"""Ranks and process groups of a run by the names of Megatron's `parallel_state`: `mpu`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.training.script_args import context, has_context

if TYPE_CHECKING:
    from megatron.parallel.context import Axis

# Megatron's axes, and ours; that of experts' replicas has no name of its own.
_AXES = {
    "tensor_model_parallel": "tp",
    "pipeline_model_parallel": "pp",
    "data_parallel": "dp",
    "context_parallel": "cp",
    "model_parallel": "model",
    "expert_model_parallel": "ep",
    "expert_tensor_parallel": "etp",
    "expert_data_parallel": "experts",
}
# What can be asked of an axis; ranks other than the own one are global numbers.
_ASKED: dict[str, Callable[[Axis], Any]] = {
    "rank": lambda axis: axis.rank,
    "world_size": lambda axis: axis.size,
    "group": lambda axis: context().group(axis),
    "global_ranks": lambda axis: list(axis.ranks),
    "src_rank": lambda axis: axis.ranks[0],
    "first_rank": lambda axis: axis.ranks[0],
    "last_rank": lambda axis: axis.ranks[-1],
    "next_rank": lambda axis: axis.ranks[(axis.rank + 1) % axis.size],
    "prev_rank": lambda axis: axis.ranks[axis.rank - 1],
}
_QUESTION = re.compile(f"get_({'|'.join(_AXES)})_({'|'.join(_ASKED)})")


class Mpu:
    """`mpu.get_AXIS_rank()`, `_world_size()`, `_group()` and the like of the axes above. A group is
    torch's, of this rank alone where the axis has one; every rank of it must call a collective.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        question = _QUESTION.fullmatch(name)
        if question is None:
            raise AttributeError(
                f"mpu.{name}: there are get_AXIS_WHAT(), with the axes {', '.join(_AXES)}, and "
                f"{', '.join(_ASKED)} of each; is_initialized, is_pipeline_first_stage and "
                "is_pipeline_last_stage",
                name=name,
                obj=self,
            )
        axis, asked = question.groups()

        def ask(with_context_parallel: bool = False, check_initialized: bool = True) -> Any:
            ctx = context()
            name = _AXES[axis]
            if with_context_parallel and name == "dp":
                name = "dp_cp"
            return _ASKED[asked](ctx.experts.data if name == "experts" else ctx.axis(name))

        return ask

    def is_initialized(self) -> bool:
        """Are the ranks connected?"""
        return has_context()

    model_parallel_is_initialized = is_initialized

    def is_pipeline_first_stage(self, ignore_virtual: bool = True, vp_stage: Any = None) -> bool:
        """Has this rank the first pipeline stage? All its virtual stages count as one."""
        return context().pp.rank == 0

    def is_pipeline_last_stage(self, ignore_virtual: bool = True, vp_stage: Any = None) -> bool:
        """Has this rank the last one?"""
        return context().pp.rank == context().pp.size - 1


mpu = parallel_state = Mpu()


def is_first_or_last_pipeline_stage(vp_stage: Any = None) -> bool:
    """Has this rank the first pipeline stage, or the last one?"""
    return mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
