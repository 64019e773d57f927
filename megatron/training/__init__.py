"""What a script of one's own imports, under Megatron's names; nothing is loaded before it is
used."""

import importlib

_HOME = {
    "megatron.log": ("print_rank_0", "print_rank_last"),
    "megatron.program": ("ModelType", "pretrain"),
    "megatron.training.script_args": ("get_args", "get_timers", "get_tokenizer"),
    "megatron.training.script_model": ("GPTModel",),
    "megatron.training.script_names": (
        "BlendedMegatronDatasetBuilder",
        "GPTDataset",
        "GPTDatasetConfig",
        "MockGPTDataset",
        "StragglerDetector",
        "average_losses_across_data_parallel_group",
        "core_transformer_config_from_args",
        "get_batch_on_this_cp_rank",
        "get_batch_on_this_tp_rank",
        "get_blend_from_list",
        "get_gpt_layer_local_spec",
        "get_gpt_layer_with_transformer_engine_spec",
        "get_ltor_masks_and_position_ids",
        "mpu",
        "tensor_parallel",
    ),
}


def __getattr__(name: str) -> object:
    for home, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
