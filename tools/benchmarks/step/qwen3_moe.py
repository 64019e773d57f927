"""transformers' Qwen3-MoE for the bare loop, with the weights of one of our models; experts by
grouped_mm, its default and the fastest of its ways on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from bare_loop import BareLoop
from sizes import AUX_COEFF, Size
from torch import Tensor, nn


class Qwen3Moe(BareLoop):
    """The loop; `step` returns the language-model loss alone, without the balancing loss."""

    def __init__(
        self,
        size: Size,
        weights: dict[str, Tensor],
        samples: Sequence[Tensor],
        dtype: str,
        device: torch.device,
        topk: int,
    ):
        self.aux = torch.zeros(())
        model = make_model(size, weights, topk)
        super().__init__(model, self.loss_of, size, dtype, device, samples)

    def loss_of(self, model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        """Language-model loss plus the balancing loss with its coefficient."""
        out = model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False)
        self.aux = AUX_COEFF * out.aux_loss.detach()
        return out.loss

    def step(self) -> float:
        """One training step (of one micro-batch)."""
        return super().step() - self.aux.item()


def make_model(size: Size, weights: dict[str, Tensor], topk: int) -> nn.Module:
    """transformers' model of this size with `weights`, our parameters by Megatron's names."""
    experts, ffn = next(
        (value.shape[0], value.shape[-1])
        for name, value in weights.items()
        if name.endswith("experts.linear_fc2.weight")
    )
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=ffn,
            moe_intermediate_size=ffn,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            head_dim=size.hidden // size.heads,
            max_position_embeddings=size.seq,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            num_experts=experts,
            num_experts_per_tok=topk,
            norm_topk_prob=True,
            output_router_logits=True,
            router_aux_loss_coef=AUX_COEFF,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )
    )
    model.load_state_dict(state_of(weights, size.heads))
    return model


TOPS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
}


def state_of(weights: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """State of transformers' model from our parameters by Megatron's names."""
    state = {}
    for name, value in weights.items():
        if name in TOPS:
            state[TOPS[name]] = value
            continue
        _, _, layer, kind = name.split(".", 3)
        to = f"model.layers.{layer}."
        if kind == "self_attention.linear_qkv.weight":  # rows by head
            parts = value.reshape(heads, 3, -1, value.shape[-1]).transpose(0, 1).flatten(1, 2)
            for part, matrix in zip("qkv", parts, strict=True):
                state[f"{to}self_attn.{part}_proj.weight"] = matrix
        else:
            state[to + NAMES[kind]] = value.flatten(1, 2) if value.dim() == 4 else value
    return state
