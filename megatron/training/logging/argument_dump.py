"""The table of arguments, and the first lines of a run that has another log format than short:
Megatron's."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.arguments import flags_of, values_of
from megatron.config.command_line import CommandLine, foreign_flags
from megatron.config.plan.plan import Plan, make_plan
from megatron.config.plan.report import changed_arguments
from megatron.config.tree import Config


def dumped_values(
    config: Config,
    plan: Plan,
    distributed_backend: str,
    foreign: Mapping[str, Any] | None = None,
    *,
    rank: int = 0,
    of_script: argparse.Namespace | None = None,
) -> dict[str, Any]:
    """{name: value} as Megatron's dump has them after its own checks: defaults filled in, derived
    names added.

    `distributed_backend`: the one in use, where the flag left it open; `foreign`: typed flags
    without effect; `of_script`: those of a script's own.
    """
    return {
        **vars(of_script or argparse.Namespace()),
        **_declared(config, foreign or {}),
        **_derived(config, plan),
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "distributed_backend": config.parallel.distributed_backend or distributed_backend,
        "rank": rank,
        "variable_seq_lengths": False,
    }


def _declared(config: Config, foreign: Mapping[str, Any]) -> dict[str, Any]:
    """The flags as they were given, in the form that Megatron's own have."""
    flags = flags_of(type(config))
    dumped = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values_of(config).items()
        if flags[name].dump or value != flags[name].default
    }
    for name in ("train_range_to_skip", "iterations_to_skip"):
        if dumped.get(name):
            dumped[name] = [int(word) if word.isdigit() else word for word in dumped[name]]
    dumped.pop("recompute_activations", None)
    dumped |= {
        name: value or None
        for name, value in dumped.items()
        if name.startswith(("no_load_", "no_save_"))
    }
    if config.logging.printed_arguments != "all" and not foreign:
        return dumped  # a table of Megatron's own has its names that have no flag here
    return foreign_flags(type(config)).argument_table(dumped, foreign)


def _derived(config: Config, plan: Plan) -> dict[str, Any]:
    """What Megatron's checks fill in, overwrite or add."""
    m = config.model
    t = config.training
    o = config.optimizer
    p = config.parallel
    precision = config.precision
    grads_in_fp32 = precision.accumulate_allreduce_grads_in_fp32
    if precision.bf16:
        grads_in_fp32 = precision.grad_dtype == "float32"
    constant = o.weight_decay_incr_style == "constant"
    rampup = t.rampup_batch_size
    chunks = len(plan.layers_per_stage[0])
    return {
        "accumulate_allreduce_grads_in_fp32": grads_in_fp32,
        "attention_softmax_in_fp32": m.attention_softmax_in_fp32 or m.apply_query_key_layer_scaling,
        "bias_gelu_fusion": m.bias_gelu_fusion and m.add_bias_linear,
        "data_parallel_size": plan.data_parallel_size,
        "dataloader_type": config.data.dataloader_type or "single",
        "encoder_num_layers": m.num_layers,
        "encoder_seq_length": m.seq_length,
        "end_weight_decay": o.weight_decay if constant else o.end_weight_decay,
        "start_weight_decay": o.weight_decay if constant else o.start_weight_decay,
        **m.filled_in,
        "global_batch_size": plan.batch.final_global_batch_size,
        "overlap_p2p_comm": p.overlap_p2p_comm and len(plan.layers_per_stage) > 1,
        "params_dtype": f"torch.{precision.params_dtype}",
        "rampup_batch_size": None if rampup is None else list(map(str, rampup)),
        "world_size": plan.world_size,
        "recompute_granularity": t.recompute,
        "sequence_parallel": p.sequence_parallel and p.tensor_model_parallel_size > 1,
        "split": plan.split,
        "tokenizer_type": config.data.tokenizer,
        "transformer_pipeline_model_parallel_size": p.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
    }


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
    from megatron.data.tokenizers.build import planned_vocabulary

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
