"""--use-precision-aware-optimizer: gradients and Adam moments of fewer bits than the main weights,
and how moments are stored in 16 bits.

bf16 has the range of fp32, so values are stored as they are. fp16 does not: squares of gradients
underflow in it. There the second moment is stored as its square root, and both are multiplied by
2^15. Clipped gradients, and so first moments and roots, are at most 1 (--clip-grad): nothing
overflows, and numbers down to 2e-9 keep fp16's full precision.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.optim.adamw import adamw

from megatron.optimizer.adam import MOMENTS, AdamW, grad_scale, moment_of

FP16_SCALE = 2.0**15
# Elements of which the update has copies in the main weights' dtype at a time.
CHUNK = 2**22


class PrecisionAwareAdamW(AdamW):
    """AdamW whose gradients and moments may have fewer bits than the main weights: they are
    converted a piece at a time, and the update is computed by the same kernels."""

    @torch.no_grad()
    def update(self, grads: Sequence[torch.Tensor], factor: float) -> None:
        """One step with `grads` x `factor`; `grads` in the order of the groups' params. They are
        left alone."""
        remaining = iter(grads)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            params = group["params"]
            steps = [self.state[param]["step"] for param in params]
            for chunk in _chunks(params, [next(remaining) for _ in params]):
                weights = [param.view(-1)[span] for param, _, span in chunk]
                wide = [
                    grad.view(-1)[span].to(weight.dtype, copy=True)
                    for (_, grad, span), weight in zip(chunk, weights, strict=True)
                ]
                scale = grad_scale(factor, wide[0].device) if group["fused"] else None
                if not group["fused"]:
                    torch._foreach_mul_(wide, factor)
                stored = {
                    key: [self.state[param][key].view(-1)[span] for param, _, span in chunk]
                    for key in MOMENTS
                }
                computed = {
                    key: [
                        widen(key, moment, weight.dtype)
                        for moment, weight in zip(moments, weights, strict=True)
                    ]
                    for key, moments in stored.items()
                }
                adamw(
                    weights,
                    wide,
                    computed["exp_avg"],
                    computed["exp_avg_sq"],
                    [],
                    # a parameter of several pieces advances once: the kernels count on copies
                    [self.state[param]["step"].clone() for param, *_ in chunk],
                    foreach=group["foreach"],
                    fused=group["fused"],
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                    grad_scale=scale,
                )
                for key, moments in stored.items():
                    for values, moment in zip(computed[key], moments, strict=True):
                        store(key, values, moment)
            if steps:
                torch._foreach_add_(steps, 1.0)


def _chunks(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, slice]]]:
    """(parameter, its gradient, range of its elements) of all, at most PIECE elements together."""
    chunk: list[tuple[torch.Tensor, torch.Tensor, slice]] = []
    room = CHUNK
    for param, grad in zip(params, grads, strict=True):
        for start in range(0, param.numel(), CHUNK):
            stop = min(start + CHUNK, param.numel())
            if stop - start > room:
                yield chunk
                chunk = []
                room = CHUNK
            chunk.append((param, grad, slice(start, stop)))
            room -= stop - start
    if chunk:
        yield chunk


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


def convert(name: str, saved: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a checkpoint in the dtype of this run. `name`: its name there, which says whether
    it is a moment. Raises ValueError where values exceed the range of fp16."""
    key = moment_of(name)
    if key is None or saved.dtype == dtype:
        return saved.to(dtype)
    values = widen(key, saved, torch.promote_types(saved.dtype, torch.float32))
    if dtype.itemsize >= 4:
        return values.to(dtype)
    converted = torch.empty_like(values, dtype=dtype)
    store(key, values.clone(), converted)
    if values.isfinite().all() and not converted.isfinite().all():
        raise ValueError(
            f"{name}: values of the checkpoint exceed the range in which fp16 stores moments; use "
            "bf16 for --exp-avg-dtype and --exp-avg-sq-dtype, or --no-load-optim "
            "[checkpoint-moments-exceed-fp16]"
        )
    return converted
