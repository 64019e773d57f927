"""The table of arguments as text, and the first lines of a run whose log is Megatron's."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.config.command_line import CommandLine
from megatron.config.plan.plan import Plan, make_plan
from megatron.config.plan.report import changed_arguments
from megatron.config.tree import Config
from megatron.training.logging.argument_dump import dumped_values


def dump(
    config: Config,
    plan: Plan,
    distributed_backend: str,
    foreign: Mapping[str, Any] | None = None,
    *,
    rank: int = 0,
    of_script: argparse.Namespace | None = None,
) -> str:
    """The argument dump in Megatron's form; arguments as for `dumped_values`."""
    values = dumped_values(
        config, plan, distributed_backend, foreign, rank=rank, of_script=of_script
    )
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in values.items()]
    return "\n".join(
        [
            f"{'-' * 24} arguments {'-' * 24}",
            *sorted(lines, key=str.lower),
            f"{'-' * 20} end of arguments {'-' * 21}",
        ]
    )


def start_lines(line: CommandLine, distributed_backend: str) -> list[str]:
    """What a run prints first, in Megatron's order: sizes, notes, precision, arguments,
    micro-batches.

    `distributed_backend`: as for `dumped_values`.
    """
    from megatron.data.tokenizers.planned import planned_vocabulary

    config = line.config
    p = line.config.parallel
    plan = make_plan(config, line.world_size, planned_vocabulary(config.data)[0])
    lines = [
        f"using world size: {plan.world_size}, data-parallel size: {plan.data_parallel_size}, "
        f"context-parallel size: {p.context_parallel_size} tensor-model-parallel size: "
        f"{p.tensor_model_parallel_size}, pipeline-model-parallel size: "
        f"{p.pipeline_model_parallel_size} ",
        *line.notes,
    ]
    batch = plan.batch.lines()
    lines += [text for text in batch if text.startswith("setting global batch size")]
    numbers = config.precision
    if (
        numbers.bf16
        and numbers.grad_dtype == "float32"
        and not numbers.accumulate_allreduce_grads_in_fp32
    ):
        lines.append("accumulate and all-reduce gradients in fp32 for bfloat16 data type.")
    return [
        *lines,
        f"using torch.{config.precision.params_dtype} for parameters ...",
        *printed_arguments(line, plan, distributed_backend),
        *(text for text in batch if text not in lines),
    ]


def printed_arguments(line: CommandLine, plan: Plan, distributed_backend: str) -> list[str]:
    """What --print-arguments asks for."""
    match line.config.logging.printed_arguments:
        case "all":
            return [
                dump(
                    line.config,
                    plan,
                    distributed_backend,
                    line.foreign,
                    rank=line.rank,
                    of_script=line.extra,
                )
            ]
        case "changed":
            return changed_arguments(line.config)
    return []
