"""A batch of the caller's in micro-batches: what the step reads, what the loss function gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import all_reduce_
from megatron.parallel.zigzag import my_chunks
from megatron.training.batch import Batch, MicroBatch, masks_of
from megatron.training.run import Run
from megatron.training.step import ForwardStep, Losses

from .entropy import LogitsSeen

TOKENS, MASK = "tokens", "loss_mask"
RESERVED = ("labels", "entropy")  # what `data` of a loss function has besides the batch
LossFunction = Callable[[torch.Tensor, dict[str, torch.Tensor]], Losses]


class Batches:
    """Micro-batches of `size` samples of a batch that must have `rows`. Raises ValueError for
    tensors of another shape or type."""

    def __init__(self, run: Run, batch: Mapping[str, torch.Tensor], rows: int, size: int):
        self._run = run
        self._length = run.config.model.seq_length
        self._size = size
        self._check(batch, rows)
        self._tokens = batch[TOKENS].cpu()
        self._mask = batch[MASK].float().cpu() if MASK in batch else None
        self._more = {name: x for name, x in batch.items() if name not in (TOKENS, MASK)}
        self._next = 0  # of the micro-batches, the one that is read next
        self._numbers: dict[int, int] = {}  # of those that are under way, by their labels
        self._number = 0  # the one that the loss function sees

    @property
    def count(self) -> int:
        """Micro-batches."""
        return len(self._tokens) // self._size

    def _check(self, batch: Mapping[str, torch.Tensor], rows: int) -> None:
        tokens = batch.get(TOKENS)
        if tokens is None:
            raise ValueError('batch: has no "tokens" [rows, s + 1] [engine-batch]')
        if tokens.dtype != torch.int64 or tuple(tokens.shape) != (rows, self._length + 1):
            raise ValueError(
                f'batch: "tokens" are {tokens.dtype} {list(tokens.shape)}; give int64 '
                f"{[rows, self._length + 1]}: this rank's samples, each of --seq-length tokens and "
                "one more [engine-batch]"
            )
        low, high = tokens.aminmax()
        if low < 0 or high >= self._run.plan.vocab_size:
            raise ValueError(
                f'batch: "tokens" has ids from {int(low)} to {int(high)}; the vocabulary is 0 to '
                f"{self._run.plan.vocab_size - 1} [engine-batch]"
            )
        for name, tensor in batch.items():
            if name in RESERVED:
                raise ValueError(f'batch: "{name}" is made here; call it otherwise [engine-batch]')
            if name != TOKENS and tuple(tensor.shape) != (rows, self._length):
                raise ValueError(
                    f'batch: "{name}" is {list(tensor.shape)}; give {[rows, self._length]}, a '
                    "value for each token that is predicted [engine-batch]"
                )

    def _rows(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x[number * self._size : (number + 1) * self._size]

    def read(self) -> Iterator[MicroBatch]:
        """What the step reads."""
        for number in range(self.count):
            self._next = number
            tokens = self._rows(self._tokens, number)
            if self._mask is None:
                yield MicroBatch(tokens)
                continue
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
            counts, positions, _ = masks_of(MicroBatch(tokens), self._run.rules)
            mask = self._rows(self._mask, number)
            mask = mask.contiguous() if counts is None else mask * counts
            restart = positions is not None
            if positions is None:
                positions = torch.arange(self._length).expand_as(inputs)
            bits = mask.view(torch.int32).long()
            rows = torch.stack((inputs, labels, positions, torch.zeros_like(inputs), bits), 1)
            yield MicroBatch(rows, packed=True, counted=not restart)

    def forward_step(self, loss_fn: LossFunction, entropy: bool) -> ForwardStep:
        """What the step calls with each micro-batch and each chunk of the model."""

        def forward(batch: Batch, model: GPTModel) -> Losses | torch.Tensor:
            # its labels are the same tensor from this rank's first chunk, before which it is read,
            # to the last one
            number = self._numbers.setdefault(id(batch.labels), self._next)
            seen = LogitsSeen()
            last = model.output_layer is not None
            with seen.of(model) if entropy and last else nullcontext():
                output = model(
                    batch.tokens, batch.position_ids, labels=batch.labels, **batch.extras
                )
            if model is self._run.model[len(self._run.model) - 1]:
                del self._numbers[id(batch.labels)]
            if not last:
                return output
            self._number = number
            data = self._data(batch, number)
            if entropy:
                data["entropy"] = seen.entropy(model)
            return loss_fn(-output, data)

        return forward

    def _data(self, batch: Batch, number: int) -> dict[str, torch.Tensor]:
        """The tensors of a micro-batch on this rank's device, and its part of the sequence."""
        cp, device = self._run.runtime.ctx.cp, batch.tokens.device
        data = {
            name: my_chunks(self._rows(x, number).to(device), cp) for name, x in self._more.items()
        }
        mask = batch.loss_mask
        if mask is None:
            mask = torch.ones(batch.tokens.shape, device=device)
        return {**data, TOKENS: batch.tokens, "labels": batch.labels, MASK: mask}

    # --- outputs of each token

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [rows, s]."""
        shape = len(self._tokens), self._length
        return torch.zeros(shape, dtype=dtype, device=self._run.runtime.device)

    def place(self, whole: torch.Tensor, values: torch.Tensor) -> None:
        """Put what this rank computed of the current micro-batch into its place."""
        places = torch.arange(self._length, device=whole.device).unsqueeze(0)
        columns = my_chunks(places, self._run.runtime.ctx.cp)[0]
        self._rows(whole, self._number)[:, columns] = values

    def shared(
        self, found: Mapping[str, torch.Tensor], names: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """What the last stage found, whole, on all ranks with these samples."""
        ctx = self._run.runtime.ctx
        wide = torch.promote_types(
            getattr(torch, self._run.config.precision.params_dtype), torch.float32
        )
        result: dict[str, Any] = {}
        for name in names:
            tensor = found.get(name, self.empty(wide)).to(wide)
            result[name] = all_reduce_(all_reduce_(tensor, ctx.cp), ctx.pp)
        return result
