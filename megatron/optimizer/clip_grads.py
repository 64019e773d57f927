"""Norms and zero counts over lists of gradients."""

from collections.abc import Callable, Sequence

import torch

from megatron.kernels.cpu import native

BLOCK = 1 << 22  # elements that a CPU's norm without the C++ converts to fp64 at a time

Reduce = Callable[[torch.Tensor], torch.Tensor]


def identity(tensor: torch.Tensor) -> torch.Tensor:
    """The reduction over one rank."""
    return tensor


def sum_of_squares(
    grads: Sequence[torch.Tensor], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Sum of all squares of `grads` as a float64 0-dim tensor on their device, without a host sync.

    Read once; squares are added in fp32 over at most a tensor (on a CPU, whose long sums drift,
    over 1024 elements), and these sums in float64. Not finite if some gradient is not finite, or so
    large that its square overflows fp32 (except where a CPU adds in float64: fp64 gradients, no
    C++). An empty list gives 0 on `device`.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if grads[0].device.type != "cpu":
        dtype = torch.promote_types(grads[0].dtype, torch.float32)
        return torch.stack(torch._foreach_norm(list(grads), 2, dtype)).double().square().sum()
    if grads[0].dtype == torch.float16:
        zero = torch.zeros((), dtype=torch.float64)
        return sum((sum_of_squares([grad.float()]) for grad in grads), zero)
    alike = all(grad.dtype == grads[0].dtype and grad.is_contiguous() for grad in grads)
    if alike and native.runs(grads[0]):
        return torch.tensor(native.sum_of_squares(grads), dtype=torch.float64)
    blocks = [block for grad in grads for block in grad.reshape(-1).split(BLOCK)]
    norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]
    return torch.stack(norms).square().sum()


def global_norm(
    grads: Sequence[torch.Tensor], reduce_sum: Reduce = identity, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """L2 norm over `grads` of this rank and, through `reduce_sum`, of the others: float64, 0-dim,
    no host sync."""
    return reduce_sum(sum_of_squares(grads, device)).sqrt()


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What to multiply the gradients by so that their norm is at most `max_norm`; 1.0 when it
    already is.

    Megatron's max_norm / (norm + 1e-6), used only when below 1. A NaN norm gives 1.0: the loop
    judges it.
    """
    coefficient = max_norm / (norm + 1.0e-6)
    return coefficient if coefficient < 1.0 else 1.0


def scale_gradients(grads: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply all `grads` in place; nothing is read or written when `factor` is 1."""
    if factor != 1.0 and grads:
        torch._foreach_mul_(list(grads), factor)


def count_zeros(
    grads: Sequence[torch.Tensor],
    reduce_sum: Reduce = identity,
    device: torch.device | str = "cpu",
    factor: float = 1.0,
) -> int:
    """How many elements of `grads` x `factor` are exactly zero, summed by `reduce_sum` (one host
    sync)."""
    if grads:
        nonzero = torch.stack([torch.count_nonzero(grad * factor) for grad in grads]).sum()
    else:
        nonzero = torch.zeros((), dtype=torch.int64, device=device)
    zeros = sum(grad.numel() for grad in grads) - nonzero
    return int(reduce_sum(zeros.double()).item())
