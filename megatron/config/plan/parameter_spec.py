"""One parameter as all who meet it see it (plan, model, checkpoint, optimizer), and how those of
linear layers and norms are made."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config.model_flags import ModelFlags

LAYER_PREFIX = "decoder.layers."


class Matrices(NamedTuple):
    """Which matrices Muon sees in a weight [..., columns]: one, whose rows are all other dims.
    `stacked`: one for each index of dim 0. `parts`: one for each part of a group of rows (queries,
    keys and values), with these numbers of rows in a group."""

    stacked: bool = False
    parts: tuple[int, ...] = ()


ONE_MATRIX = Matrices()


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter under its global name, whichever rank, stage or format holds it.

    `shape` is global; `splits` says which rank axis cuts which dim; `init` is "normal" (with `std`:
    one for all, or one for each index of dim 0), "xavier_uniform", "uniform" (between -`std` and
    it), "log_uniform" (the logarithm of what is between 1 and `std`), "zeros", "ones" or "constant"
    (`std` is the value). `partial` names axes whose ranks hold a copy but always see only part of
    its gradient. `real_rows`: rows of dim 0 that mean something when a vocabulary is padded (the
    rest stay 0), else None. `gradient`: has it one? What has none, a rule of the step updates, in
    at least fp32. `frozen`: neither updates it (--train-only). `matrices`: what Muon updates of it;
    None: nothing. `addition`: the module that begins at its initial values where a checkpoint has
    nothing of it, else "".
    """

    name: str
    shape: tuple[int, ...]
    splits: tuple[tuple[str, int], ...] = ()
    init: str = "zeros"
    std: float | tuple[float, ...] = 0.0
    partial: tuple[str, ...] = ()
    real_rows: int | None = None
    gradient: bool = True
    frozen: bool = False
    matrices: Matrices | None = None
    addition: str = ""

    def partial_axes(self, sequence_parallel: bool) -> tuple[str, ...]:
        """Axes over which the gradients of copies are summed: `partial` and, with sequence
        parallelism, tp unless it is split over tp or of experts: each copy then sees part of the
        tokens."""
        whole = sequence_parallel and not {"tp", "ep"} & dict(self.splits).keys()
        return tuple(dict.fromkeys((*self.partial, *("tp",) * whole)))

    @property
    def trained(self) -> bool:
        """Does the optimizer update it?"""
        return self.gradient and not self.frozen

    @property
    def size(self) -> int:
        """Number of elements over all ranks."""
        return math.prod(self.shape)

    @property
    def padding(self) -> int:
        """Number of these that are in padding rows."""
        return (
            0
            if self.real_rows is None
            else (self.shape[0] - self.real_rows) * math.prod(self.shape[1:])
        )

    @functools.cached_property
    def layer(self) -> int | None:
        """Global number of the transformer layer it belongs to, or None."""
        return (
            int(self.name[len(LAYER_PREFIX) :].split(".", 1)[0])
            if self.name.startswith(LAYER_PREFIX)
            else None
        )

    def local_shape(self, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one rank's part; axes that `axis_sizes` lacks have size 1. Raises ValueError on
        an uneven cut."""
        shape = list(self.shape)
        for axis, dim in self.splits:
            size = axis_sizes.get(axis, 1)
            if shape[dim] % size:
                raise ValueError(
                    f"{self.name}: dim {dim} of size {shape[dim]} does not split over {axis} {size}"
                )
            shape[dim] //= size
        return tuple(shape)


Draw = tuple[str, float | tuple[float, ...]]
Scheme = Callable[[str, int], Draw]  # (role, layer) -> (init, std)
LayerScheme = Callable[[str], Draw]  # that of one layer


def drawn(draw: Draw) -> dict[str, Any]:
    """Initial values as fields of a ParameterSpec."""
    return dict(init=draw[0], std=draw[1])


def norm(
    model: ModelFlags, name: str, width: int, partial: tuple[str, ...] = ()
) -> list[ParameterSpec]:
    """The parameters of a norm over `width` channels."""
    weight = "zeros" if model.apply_layernorm_1p else "ones"
    table = [ParameterSpec(f"{name}.weight", (width,), init=weight, partial=partial)]
    if model.normalization == "LayerNorm":
        table.append(ParameterSpec(f"{name}.bias", (width,), partial=partial))
    return table


def column(
    name: str,
    shape: tuple[int, ...],
    bias: bool,
    draw: Draw,
    matrices: Matrices = ONE_MATRIX,
) -> list[ParameterSpec]:
    """A matrix split by output feature: the dim before the last, so gate and up ([2, ffn, h]) are
    split alike."""
    splits = (("tp", len(shape) - 2),)
    weight = ParameterSpec(f"{name}.weight", shape, splits, **drawn(draw), matrices=matrices)
    return [weight, *([ParameterSpec(f"{name}.bias", shape[:-1], splits)] if bias else [])]


def row(name: str, shape: tuple[int, int], bias: bool, draw: Draw) -> list[ParameterSpec]:
    """A matrix split by input feature; its bias is added after the sum over ranks and is whole on
    each."""
    splits = (("tp", 1),)
    weight = ParameterSpec(f"{name}.weight", shape, splits, **drawn(draw), matrices=ONE_MATRIX)
    return [weight, *([ParameterSpec(f"{name}.bias", shape[:1])] if bias else [])]
