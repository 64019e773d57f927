"""--init-scheme internlm and internlm2."""

from __future__ import annotations

import math

from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import Draw, Scheme


def internlm_scheme(model: ModelConfig) -> Scheme:
    """InternLM's initial values, whatever the width (of the version whose logs
    the demos show).

    What ends the attention branch has 0.006 / sqrt(2 (layer + 1)), by its OWN layer; so has the up
    half of a gated MLP, and the matrix after it has 0.0015.
    """

    def draw(role: str, layer: int) -> Draw:
        if role in ("word_embedding", "position_embedding", "output_layer"):
            return "normal", 0.0052
        scaled = 0.006 / math.sqrt(2.0 * (layer + 1))
        of_role = {
            "qkv": 0.006,
            "attention_output": scaled,
            "mlp_in": (0.006, scaled) if model.gated else 0.006,
            "mlp_out": 0.0015,
        }
        return "normal", of_role[role]

    return draw


def internlm2_scheme(model: ModelConfig) -> Scheme:
    """InternEvo's initial values of InternLM2 and Llama 2: 0.02, and at the ends of both branches
    0.02 / sqrt(2 (layer + 1)), by their OWN layer."""

    def draw(role: str, layer: int) -> Draw:
        ends = role in ("attention_output", "mlp_out")
        return "normal", 0.02 / math.sqrt(2.0 * (layer + 1)) if ends else 0.02

    return draw
