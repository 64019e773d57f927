"""What the JSON file of --deepspeed_config sets, as flags of this suite; what it sets that has no
such flag is an error.

Keys that only steer how DeepSpeed communicates or what it prints have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.small_files import read_json

from .tables import STRATEGIES

_FLAGS = {
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "train_batch_size": "--global-batch-size",
    "gradient_clipping": "--clip-grad",
}
_SCALING = {
    "loss_scale_window": "--loss-scale-window",
    "hysteresis": "--hysteresis",
    "min_loss_scale": "--min-loss-scale",
}
_NO_EFFECT = set(
    "activation_checkpointing communication_data_type comms_logger csv_monitor data_types "
    "disable_allgather dump_state flops_profiler gradient_accumulation_steps memory_breakdown "
    "prescale_gradients seq_parallel_communication_data_type steps_per_print tensorboard wandb "
    "wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer".split()
)
_REMEDIES = {
    "optimizer": "use --optimizer, --lr, --adam-beta1, --adam-beta2, --weight-decay",
    "scheduler": "use --lr, --lr-decay-style, --lr-warmup-iters, --min-lr",
}


def read_deepspeed(path: str) -> tuple[list[str], list[str]]:
    """(flags that the file stands for, problems). A value "auto" stands for no flag. Raises OSError
    where the file cannot be read."""
    try:
        content = read_json(path)
    except ValueError as error:
        content = error
    if not isinstance(content, dict):
        why = f" ({content})" if isinstance(content, ValueError) else ""
        return [], [
            f"--deepspeed_config {path}: not a JSON object{why} [deepspeed-config-malformed]"
        ]
    words: list[str] = []
    problems = []
    for key, value in content.items():
        if value == "auto" or key in _NO_EFFECT:
            continue
        if key in _FLAGS:
            words += [_FLAGS[key], str(value)]
        elif key in ("bf16", "fp16") and isinstance(value, dict):
            words += _precision(key, value)
        elif key == "zero_optimization" and isinstance(value, dict):
            stage = value.get("stage", 0)
            if stage in STRATEGIES:
                words += ["--data-parallel-sharding-strategy", STRATEGIES[stage]]
            elif stage:
                problems.append((f"{key}: stage {stage}", "use 0, 1, 2 or 3"))
        elif not _is_off(value):
            problems.append((key, _REMEDIES.get(key, "remove it from the file")))
    return words, [
        f"--deepspeed_config {path}: {name}: not supported; {use} [deepspeed-config-not-supported]"
        for name, use in problems
    ]


def _is_off(value: Any) -> bool:
    return value in (False, None) or isinstance(value, dict) and not value.get("enabled", True)


def _precision(name: str, section: Mapping[str, Any]) -> Iterator[str]:
    """The flags of the sections fp16 and bf16."""
    if section.get("enabled") is not True:
        return
    yield f"--{name}"
    if name == "bf16":
        return
    if section.get("loss_scale"):
        yield from ("--loss-scale", str(section["loss_scale"]))
        return
    if "initial_scale_power" in section:
        yield from ("--initial-loss-scale", str(2 ** int(section["initial_scale_power"])))
    for key, flag in _SCALING.items():
        if key in section:
            yield from (flag, str(section[key]))
