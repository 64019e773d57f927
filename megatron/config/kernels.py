"""Flags that select kernel implementations, in Megatron's spelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import Needs, arg
from megatron.config.model_flags import ROPE

# core_cu13: for PyPI's torch, a CUDA 13 build; the bare package takes CUDA 12's libraries
INSTALL_TRANSFORMER_ENGINE = (
    "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]'"
)

CUDA_GRAPHS = Needs(
    "--cuda-graph-impl local", lambda v: v["enable_cuda_graph"] or v["cuda_graph_impl"] != "none"
)


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Kernels: implementations that differ in speed, memory and rounding."""

    transformer_impl: Literal["local", "transformer_engine"] = arg(
        "local",
        help="implementation of linear layers, norms and attention of the transformer "
        "layers: local (this suite's) or NVIDIA's Transformer Engine (CUDA; "
        f"{INSTALL_TRANSFORMER_ENGINE})",
    )

    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = arg("auto")
    """attention kernel: auto (the fastest available), flash (the flash-attn package), fused
    (torch's fused attention; with Transformer Engine cuDNN's), unfused (allocates the matrix of
    scores) or local (this suite's chunked attention)"""

    use_flash_attn: bool = arg(False)
    """the same as --attention-backend flash"""

    masked_softmax_fusion: bool = arg(
        True,
        needs=Needs(
            "--attention-backend auto or unfused",
            lambda v: v["attention_backend"] in ("auto", "unfused") and not v["use_flash_attn"],
        ),
        off="--no-masked-softmax-fusion",
    )
    """unfused attention, which allocates the matrix of scores: the same as --attention-backend
    unfused"""

    bias_swiglu_fusion: bool = arg(True, needs="swiglu", off="--no-bias-swiglu-fusion")
    """disable the fused SwiGLU kernel"""

    apply_rope_fusion: bool = arg(True, needs=ROPE, off="--no-rope-fusion")
    """disable the fused kernel of rotary position embeddings"""

    gradient_accumulation_fusion: bool = arg(True, off="--no-gradient-accumulation-fusion")
    """compute weight gradients in the parameter dtype and add them to main_grad afterwards, instead
    of accumulating in fp32 directly"""

    cuda_graph_impl: Literal["none", "local"] = arg("none")
    """local: forward and backward of a micro-batch are one CUDA graph, which the host starts with
    one call (never run on a device)"""

    enable_cuda_graph: bool = arg(False)
    """the same as --cuda-graph-impl local"""

    cuda_graph_scope: Literal["full_iteration"] = arg("full_iteration")
    """what a CUDA graph holds: full_iteration, all of a micro-batch, from samples to gradients"""

    cuda_graph_warmup_steps: int = arg(3, minimum=1, needs=CUDA_GRAPHS)
    """iterations before CUDA graphs are recorded, in each process: kernels are tried there"""

    @property
    def cuda_graphs(self) -> bool:
        """Whether micro-batches are CUDA graphs, whichever way it was spelled."""
        return self.enable_cuda_graph or self.cuda_graph_impl != "none"

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
