"""Norms and zero counts over lists of gradients."""

from collections.abc import Callable, Sequence

import torch

# a CPU norm over more elements than this in one go loses digits: 3e-3 relative at 4e7 elements
ROW = 1024

Reduce = Callable[[torch.Tensor], torch.Tensor]


def identity(tensor: torch.Tensor) -> torch.Tensor:
    """The reduction over one rank."""
    return tensor


def sum_of_squares(
    grads: Sequence[torch.Tensor], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Sum of all squares of `grads` as a float64 0-dim tensor on their device, without a host sync.

    Read once; each tensor's norm is taken in its own precision, at least fp32 (over rows of 1024
    elements on the CPU, whose long single-precision sums drift), squares are added in float64. Not
    finite if and only if some gradient is not finite or overflows when squared. An empty list gives
    0 on `device`.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    if grads[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(grads), 2, dtype)).double().square().sum()
    pieces: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    for grad in grads:
        flat = grad.reshape(-1)
        whole = flat.numel() // ROW * ROW
        if whole:
            norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype))
        if whole < flat.numel():
            pieces.append(flat[whole:])
    if pieces:
        norms.append(torch.stack(torch._foreach_norm(pieces, 2, dtype)))
    return torch.cat(norms).double().square().sum()


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
