"""Parameter sharding metadata: shape, split axes, initialization and which copies count, in one
record per parameter."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron import host, launcher
from megatron.config.plan.parameter_spec import Matrices, ParameterSpec
from megatron.parallel.context import ParallelContext

GIVEN = "given"  # initial values of a parameter that came with them


@dataclass(frozen=True)
class Sharding:
    """What initialisation, gradient sums, norms and checkpoints need to know of a parameter
    (`p.sharding`).

    name, shape: the global ones; a tied copy has the name of the original. splits: (axis, dim)
    pairs that cut it. replicas: `dense` or `experts`, the ranks of ParallelContext that hold the
    same part and see other tokens (gradients are summed over them).
    partial: axes whose ranks hold a copy that saw only part of its gradient (gradients are summed
    over them). init, std: its initial values ("normal", "xavier_uniform", "uniform", "log_uniform",
    "zeros", "ones", "constant", GIVEN).
    real_rows: rows of dim 0 that are not padding, or None for all. matrices: what Muon updates.
    frozen: nothing updates it.
    """

    name: str
    shape: tuple[int, ...]
    splits: tuple[tuple[str, int], ...] = ()
    replicas: str = "dense"
    partial: tuple[str, ...] = ()
    init: str = "zeros"
    std: float | tuple[float, ...] = 0.0
    real_rows: int | None = None
    matrices: Matrices | None = None
    frozen: bool = False


if TYPE_CHECKING:

    class Parameter(torch.nn.Parameter):
        """torch's, with what this suite sets on it: here `sharding`, in GradBuffers the others."""

        sharding: Sharding
        main_grad: torch.Tensor
        overwrites: bool
        is_stale: bool

else:
    Parameter = torch.nn.Parameter

Box = tuple[tuple[int, int], ...]


def local_box(sharding: Sharding, ctx: ParallelContext) -> Box:
    """(start, stop) of this rank's part in each dim of the global tensor."""
    box = [(0, size) for size in sharding.shape]
    for name, dim in sharding.splits:
        axis = getattr(ctx, name)
        start, stop = box[dim]
        assert (stop - start) % axis.size == 0, (
            f"{sharding.name}: {stop - start} does not split over {name}"
        )
        size = (stop - start) // axis.size
        box[dim] = (start + axis.rank * size, start + (axis.rank + 1) * size)
    return tuple(box)


def is_primary_copy(sharding: Sharding, ctx: ParallelContext) -> bool:
    """Is this, among the ranks that hold one replica of the model, the copy that counts in norms
    and checkpoints?

    (Which of the data-parallel replicas writes is the caller's business: they hold the same.)
    """
    split = {axis for axis, _ in sharding.splits}
    copies = {*sharding.partial} if "ep" in split else {"tp", *sharding.partial} - split
    return all(getattr(ctx, axis).rank == 0 for axis in copies)


def counts_in_norm(sharding: Sharding, ctx: ParallelContext) -> bool:
    """Is this the copy that counts among the ranks of the optimizer's axis? Where other
    ranks hold the same experts than the rest, those are all ranks, and replicas count once."""
    once = ctx.experts is ctx.dense or ctx.replicas(sharding.replicas).instances.rank == 0
    return once and is_primary_copy(sharding, ctx)


def parameter(
    spec: ParameterSpec,
    ctx: ParallelContext,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    partial: tuple[str, ...] = (),
) -> Parameter:
    """This rank's part of the parameter, its memory not yet filled, with its record as `.sharding`.
    Where ranks share it, it has no memory before `ShardedBuffers` give it some.

    `partial`: axes in addition to the spec's own over which its gradient is summed.
    """
    axes = tuple(dict.fromkeys((*spec.partial, *partial)))
    sharding = Sharding(
        spec.name,
        spec.shape,
        spec.splits,
        "experts" if "ep" in dict(spec.splits) else "dense",
        partial=axes,
        init=spec.init,
        std=spec.std,
        real_rows=spec.real_rows,
        matrices=spec.matrices,
        frozen=spec.frozen,
    )
    shape = [stop - start for start, stop in local_box(sharding, ctx)]
    dtype = dtype if spec.gradient else torch.promote_types(dtype, torch.float32)
    built = Parameter(torch.empty(shape, dtype=dtype, device=device), spec.trained)
    built.sharding = sharding
    shared = ctx.shares_weights and ctx.replicas(sharding.replicas).shard.size > 1
    if shared and spec.trained:
        built.untyped_storage().resize_(0)
    return built


def sharding_of(p: torch.Tensor) -> Sharding:
    """The record of a parameter, or of the parameter that this is a part of (`GradBuffers`)."""
    return p.sharding  # type: ignore[attr-defined]  # modules give out torch's type


