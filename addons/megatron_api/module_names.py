"""The modules of Megatron-LM and of its examples, which scripts import."""

# The modules of Megatron-LM from 2021 to 2026 that scripts import from. Each has all names that
# `megatron.training` has, where they come from in any release.
MODULES = frozenset(
    """
    megatron megatron.arguments megatron.checkpointing megatron.data megatron.data.gpt_dataset
    megatron.enums megatron.global_vars megatron.initialize megatron.legacy megatron.legacy.data
    megatron.legacy.model megatron.legacy.model.gpt_model megatron.model megatron.model.gpt_model
    megatron.mpu megatron.utils megatron.core
    megatron.core.context_parallel_layout megatron.core.datasets
    megatron.core.datasets.data_schedule
    megatron.core.datasets.blended_megatron_dataset_builder
    megatron.core.datasets.blended_megatron_dataset_config megatron.core.datasets.gpt_dataset
    megatron.core.datasets.utils megatron.core.enums megatron.core.models megatron.core.models.gpt
    megatron.core.models.gpt.experimental_attention_variant_module_specs
    megatron.core.models.gpt.gpt_layer_specs megatron.core.models.gpt.gpt_model
    megatron.core.models.gpt.heterogeneous
    megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs megatron.core.models.hybrid
    megatron.core.models.hybrid.hybrid_model megatron.core.models.mamba
    megatron.core.models.mamba.mamba_model megatron.core.mpu
    megatron.core.num_microbatches_calculator megatron.core.package_info
    megatron.core.packed_seq_params megatron.core.parallel_state megatron.core.rerun_state_machine
    megatron.core.tensor_parallel megatron.core.tensor_parallel.data megatron.core.tokenizers
    megatron.core.tokenizers.text megatron.core.tokenizers.text.utils
    megatron.core.tokenizers.text.utils.build_tokenizer megatron.core.tokenizers.utils
    megatron.core.tokenizers.utils.build_tokenizer megatron.core.transformer
    megatron.core.transformer.experimental_attention_variant
    megatron.core.transformer.experimental_attention_variant.cp_balanced_indexer
    megatron.core.transformer.multi_token_prediction megatron.core.transformer.spec_utils
    megatron.core.transformer.transformer_config megatron.core.utils megatron.training
    megatron.training.argument_utils megatron.training.arguments megatron.training.checkpointing
    megatron.training.datasets megatron.training.datasets.fim_dataset
    megatron.training.datasets.sft_dataset megatron.training.datasets.varlen_dataset
    megatron.training.global_vars
    megatron.training.initialize megatron.training.training megatron.training.utils
    megatron.training.yaml_arguments
    """.split()
)
# Files of NVIDIA's examples beside its script: the names here where they are not beside it.
NEIGHBOURS = frozenset(("gpt_builders", "model_provider"))
