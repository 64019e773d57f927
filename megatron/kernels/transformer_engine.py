"""NVIDIA's Transformer Engine around our parameters. The only importer of transformer_engine.

Its modules are built without memory (device "meta") and then given our parameters, so that names,
initial values, gradients' buffers and checkpoints are those of every other run.
Each call is made over the stand-ins of tests/core/kernels/fake_libraries.py, whose signatures are
held against the sources of the pinned release.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.config.kernels import INSTALL_TRANSFORMER_ENGINE
from megatron.config.precision import PrecisionConfig
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.kernels.cu_seqlens import cumulative_lengths


def load() -> None:
    """Load the library, which takes seconds. Raises ValueError where parts of it are missing or too
    old."""
    try:
        from transformer_engine.pytorch import autocast  # noqa: F401  (the newest name that is used here)
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise ValueError(
            f"Transformer Engine is installed but does not load ({type(error).__name__}: {error}); "
            f"{INSTALL_TRANSFORMER_ENGINE}, or use --transformer-impl local"
        ) from None


@dataclass(frozen=True)
class Fp8:
    """fp8 as the command line has it: format "e4m3" or "hybrid", recipe "delayed" or "tensorwise"
    (current scaling)."""

    format: str
    recipe: str
    margin: int = 0
    amax_history_len: int = 1
    amax_compute_algo: str = "most_recent"


@dataclass(frozen=True)
class TransformerEngine:
    """Makes the modules of a model's transformer layers.

    accumulate: weight gradients are added to `main_grad` inside the GEMM. fp8: None for GEMMs in
    the parameter dtype.
    """

    accumulate: bool = True
    fp8: Fp8 | None = None

    def linear(
        self,
        mode: str,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        group: Any,
        size: int,
        sequence_parallel: bool,
    ) -> nn.Module:
        """A linear layer split over `size` ranks of `group`, `mode` "column" or "row"; weight and
        bias as in megatron/parallel/layers.py."""
        return Linear(mode, weight, bias, group, size, sequence_parallel, self.accumulate)

    def norm(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        eps: float,
        zero_centered: bool,
        rms: bool,
    ) -> nn.Module:
        """LayerNorm or RMSNorm over the last dimension, [..., h] -> [..., h] in the weight's
        dtype."""
        import transformer_engine.pytorch as te

        if rms:
            norm = te.RMSNorm(
                weight.shape[0],
                eps=eps,
                device="meta",
                dtype=weight.dtype,
                zero_centered_gamma=zero_centered,
            )
        else:
            norm = te.LayerNorm(
                weight.shape[0],
                eps=eps,
                device="meta",
                dtype=weight.dtype,
                zero_centered_gamma=zero_centered,
            )
            norm.bias = bias
        norm.weight = weight
        return norm

    def attention(self, spec: AttentionSpec) -> nn.Module:
        """Attention as `spec` says, by `Forward` of kernels/attention_spec.py."""
        return EngineAttention(spec)

    def autocast(self, group: Any) -> AbstractContextManager[Any]:
        """The layers run inside have FP8 GEMMs; `group`: ranks that share a layer, whose
        scales must be alike."""
        if self.fp8 is None:
            return nullcontext()
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe

        form = recipe.Format.E4M3 if self.fp8.format == "e4m3" else recipe.Format.HYBRID
        if self.fp8.recipe == "tensorwise":
            fp8_recipe = recipe.Float8CurrentScaling(fp8_format=form)
        else:
            fp8_recipe = recipe.DelayedScaling(
                margin=self.fp8.margin,
                fp8_format=form,
                amax_history_len=self.fp8.amax_history_len,
                amax_compute_algo=self.fp8.amax_compute_algo,
                # without a group Transformer Engine reduces over all ranks, also of other stages
                reduce_amax=group is not None,
            )
        return te.autocast(enabled=True, recipe=fp8_recipe, amax_reduction_group=group)


def build(accumulate: bool, precision: PrecisionConfig) -> TransformerEngine:
    """Transformer Engine for --transformer-impl and the FP8 of the command line. Raises ValueError
    as `load`."""
    load()
    p = precision
    if p.fp8 is None:
        return TransformerEngine(accumulate)
    fp8 = Fp8(p.fp8, p.fp8_recipe, p.fp8_margin, p.fp8_amax_history_len, p.fp8_amax_compute_algo)
    return TransformerEngine(accumulate, fp8)


class Linear(nn.Module):
    """te.Linear over our weight [out, in], or [2, out, in] of a gated layer, which it sees as [2
    out, in]."""

    def __init__(
        self,
        mode: str,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: Any,
        size: int,
        sequence_parallel: bool,
        accumulate: bool,
    ):
        import transformer_engine.pytorch as te

        super().__init__()
        self.weight = weight
        self.bias = bias
        rows = weight.shape[:-1].numel()
        columns = weight.shape[-1]
        self.linear = te.Linear(
            in_features=columns * (size if mode == "row" else 1),
            out_features=rows * (size if mode == "column" else 1),
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=accumulate,
            tp_group=group,
            tp_size=size,
            bias=bias is not None,
            params_dtype=weight.dtype,
            parallel_mode=mode,
            device="meta",
        )
        del self.linear.weight
        if bias is not None:
            del self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """As the forward of the layer in megatron/parallel/layers.py, its collectives included."""
        # Set each time: a view belongs to one graph, and buffers of weights are made after the
        # model.
        weight = self.weight.flatten(0, -2)
        if weight is not self.weight and hasattr(self.weight, "main_grad"):
            # where Transformer Engine looks for it
            weight.main_grad = self.weight.main_grad.flatten(0, -2)  # type: ignore[attr-defined]
        self.linear.weight = weight
        if self.bias is not None:
            self.linear.bias = self.bias.flatten()
        return self.linear(x)


class EngineAttention(nn.Module):
    """te.DotProductAttention of whole sequences, or of the documents of a batch."""

    def __init__(self, spec: AttentionSpec):
        import transformer_engine.pytorch as te

        super().__init__()
        self.attention = te.DotProductAttention(
            num_attention_heads=spec.heads,
            kv_channels=spec.head_dim,
            num_gqa_groups=spec.groups,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
            softmax_scale=spec.scale,
            window_size=None if spec.window is None else (spec.window - 1, 0),
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """q [s, b, n, d], k and v [s, b, g, d] -> [s, b, n, d]; document ids keep attention
        inside documents."""
        s, b, n, d = q.shape
        if call.document_ids is None:
            return self.attention(q, k, v).view(s, b, n, d)
        ends = cumulative_lengths(call.document_ids)
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
        out = self.attention(
            q,
            k,
            v,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=s,
            max_seqlen_kv=s,
        )
        return out.view(b, s, n, d).transpose(0, 1)
