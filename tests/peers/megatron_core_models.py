"""Models of megatron-core on a CPU; imports it inside functions only."""

import contextlib

import torch
import torch.nn.functional as F

from megatron.config.parallel import ParallelConfig

VOCAB = 64  # no padding: megatron-core leaves dummy columns in the softmax


def let_it_run_on_a_cpu(patch):
    from megatron.core import utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    init = DotProductAttention.__init__

    def without_widths(self, *args, k_channels=None, v_channels=None, **options):
        """Its own attention does not know what latent attention passes; it takes any widths."""
        init(self, *args, **options)

    patch.setattr(DotProductAttention, "__init__", without_widths)
    patch.setattr(multi_latent_attention, "HAVE_TE", False)

    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(
        utils.GlobalMemoryBuffer,
        "get_tensor",
        lambda self, shape, dtype, name, mem_alloc_context=None: torch.empty(shape, dtype=dtype),
    )
    patch.setattr(
        random.CudaRNGStatesTracker, "fork", lambda self, name=None: contextlib.nullcontext()
    )


def mcore_activation(model):
    if model.swiglu:
        return F.silu
    if model.squared_relu:
        return lambda x: F.relu(x).square()
    tanh = model.geglu or model.openai_gelu or (model.bias_gelu_fusion and model.add_bias_linear)
    return lambda x: F.gelu(x, approximate="tanh" if tanh else "none")


def mcore_model(model, parallel=None):
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    latent = {}
    hybrid = model.hybrid_layer_pattern is not None
    if model.multi_latent_attention:
        names = (
            *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
            *("rotary_base", "rotary_scaling_factor", "original_max_position_embeddings"),
            *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        )
        latent = {name: getattr(model, name) for name in names}
        latent["rope_type"] = model.rope_type or "yarn"
    parallel = parallel or ParallelConfig()
    experts = {}
    if model.num_experts:
        experts = dict(
            num_moe_experts=model.num_experts,
            moe_ffn_hidden_size=model.expert_ffn,
            moe_router_topk=model.moe_router_topk,
            moe_router_load_balancing_type="none",
            moe_router_score_function=model.moe_router_score_function,
            moe_router_enable_expert_bias=model.moe_router_enable_expert_bias,
            moe_shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size,
            moe_shared_expert_gate=model.moe_shared_expert_gate,
            moe_token_dispatcher_type="allgather",
            expert_model_parallel_size=parallel.expert_model_parallel_size,
        )
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **experts,
        **latent,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.v_head_dim if latent else model.kv_channels,
        ffn_hidden_size=model.ffn,
        gated_linear_unit=model.gated,
        activation_func=mcore_activation(model),
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        rotary_interleaved=model.rotary_interleaved,
        apply_query_key_layer_scaling=model.apply_query_key_layer_scaling,
        attention_softmax_in_fp32=model.attention_softmax_in_fp32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        mtp_num_layers=model.mtp_num_layers,
        mtp_loss_scaling_factor=model.mtp_loss_scaling_factor,
        attention_output_gate=model.attention_output_gate,
        is_hybrid_model=hybrid,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=model.num_experts,
        normalization=model.normalization,
        qk_layernorm=model.qk_layernorm,
        multi_latent_attention=model.multi_latent_attention,
    )
    if hybrid:
        return hybrid_model(model, config, spec)
    depths = None
    if model.mtp_num_layers:
        depths = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config,
        spec,
        mtp_block_spec=depths,
        vocab_size=VOCAB,
        max_sequence_length=model.max_position_embeddings,
        position_embedding_type=model.positions,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        share_embeddings_and_output_weights=model.tied,
    )


def hybrid_model(model, config, layer):
    """Its model of a pattern of blocks, of the parts of a GPT's `layer`."""
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import mamba_block
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    def of(*names):
        parts = {name: getattr(layer.submodules, name) for name in names}
        return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**parts))

    mamba_block.TENorm = WrappedTorchNorm  # the only one that it has by name
    attention = of("input_layernorm", "self_attention", "self_attn_bda")
    mlp = of("pre_mlp_layernorm", "mlp", "mlp_bda")
    blocks = mamba_block.MambaStackSubmodules(
        attention_layer=attention, mlp_layer=mlp, moe_layer=mlp
    )
    return MambaModel(
        config,
        ModuleSpec(mamba_block.MambaStack, submodules=blocks),
        vocab_size=VOCAB,
        max_sequence_length=model.max_position_embeddings,
        hybrid_override_pattern=model.layer_symbols,
        position_embedding_type=model.positions,
        share_embeddings_and_output_weights=model.tied,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
