"""The operations of FP8 casts on CUDA, each one launch there: a trace on the meta device counts
them. fp8_triton.py has their kernels."""

import torch
from torch import Tensor

LIBRARY = torch.library.Library("megatron", "FRAGMENT")
LIBRARY.define("fp8_amax_(Tensor(a!) amax, Tensor x) -> ()")
LIBRARY.define("fp8_scale(Tensor amax, Tensor? given, float largest) -> (Tensor, Tensor)")
LIBRARY.define(
    "fp8_cast(Tensor x, Tensor scale, ScalarType dtype, bool rows, bool columns) "
    "-> (Tensor, Tensor)"
)
LIBRARY.impl("fp8_amax_", lambda amax, x: None, "Meta")
LIBRARY.impl("fp8_scale", lambda amax, *_: (amax.new_empty(()), amax.new_empty(())), "Meta")


def empty_casts(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """The memory of the casts of x [..., m, n] that are wanted: [..., m, n] and [..., n, m]."""
    return (
        x.new_empty(x.shape if rows else 0, dtype=dtype),
        x.new_empty(x.mT.shape if columns else 0, dtype=dtype),
    )


LIBRARY.impl("fp8_cast", empty_casts, "Meta")
