"""What a layer is made of: its description, and the questions that every kind of block answers
without torch.

A kind of block is a folder: `facts.py` has its class derived from `Block`, `module.py` computes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from megatron.config.model_flags import ModelFlags
from megatron.config.plan.parameter_spec import Draw, LayerScheme, ParameterSpec, Scheme, norm
from megatron.config.plan.transfer import Traffic
from megatron.config.rope import Rope

# Norms of a layer, by their names in checkpoints, in the model's order.
BEFORE_MIXER = "input_layernorm"
AFTER_MIXER = "post_self_attn_layernorm"
BEFORE_MLP = "pre_mlp_layernorm"
AFTER_MLP = "post_mlp_layernorm"


Residual = Literal["pre", "parallel", "normed"]


class Rules(Protocol):
    """Of `megatron.config.checks.facts.Facts`, what rules of a block read."""

    typed: Collection[str]
    bad: set[str]
    world_size: int
    config: Any  # Config, which knows this module

    def __getitem__(self, name: str) -> Any: ...

    def ok(self, *names: str) -> bool: ...

    def say(self, name: str) -> str: ...


class Sizes(Protocol):
    """Of `megatron.config.plan.costs.MicroBatchSizes`, what a block computes with."""

    config: Any  # Config, which knows this module
    tp: int
    cp: int
    etp: int
    sequence: bool
    tokens: int
    rows: int
    expert_tokens: int
    hidden: int
    itemsize: int
    wide: int
    residual: int
    on_cpu: bool
    native: bool

    def norm(self, rows: int, width: int, itemsize: int) -> int: ...

    def linear_backward(self, outputs: int, inputs: int) -> int: ...


@dataclass(frozen=True)
class Block(ABC):
    """One block of a layer, a mixer of tokens or an MLP. What all blocks have in common is in
    `model`; what differs from layer to layer is a field.

    scope: the name of its parameters below the layer's. recomputed_as: by which name of
    --recompute-modules the whole block is recomputed. made_again: by which ones parts of it. Bytes
    are those of one rank and one micro-batch (`sizes`).
    """

    model: ModelFlags = field(hash=False)  # the same of all blocks

    scope: ClassVar[str]
    recomputed_as: ClassVar[str]
    made_again: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def text(self) -> str:
        """Its sizes in words."""

    @abstractmethod
    def refuses(self, f: Rules) -> Iterator[str]:
        """One line for each flag or size that it cannot be combined with."""

    @abstractmethod
    def uneven(self, tp: int, etp: int) -> Iterator[tuple[str, int]]:
        """(what it is, its size) of what so many (expert-)tensor-parallel ranks cannot share
        equally."""

    @abstractmethod
    def gemm_sizes(self, tp: int, etp: int) -> Iterator[tuple[int, str, str]]:
        """(inner dimension of a GEMM of a rank, what it is, what changes it)."""

    @abstractmethod
    def parameters(self, prefix: str, draw: LayerScheme) -> list[ParameterSpec]:
        """Its parameters, whose names begin with `prefix`."""

    @abstractmethod
    def saved(self, sizes: Sizes) -> int:
        """Bytes that its forward keeps for backward."""

    @abstractmethod
    def backward(self, sizes: Sizes) -> int:
        """The most bytes that its backward holds in addition: gradients, tensors that are gathered
        or summed, a weight's gradient before it is added."""

    @abstractmethod
    def traffic(self, sizes: Sizes) -> Traffic:
        """What it sends and receives."""


@dataclass(frozen=True)
class Mixer(Block):
    """A block in which a token sees earlier ones. rope: its rotary positions, None without;
    comm_type: how context-parallel ranks communicate in it."""

    rope: Rope | None = None
    comm_type: str = field(default="p2p", kw_only=True)

    @abstractmethod
    def core_flops(self) -> int:
        """Operations for a token, forward, of products in which no weights are: attention's."""

    @abstractmethod
    def attention(self, tp: int) -> dict[str, Any]:
        """What a rank asks of attention, by the fields of kernels/attention_spec.py; {} without."""

    @abstractmethod
    def cache(self, tp: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what generation keeps of one position, by name."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer: either block may be absent. `norms`: those of the four names above that it has.

    residual: `pre` x + block(x) one after the other; `parallel` both blocks read the layer's input;
    `normed` the stream itself is normed before each block.
    """

    mixer: Mixer | None
    mlp: Block | None
    residual: Residual
    norms: tuple[str, ...]

    @property
    def rope(self) -> Rope | None:
        """Rotary positions of its mixer."""
        return None if self.mixer is None else self.mixer.rope

    @property
    def blocks(self) -> list[Block]:
        """Those that it has, in order."""
        return [block for block in (self.mixer, self.mlp) if block is not None]

    @property
    def outer(self) -> list[Block]:
        """Blocks beside these that recomputing the layer leaves alone."""
        return []

    def parameters(
        self, model: ModelFlags, prefix: str, number: int, scheme: Scheme
    ) -> list[ParameterSpec]:
        """All of its parameters as layer `number`, named below `prefix`, in the model's order."""

        def draw(role: str) -> Draw:
            return scheme(role, number)

        table: list[ParameterSpec] = []
        parts = ((BEFORE_MIXER, self.mixer, AFTER_MIXER), (BEFORE_MLP, self.mlp, AFTER_MLP))
        for before, block, after in parts:
            if before in self.norms:
                table += norm(model, prefix + before, model.hidden_size)
            if block is not None:
                table += block.parameters(f"{prefix}{block.scope}.", draw)
            if after in self.norms:
                table += norm(model, prefix + after, model.hidden_size)
        return table

    def saved(self, sizes: Sizes) -> int:
        """Bytes that its forward keeps for backward: norms' inputs and results, and its blocks."""
        normed = sizes.rows * sizes.hidden * sizes.itemsize
        before = sum(name in self.norms for name in (BEFORE_MIXER, BEFORE_MLP))
        after = len(self.norms) - before
        return (
            len(self.blocks) * normed
            + before * sizes.norm(sizes.rows, sizes.hidden, sizes.residual)
            + after * sizes.norm(sizes.rows, sizes.hidden, sizes.itemsize)
            + sum(block.saved(sizes) for block in self.blocks)
            - self.recomputed(sizes)
        )

    def recomputed(self, sizes: Sizes) -> int:
        """What of them is kept only while a block is computed again by itself."""
        modules = sizes.config.training.recomputed_modules
        return sum(block.saved(sizes) for block in self.blocks if block.recomputed_as in modules)

    def backward(self, sizes: Sizes) -> int:
        """The most bytes that its backward holds in addition to what its forward kept."""
        return max((block.backward(sizes) for block in self.blocks), default=0)


def fit(size: int) -> str:
    """Which numbers of ranks can share `size` equally."""
    return f"use {', '.join([str(n) for n in range(1, size + 1) if size % n == 0][:12])}"
