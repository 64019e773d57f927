"""The weights of a run that is training, whole, one tensor at a time, in any layout."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.checkpoint.safetensors_file import flat_bytes
from megatron.checkpoint.tensor_slices import Box, slices
from megatron.config.run_directory import iteration_directory
from megatron.data.tokenizers.build import Tokenizer
from megatron.parallel.collectives import all_reduce_, broadcast_
from megatron.parallel.sharding import is_primary_copy
from megatron.training.checkpointing.save import own_tensors, state_of
from megatron.training.run import Run

from .native import NativeModel

END = -1


class RunTensors:
    """A run's weights by name. All ranks read the same ones in the same order."""

    def __init__(self, run: Run):
        self._run = run
        self._specs = {spec.name: spec for spec in run.plan.parameters}
        self._dtype = getattr(torch, run.config.precision.params_dtype)
        # what this rank adds to whole tensors: views of its memory
        self._own = {
            name: parts
            for name, sharding, copies, parts in own_tensors(run)
            if name in self._specs
            and copies.rank == 0
            and is_primary_copy(sharding, run.runtime.ctx)
        }
        self._kept: tuple[str, torch.Tensor] | None = None  # one that several are made of

    def names(self) -> list[str]:
        """All names."""
        return list(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        """With padding rows."""
        return self._specs[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Number format: tensors without a gradient are fp32 in every precision."""
        has_gradient = self._specs[name].gradient
        return self._dtype if has_gradient else torch.promote_types(self._dtype, torch.float32)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A part of a tensor."""
        if self._kept is None or self._kept[0] != name:
            self._kept = None  # its memory is free before the next one comes
            self._kept = name, self.whole(name)
        return self._kept[1][slices(box)]

    def close(self) -> None:
        """No more is read."""
        self._kept = None

    @torch.no_grad()
    def whole(self, name: str) -> torch.Tensor:
        """The whole tensor, on this rank's device, in memory of its own.

        Each element is written by one rank, and the bytes are summed: zero elsewhere, they stay
        what they are (-0.0 too), whatever axes the tensor is split over."""
        device = self._run.runtime.device
        tensor = torch.zeros(self.shape(name), dtype=self.dtype(name), device=device)
        for box, part in self._own.get(name, ()):
            tensor[slices(box)] = part
        all_reduce_(flat_bytes(tensor), self._run.runtime.ctx.world)
        return tensor


class TensorsOfRankZero(RunTensors):
    """Rank 0 reads in the order it likes, until `close`; the others `serve` meanwhile."""

    def __init__(self, run: Run):
        super().__init__(run)
        self._order = self.names()

    def whole(self, name: str) -> torch.Tensor:
        """As rank 0 asks for it."""
        self._agree(self._order.index(name))
        return super().whole(name)

    def close(self) -> None:
        """Let the others go on."""
        super().close()
        self._agree(END)

    def serve(self) -> None:
        """Give this rank's parts of what rank 0 reads."""
        while (number := self._agree()) != END:
            super().whole(self._order[number])

    def _agree(self, number: int = END) -> int:
        world = self._run.runtime.ctx.world
        if world.size == 1:
            return number
        told = torch.tensor([number], device=self._run.runtime.device)
        return int(broadcast_(told, world).item())


class RunModel(NativeModel):
    """A run as it is now, seen as the checkpoint of its iteration in `folder`."""

    def __init__(
        self, tensors: RunTensors, run: Run, folder: Path, tokenizer: Tokenizer | None = None
    ):
        """`tokenizer`: if it exists already."""
        directory = iteration_directory(folder, run.progress.iteration)
        super().__init__(run.config, directory, state_of(run), tensors)
        self._tokenizer = tokenizer

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built once."""
        self._tokenizer = self._tokenizer or super().tokenizer()
        return self._tokenizer
