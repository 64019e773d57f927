"""Models of megatron-core on a CPU; imports it inside functions only."""

import contextlib

import torch
import torch.nn.functional as F

from megatron.config.parallel import ParallelConfig

VOCAB = 64  # no padding: megatron-core leaves dummy columns in the softmax


def let_it_run_on_a_cpu(patch):
    from megatron.core import utils
    from megatron.core.tensor_parallel import random

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
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

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
    config = TransformerConfig(
        **experts,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.kv_channels,
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
    )
    spec = get_gpt_layer_local_spec(
        num_experts=model.num_experts,
        normalization=model.normalization,
        qk_layernorm=model.qk_layernorm,
    )
    return GPTModel(
        config,
        spec,
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
