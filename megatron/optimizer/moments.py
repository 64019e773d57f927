"""How Adam's moments are stored in 16 bits, and back.

bf16 has the range of fp32, so values are stored as they are. fp16 does not: squares of gradients
underflow in it. There the second moment is stored as its square root, and both are multiplied by
2^15. Clipped gradients, and so first moments and roots, are at most 1 (--clip-grad): nothing
overflows, and numbers down to 2e-9 keep fp16's full precision.
"""

import torch

KEYS = ("exp_avg", "exp_avg_sq")
FP16_SCALE = 2.0**15


def widen(key: str, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of the moment `key` in `dtype` (fp32 or fp64): `stored` itself where it is of that
    dtype, else a new tensor."""
    if stored.dtype == dtype:
        return stored
    values = stored.to(dtype)
    if stored.dtype == torch.float16:
        values.mul_(1.0 / FP16_SCALE)
        if key == "exp_avg_sq":
            values.square_()
    return values


def store(key: str, values: torch.Tensor, stored: torch.Tensor) -> None:
    """Write `values`, which may be overwritten, into the storage of the moment `key`; nothing where
    the two are the same memory."""
    if stored.data_ptr() == values.data_ptr():
        return
    if stored.dtype == torch.float16:
        values = (values.sqrt_() if key == "exp_avg_sq" else values).mul_(FP16_SCALE)
    stored.copy_(values)


def moment_of(name: str) -> str | None:
    """The moment that the tensor `name` of a checkpoint is; None if it is none."""
    return next((key for key in KEYS if name.startswith(f"optimizer.{key}.")), None)


def convert(name: str, saved: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a checkpoint in the dtype of this run. `name`: its name there, which says whether
    it is a moment. Raises ValueError where values exceed the range of fp16."""
    key = moment_of(name)
    if key is None or saved.dtype == dtype:
        return saved.to(dtype)
    wide = torch.promote_types(saved.dtype, torch.float32)
    values = widen(key, saved, wide)
    if dtype.itemsize >= 4:
        return values.to(dtype)
    found = torch.empty_like(values, dtype=dtype)
    store(key, values.clone(), found)
    if values.isfinite().all() and not found.isfinite().all():
        raise ValueError(
            f"{name}: values of the checkpoint exceed the range in which fp16 stores moments; use "
            "bf16 for --exp-avg-dtype and --exp-avg-sq-dtype, or --no-load-optim "
            "[checkpoint-moments-exceed-fp16]"
        )
    return found
