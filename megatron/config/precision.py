"""Flags of precision: dtypes of parameters and gradients, loss scaling, FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import Needs, arg

DTYPES = ("auto", "bf16", "fp16", "fp32")  # of a trained model that is loaded
_DYNAMIC_LOSS_SCALE = Needs(
    "dynamic loss scaling (--fp16, and no --loss-scale)",
    lambda v: v["fp16"] and v["loss_scale"] is None,
)
_DELAYED = Needs(
    "--fp8-format and --fp8-recipe delayed", lambda v: v["fp8"] and v["fp8_recipe"] == "delayed"
)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision and loss scaling."""

    fp16: bool = arg(False)
    """fp16 parameters, with loss scaling"""

    bf16: bool = arg(False, excludes=("fp16",))
    """bf16 parameters; gradients and optimizer state in fp32 unless --grad-reduce-in-bf16 or
    --use-precision-aware-optimizer says otherwise"""

    fp64: bool = arg(False, excludes=("fp16", "bf16"))
    """fp64 parameters, for numerical parity tests"""

    loss_scale: float | None = arg(
        None, needs=Needs("--fp16 or --bf16", lambda v: v["fp16"] or v["bf16"]), above=0
    )
    """static loss scale, any positive number; without it --fp16 uses a dynamic loss scale"""

    initial_loss_scale: float = arg(2**32, needs=_DYNAMIC_LOSS_SCALE, above=0)
    """initial value of the dynamic loss scale of --fp16"""

    min_loss_scale: float = arg(1.0, needs=_DYNAMIC_LOSS_SCALE, above=0)
    """lower bound of the dynamic loss scale of --fp16"""

    max_loss_scale: float | None = arg(None, needs=_DYNAMIC_LOSS_SCALE, above=0)
    """upper bound of the dynamic loss scale of --fp16"""

    loss_scale_growth_factor: float = arg(2.0, needs=_DYNAMIC_LOSS_SCALE, above=1)
    """factor by which the dynamic loss scale grows after --loss-scale-window iterations without
    overflow"""

    loss_scale_backoff_factor: float = arg(0.5, needs=_DYNAMIC_LOSS_SCALE, above=0, below=1)
    """factor by which the dynamic loss scale falls after an overflow"""

    loss_scale_window: float = arg(1000, needs=_DYNAMIC_LOSS_SCALE, minimum=1)
    """iterations without overflow before the dynamic loss scale grows"""

    hysteresis: int = arg(2, needs=_DYNAMIC_LOSS_SCALE, minimum=1)
    """number of overflows before the dynamic loss scale falls"""

    tf32: bool = arg(False)
    """fp32 GEMMs with TF32 inputs, on CUDA"""

    disable_bf16_reduced_precision_matmul: bool = arg(False)
    """on CUDA, bf16 GEMMs sum partial results in fp32 only"""

    fp16_lm_cross_entropy: bool = arg(False, requires="fp16")
    """compute the cross entropy in fp16, with --fp16"""

    accumulate_allreduce_grads_in_fp32: bool = arg(False)
    """accumulate and reduce gradients in fp32 (default with --bf16, where --grad-reduce-in-bf16
    overrides it)"""

    grad_reduce_in_bf16: bool = arg(False, needs="bf16")
    """accumulate and reduce gradients in bf16, with --bf16: half the bytes of gradients"""

    main_grads_dtype: Literal["fp32", "bf16"] = arg(
        "fp32", requires="use_precision_aware_optimizer", needs="bf16"
    )
    """dtype of gradients with --use-precision-aware-optimizer; bf16 accumulates and reduces them in
    bf16, with --bf16"""

    fp8: Literal["e4m3", "hybrid"] | None = arg(None, excludes=("fp64",), flag="--fp8-format")
    """FP8 GEMMs in the linear layers of the transformer layers: e4m3, or hybrid (E4M3 forward, E5M2
    gradients); emulated on a CPU"""

    fp8_recipe: Literal["delayed", "tensorwise"] = arg("delayed", needs="fp8")
    """FP8 scaling with --fp8-format: delayed (from the amax history of earlier iterations) or
    tensorwise (from the amax of the current tensor)"""

    fp8_margin: int = arg(0, needs=_DELAYED)
    """FP8 delayed scaling: scale = largest FP8 number / (amax x 2^margin)"""

    fp8_amax_history_len: int = arg(1, needs=_DELAYED, minimum=1)
    """FP8 delayed scaling: iterations in the amax history"""

    fp8_amax_compute_algo: Literal["most_recent", "max"] = arg("most_recent", needs=_DELAYED)
    """FP8 delayed scaling: amax of the most recent iteration, or the maximum of the amax history"""

    @property
    def params_dtype(self) -> str:
        """Name of the torch dtype of the parameters."""
        if self.fp16:
            return "float16"
        if self.bf16:
            return "bfloat16"
        return "float64" if self.fp64 else "float32"

    @property
    def main_dtype(self) -> str:
        """Name of the torch dtype of main weights and optimizer state."""
        return "float64" if self.fp64 else "float32"

    @property
    def grad_dtype(self) -> str:
        """Name of the torch dtype in which gradients are accumulated and reduced."""
        if self.fp16 and not self.accumulate_allreduce_grads_in_fp32:
            return "float16"
        if self.bf16 and (self.grad_reduce_in_bf16 or self.main_grads_dtype == "bf16"):
            return "bfloat16"
        return self.main_dtype
