"""Dropout whose mask is a pure function of (seed, shape); keeps no generator state, no mask, knows
no layer."""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.cpu import native
from megatron.kernels.cuda.availability import unavailable_reason as no_triton_here
from megatron.kernels.implementation import Implementation
from megatron.kernels.rows import Row, RowSpec, no_triton

CHUNK_ELEMENTS = 1 << 16  # drawn and applied at a time on a CPU, so that they stay in the cache
LAUNCH_ELEMENTS = 1 << 24  # elsewhere, where each operation is a launch
LANES = 4  # 16-bit lanes of one 64-bit draw


def seeded(device: torch.device, seed: int) -> torch.Generator:
    """A generator of `device`. The meta device (--dry-run --trace) draws nothing and has none."""
    kind = "cpu" if device.type == "meta" else device
    # A CPU generator takes 32 bits of its seed: fold the upper ones in.
    return torch.Generator(device=kind).manual_seed(seed ^ (seed >> 32))


class DropoutBits:
    """A stream of dropout masks that depends on the seed alone.

    An element is kept if 16 random bits are below a threshold. (1 - p) 2^16 is not an integer, so
    every chunk takes the integer below or above it at random, in such a proportion that each
    element is kept with probability 1 - p to float precision. One 64-bit draw serves four elements:
    several times cheaper than bernoulli_ on a CPU.
    """

    def __init__(self, seed: int, p: float, device: torch.device):
        assert 0.0 <= p <= 1.0 - 2**-16, f"dropout probability must be in [0, 1), got {p}"
        self.device = device
        self.generator = seeded(device, seed)
        self.dither = random.Random(seed)
        self.level = (1.0 - p) * 2**16
        self.chunk = CHUNK_ELEMENTS if device.type == "cpu" else LAUNCH_ELEMENTS

    def keep(self, elements: int, dtype: torch.dtype) -> Tensor:
        """The next `elements` of the stream as a flat tensor: 1 keep, 0 drop."""
        out = torch.empty(elements, dtype=dtype, device=self.device)
        for chunk in out.split(self.chunk):
            lanes, most = self.draw(chunk.numel())
            chunk.copy_(lanes.le_(most))
        return out

    def draw(self, elements: int) -> tuple[Tensor, int]:
        """For the next `elements`, at most a chunk: 16 random bits each, int16, and the largest
        value that keeps one."""
        draws = torch.empty(-(-elements // LANES), dtype=torch.int64, device=self.device)
        draws.random_(-(2**63), None, generator=self.generator)
        below = int(self.level + self.dither.random()) - 2**15  # the lanes are signed
        # fits 16 bits even if every lane is below
        return draws.view(torch.int16)[:elements], below - 1


Apply = Callable[[Tensor, DropoutBits, float, Tensor], None]


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float, seed: int, apply: Apply) -> Tensor:
        ctx.how = p, seed, apply
        return _drop(x, p, seed, apply)

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        return _drop(grad_out, *ctx.how), None, None, None


def _drop(x: Tensor, p: float, seed: int, apply: Apply | None = None) -> Tensor:
    bits = DropoutBits(seed, p, x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    apply = apply or _multiply
    for chunk, target in zip(
        x.reshape(-1).split(bits.chunk), out.view(-1).split(bits.chunk), strict=True
    ):
        apply(chunk, bits, 1.0 / (1.0 - p), target)
    return out


def _multiply(chunk: Tensor, bits: DropoutBits, factor: float, target: Tensor) -> None:
    wide = torch.promote_types(chunk.dtype, torch.float32)
    torch.mul(chunk, bits.keep(chunk.numel(), wide).mul_(factor), out=target)


def _in_cpp(chunk: Tensor, bits: DropoutBits, factor: float, target: Tensor) -> None:
    """One pass on this thread: operations of torch would wait for others in each."""
    native.drop(chunk, *bits.draw(chunk.numel()), factor, target)


def jitter(x: Tensor, eps: float, seed: int) -> Tensor:
    """Multiply each element by a random number, uniform between 1 - eps and 1 + eps: a pure
    function of (seed, shape) on a kind of device."""
    wide = torch.promote_types(x.dtype, torch.float32)
    noise = torch.empty(x.shape, dtype=wide, device=x.device)
    noise.uniform_(generator=seeded(x.device, seed))
    return x * noise.mul_(2 * eps).add_(1 - eps).to(x.dtype)


def _seeded(apply: Apply) -> Callable[..., Tensor]:
    def seeded(x: Tensor, p: float, seed: int | Tensor, residual: Tensor | None) -> Tensor:
        dropped = _Dropout.apply(x, p, int(seed), apply)
        return dropped if residual is None else residual + dropped

    return seeded


def _in_triton(x: Tensor, p: float, seed: int | Tensor, residual: Tensor | None) -> Tensor:
    from megatron.kernels.cuda.fused_ops import Dropout

    return Dropout.apply(x, p, torch.as_tensor(seed), residual)


def _in_graph(x: Tensor, p: float, seed: int | Tensor, residual: Tensor | None) -> Tensor:
    """The graph adds while it computes what follows."""
    dropped = _in_triton(x, p, seed, None)
    return dropped if residual is None else residual + dropped


def _no_graph(spec: RowSpec) -> str | None:
    if not spec.compiled:
        return "only with --torch-compile"
    return no_triton_here(spec.device, spec.dtype)


def _mask(
    name: str, forward: Callable[..., Tensor], unavailable: Callable[[RowSpec], str | None]
) -> Row:
    why = "reproducible in recomputation and on resume"
    return Implementation(
        name, "seeded mask", forward, unavailable=unavailable, why=lambda spec: why
    )


# Where a graph has no such kernel, a compiled layer leaves dropout outside.
DROPOUT: tuple[Row, ...] = (
    _mask("graph", _in_graph, _no_graph),
    _mask("triton", _in_triton, no_triton),
    _mask(
        "cpp",
        _seeded(_in_cpp),
        lambda spec: native.unavailable_reason(spec.device, spec.dtype),
    ),
    _mask("chunked", _seeded(_multiply), lambda spec: None),
    Implementation(
        "torch",
        "torch",
        lambda x, p, seed, residual: F.dropout(x, p),
        unavailable=lambda spec: "not reproducible: mask depends on the global RNG state",
    ),
)
