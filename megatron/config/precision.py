"""Number formats of weights, gradients and losses. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats and loss scaling."""

    fp16: bool = arg(False, help="half precision with loss scaling")
    bf16: bool = arg(False, help="bfloat16 parameters")
    fp64: bool = arg(False, help="double precision, for proofs", dump=False)
    loss_scale: float | None = arg(
        None, help="fixed loss scale, any positive number; without it --fp16 scales dynamically"
    )
    initial_loss_scale: float = arg(2**32, help="first dynamic loss scale")
    min_loss_scale: float = arg(1.0, help="lower bound of the dynamic loss scale")
    max_loss_scale: float | None = arg(
        None, help="upper bound of the dynamic loss scale", dump=False
    )
    loss_scale_growth_factor: float = arg(
        2.0, help="what a window of good steps multiplies it by", dump=False
    )
    loss_scale_backoff_factor: float = arg(
        0.5, help="what an overflow multiplies it by", dump=False
    )
    loss_scale_window: float = arg(1000, help="good steps before the loss scale grows")
    hysteresis: int = arg(2, help="overflows until the loss scale falls")
    tf32: bool = arg(False, help="fp32 matrix products with TF32 inputs, on CUDA", dump=False)
    fp16_lm_cross_entropy: bool = arg(False, help="compute the loss in fp16, with --fp16")
    accumulate_allreduce_grads_in_fp32: bool = arg(
        False, help="gradients are kept and reduced in fp32 (always so with --bf16)"
    )

    fp8: Literal["e4m3", "hybrid"] | None = arg(
        None,
        flag="--fp8-format",
        help="linear layers of the transformer layers multiply in 8 bits: e4m3, or "
        "hybrid with gradients in e5m2; emulated on a CPU",
    )
    fp8_recipe: Literal["delayed", "tensorwise"] = arg(
        "delayed",
        dump=False,
        help="scales of --fp8-format: from the maxima of the steps before, or of the tensor itself",
    )
    fp8_margin: int = arg(0, help="delayed scales leave room for numbers larger by 2 to this")
    fp8_amax_history_len: int = arg(1, help="steps whose maxima are kept for delayed scales")
    fp8_amax_compute_algo: Literal["most_recent", "max"] = arg(
        "most_recent", help="which of them count: the last, or the largest of all"
    )

    @property
    def params_dtype(self) -> str:
        """Name of the torch dtype of the parameters."""
        return (
            "float16"
            if self.fp16
            else "bfloat16"
            if self.bf16
            else "float64"
            if self.fp64
            else "float32"
        )

    @property
    def main_dtype(self) -> str:
        """Name of the torch dtype of main weights and optimizer state."""
        return "float64" if self.fp64 else "float32"

    @property
    def grad_dtype(self) -> str:
        """Name of the torch dtype in which gradients are accumulated and reduced."""
        if self.fp16 and not self.accumulate_allreduce_grads_in_fp32:
            return "float16"
        return self.main_dtype
