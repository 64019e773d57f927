"""What operations on rows (norms, activations, rotary positions, loss, dropout) ask for, and what
C++, Triton, row blocks and torch can compute of it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from megatron.kernels.cpu import native
from megatron.kernels.cpu.blocking import pays_off
from megatron.kernels.cuda import availability
from megatron.kernels.implementation import Implementation, choose

NATIVE = "fused C++"
ROW_BLOCKED = "row-blocked torch"
COMPILED = "not used with --torch-compile"
SEVERAL = "several kernels; --torch-compile fuses them"
# What a row of an operation may ask for beyond the plain one, in the words of messages.
WORDS = {
    "zero_centered": "--apply-layernorm-1p",
    "interleaved": "--rotary-interleaved",
    "no_swiglu_fusion": "--no-bias-swiglu-fusion",
    "no_rope_fusion": "--no-rope-fusion",
    "other_maths": "--fp16-lm-cross-entropy",
    "capped": "--final-logit-softcapping",
    "other_shape": "tensors of other dimensions",
}


class RowSpec(NamedTuple):
    """An operation on tensors of `dtype` on `device`, inside a graph of torch.compile or not, with
    some of WORDS."""

    device: torch.device
    dtype: torch.dtype
    compiled: bool = False
    asked: frozenset[str] = frozenset()

    @property
    def features(self) -> dict[str, str]:
        """The words of what it asks for."""
        return {name: WORDS[name] for name in sorted(self.asked)}


Row = Implementation[RowSpec, Any]


def spec_of(x: Tensor, **asked: bool) -> RowSpec:
    """That of an operation on `x`, here and now."""
    names = frozenset(name for name, wanted in asked.items() if wanted)
    return RowSpec(x.device, x.dtype, torch.compiler.is_compiling(), names)


class RowModule(nn.Module):
    """A module whose operations on rows are chosen when it is built, and again where it is cast or
    moved."""

    _operations: Mapping[str, tuple[Sequence[Row], RowSpec, Mapping[str, Any]]] = {}

    def choose(
        self, name: str, implementations: Sequence[Row], spec: RowSpec, **constants: Any
    ) -> None:
        """Make the attribute `name` the best of the implementations, with these arguments."""
        self._operations = {**self._operations, name: (implementations, spec, constants)}
        forward = choose(implementations, spec).implementation.forward
        setattr(self, name, partial(forward, **constants) if constants else forward)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name, (implementations, spec, constants) in self._operations.items():
            x = fn(torch.empty(0, dtype=spec.dtype, device=spec.device))
            spec = spec._replace(dtype=x.dtype, device=x.device)
            self.choose(name, implementations, spec, **constants)
        return self


def no_cpp(spec: RowSpec) -> str | None:
    """Why the C++ does not compute this."""
    return COMPILED if spec.compiled else native.unavailable_reason(spec.device, spec.dtype)


def no_triton(spec: RowSpec) -> str | None:
    """Why Triton does not."""
    return COMPILED if spec.compiled else availability.unavailable_reason(spec.device, spec.dtype)


def no_row_blocks(spec: RowSpec) -> str | None:
    """Why formulas of torch do not go over blocks of rows."""
    if spec.compiled:
        return COMPILED
    return None if pays_off(spec.device) else f"CPU only; the device is {spec.device.type}"


def _no_graph(spec: RowSpec) -> str | None:
    in_graph = spec.compiled and spec.device.type == "cpu"
    return None if in_graph else "only with --torch-compile on a CPU"


def rivals(
    plain: Callable[..., Tensor],
    blocked: Callable[..., Tensor],
    cpp: Callable[..., Tensor],
    triton: Callable[..., Tensor] | None = None,
    *,
    title: str = "Triton",
    why: str = SEVERAL,
    takes: frozenset[str] = frozenset(),
    cpp_takes: frozenset[str] = frozenset(),
    plain_takes: frozenset[str] = frozenset(),
) -> tuple[Row, ...]:
    """Implementations of one operation, the best first. `title`: that of Triton's. `why`: what
    speaks for torch's own where none of the others is. `takes`: what all take but the C++, which
    takes `cpp_takes`, and torch beyond it `plain_takes`."""
    one_pass = lambda spec: "single pass over memory"  # noqa: E731
    by_triton = Implementation("triton", title, triton, takes, no_triton, why=one_pass)
    return (
        Implementation("cpp", NATIVE, cpp, cpp_takes, no_cpp, why=one_pass),
        *[by_triton] * (triton is not None),
        Implementation(
            "blocked",
            ROW_BLOCKED,
            blocked,
            takes,
            no_row_blocks,
            lambda spec: "multiple passes over the cache",
            lambda spec: "row blocks stay in the cache",
        ),
        # torch.compile makes blocks of its own
        Implementation(
            "graph",
            ROW_BLOCKED,
            plain,
            takes,
            _no_graph,
            why=lambda spec: "row blocks stay in the cache",
        ),
        Implementation(
            "torch",
            "torch",
            plain,
            takes | plain_takes,
            slower=lambda spec: "multiple passes over memory",
            why=lambda spec: next(iter(spec.features.values()), why),
        ),
    )


def only(forward: Callable[..., Tensor], *better: Row) -> tuple[Row, ...]:
    """Torch's operation, which no other suite has but these."""
    takes = frozenset(WORDS)
    why = lambda spec: "only implementation"  # noqa: E731
    return (*better, Implementation("torch", "torch", forward, takes, why=why))
