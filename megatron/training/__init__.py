"""What a script of one's own imports, under Megatron's names; nothing is loaded before it is
used."""

import importlib
from pathlib import Path

_HOME = {
    "megatron.log": ("print_rank_0", "print_rank_last"),
    "megatron.program": (
        "ModelType",
        "parse_and_validate_args",
        "pretrain",
        "pretrain_cfg_container_from_args",
    ),
    "megatron.training.script_args": ("get_args", "get_timers", "get_tokenizer"),
    "megatron.training.script_model": ("GPTModel",),
    "megatron.training.script_names": (
        "BlendedMegatronDatasetBuilder",
        "GPTDataset",
        "GPTDatasetConfig",
        "MockGPTDataset",
        "StragglerDetector",
        "average_losses_across_data_parallel_group",
        "build_tokenizer",
        "core_transformer_config_from_args",
        "flatten_batch_for_packed_sequences",
        "get_attr_wrapped_model",
        "get_batch_on_this_cp_rank",
        "get_batch_on_this_tp_rank",
        "get_blend_and_blend_per_split",
        "get_blend_from_list",
        "get_gpt_decoder_block_spec",
        "get_gpt_layer_local_spec",
        "get_gpt_layer_with_transformer_engine_spec",
        "get_ltor_masks_and_position_ids",
        "get_mtp_ranks",
        "get_rerun_state_machine",
        "get_te_version",
        "get_torch_version",
        "gpt_config_from_args",
        "inprocess_restart",
        "mtp_on_this_rank",
        "set_startup_timestamps",
        "tensor_parallel",
    ),
    "megatron.training.script_ranks": ("is_first_or_last_pipeline_stage", "mpu", "parallel_state"),
}
_RANKS = "megatron.training.script_ranks"
_IMPORTS = "megatron.training.script_imports"


def _home(name: str) -> str | None:
    """The module that has a name; of functions of mpu, which scripts import by name too, mpu's."""
    for home, names in _HOME.items():
        if name in names:
            return home
    if name.startswith(("get_", "is_")) and hasattr(importlib.import_module(_RANKS).mpu, name):
        return _RANKS
    return _IMPORTS if name in importlib.import_module(_IMPORTS).UNUSABLE else None


def has(name: str) -> bool:
    """Can a script import it from here? Loads nothing large."""
    return _home(name) is not None


def __getattr__(name: str) -> object:
    is_module = any((Path(__file__).parent / f"{name}{end}").exists() for end in ("", ".py"))
    home = None if is_module or name.startswith("__") else _home(name)
    if home is None:
        if not is_module and not name.startswith("__"):
            importlib.import_module(_IMPORTS).refuse(name, has)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(home)
    if home == _IMPORTS:
        return module.unusable(name)
    return getattr(module if name in _HOME.get(home, ()) else module.mpu, name)
