"""Which implementation computes what, spelled as Megatron spells it. Knows no kernel and no
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Choices between implementations. They change speed, memory and rounding, never the model."""

    transformer_impl: Literal["local", "transformer_engine"] = arg(
        "local",
        help="linear layers, norms and attention of the transformer layers: this suite's, or "
        "NVIDIA's Transformer Engine (CUDA; pip install --no-build-isolation "
        "'transformer-engine[pytorch]')",
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = arg(
        "auto",
        dump=False,
        help=(
            "auto: the best that works here; flash: the flash-attn package; fused: torch's fused "
            "attention (cuDNN's under Transformer Engine); unfused: the whole matrix of scores; "
            "local: this suite's blocks of query rows"
        ),
    )
    use_flash_attn: bool = arg(False, help="the same as --attention-backend flash")
    masked_softmax_fusion: bool = arg(
        True,
        off="--no-masked-softmax-fusion",
        help="scores, mask and softmax one after the other, over the whole matrix of scores: "
        "the same as --attention-backend unfused",
    )
    bias_swiglu_fusion: bool = arg(
        True, off="--no-bias-swiglu-fusion", help="SwiGLU operation by operation"
    )
    apply_rope_fusion: bool = arg(
        True, off="--no-rope-fusion", help="rotary positions operation by operation"
    )
    gradient_accumulation_fusion: bool = arg(
        True,
        off="--no-gradient-accumulation-fusion",
        help="autograd makes weight gradients in the weights' format, and only then are they "
        "added to the fp32 ones",
    )

    @property
    def attention(self) -> str:
        """`attention_backend`, whichever way it was spelled."""
        if self.attention_backend == "auto" and self.use_flash_attn:
            return "flash"
        return (
            "unfused"
            if self.attention_backend == "auto" and not self.masked_softmax_fusion
            else self.attention_backend
        )