class ParameterFactory:
    """Makes the parameters of a table by name.

    `make_scaling`: from a linear layer's name to its FP8 scales, or None without FP8
    GEMMs.
    """

    def __init__(
        self,
        table: Iterable[ParameterSpec],
        ctx: ParallelContext,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        make_scaling: Callable[..., Any] | None = None,
    ):
        self._specs = {spec.name: spec for spec in table}
        self._ctx = ctx
        self._dtype = dtype
        self._device = device
        self._prefix = ""
        self._make_scaling = make_scaling

    def scope(self, path: str) -> ParameterFactory:
        """The same factory for names under `path`."""
        inner = ParameterFactory(
            self._specs.values(), self._ctx, self._dtype, self._device, self._make_scaling
        )
        inner._prefix = f"{self._prefix}{path}."
        return inner

    def optional(self, name: str) -> Parameter | None:
        """The parameter of this name, or None where the table lacks it (a bias that is off)."""
        return self(name) if self._prefix + name in self._specs else None

    def __call__(self, name: str, partial: tuple[str, ...] = ()) -> Parameter:
        """The parameter of this name. `partial`: see `parameter`."""
        spec = self._specs[self._prefix + name]
        partial = (*spec.partial_axes(self._ctx.sequence_parallel), *partial)
        return parameter(spec, self._ctx, self._dtype, self._device, partial)

    def scaling(self, name: str, **options: bool) -> Any:
        """The FP8 scales of the linear layer of this name, or None; `options` are
        `make_scaling`'s."""
        return self._make_scaling and self._make_scaling(self._prefix + name, **options)


def init_parameters(params: Iterable[torch.nn.Parameter], ctx: ParallelContext, seed: int) -> None:
    """Fill parameters with their initial values: a function of (seed, global name) and of nothing
    else.

    Values are drawn in fp32 on the CPU, whole, then cut and cast, so every layout, device and dtype
    starts alike; padding rows of a vocabulary are 0.
    """
    # without memory: of --dry-run --trace, and those that ShardedBuffers fill
    params = [p for p in params if p.device.type != "meta" and p.untyped_storage().nbytes()]
    # The generators run outside the interpreter's lock and the order does not matter, so threads
    # share the work. Not torch's number of them: torchrun sets that to 1.
    with ThreadPoolExecutor(_drawing_threads()) as pool:
        list(pool.map(lambda p: _fill(p, ctx, seed), params))


def _drawing_threads() -> int:
    """This rank's share of the cores, at most 8: each thread holds a whole tensor in fp32."""
    return min(8, max(1, host.cores() // (launcher.info().local_world_size or 1)))


@torch.no_grad()
def _fill(p: torch.nn.Parameter, ctx: ParallelContext, seed: int) -> None:
    sharding = sharding_of(p)
    if sharding.init == GIVEN:
        return
    if sharding.init == "ones":
        p.fill_(1.0)
    elif sharding.init == "constant":
        assert not isinstance(sharding.std, tuple), sharding
        p.fill_(sharding.std)
    elif sharding.init == "zeros":
        p.zero_()
    else:
        (start, stop), *other_spans = local_box(sharding, ctx)
        values = draw_values(sharding, seed)
        local = values[start:stop][(slice(None), *(slice(*span) for span in other_spans))]
        p[: local.shape[0]].copy_(local)
        p[local.shape[0] :].zero_()


def draw_values(sharding: Sharding, seed: int) -> torch.Tensor:
    """The whole drawn tensor in fp32 on the CPU, without a vocabulary's padding rows."""
    rows = sharding.shape[0] if sharding.real_rows is None else sharding.real_rows
    digest = hashlib.sha256(f"{seed}/{sharding.name}".encode()).digest()
    # torch's CPU generator keeps only 32 bits of its seed.
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    values = torch.empty((rows, *sharding.shape[1:]), dtype=torch.float32)
    if sharding.init == "normal":
        if not isinstance(sharding.std, tuple):
            return values.normal_(0.0, sharding.std, generator=generator)
        for matrix, std in zip(values, sharding.std, strict=True):
            matrix.normal_(0.0, std, generator=generator)
        return values
    if sharding.init in ("uniform", "log_uniform"):
        assert not isinstance(sharding.std, tuple), sharding
        if sharding.init == "uniform":
            return values.uniform_(-sharding.std, sharding.std, generator=generator)
        return values.uniform_(1.0, sharding.std, generator=generator).log_()
    assert sharding.init == "xavier_uniform", (
        f"{sharding.name}: no such initialisation as {sharding.init!r}"
    )
    fans = sharding.shape[-1] + math.prod((rows, *sharding.shape[1:-1]))
    bound = math.sqrt(6.0 / fans)
    return values.uniform_(-bound, bound, generator=generator)
