"""The norms of --normalization, by their implementations."""

from megatron.kernels.layer_norm import LAYER_NORMS
from megatron.kernels.rows import Row

NORMS = {"LayerNorm": LAYER_NORMS}


def implementations(normalization: str) -> tuple[Row, ...]:
    """Those of --normalization."""
    if normalization == "RMSNorm":
        from megatron.kernels.rms_norm import RMS_NORMS

        return RMS_NORMS
    return NORMS[normalization]
