"""One micro-batch: which samples it holds, and from their tokens to what the model takes. Knows no
process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from megatron.config.plan.batch_size import BatchSizeSchedule
from megatron.config.skip_ranges import SkipRanges
from megatron.data.packed.packed_dataset import LABELS, POSITIONS, SUBSET, TOKENS
from megatron.parallel.context import Axis
from megatron.parallel.random import DropoutSeeds
from megatron.parallel.zigzag import my_chunks
from megatron.training.launch.signals import WorkerSignals


@dataclass(frozen=True)
class Batch:
    """What one forward pass reads; [b, s] each. None stands for the plain case: every token counts,
    positions run from 0 to s - 1, one document a row, no dropout. With context parallelism these
    are this rank's chunks, [b, s/cp], and position_ids are always there, [1, s/cp] where all rows
    have the same; document_ids stay whole. `hidden` [s, b, h] comes from the pipeline stage before,
    if there is one. Of packed samples b is 1 and s a whole row. `subset_ids`, where subsets of the
    data are counted, say which each token is of: [b, 1], of packed samples [1, s/cp].
    `token_metrics` name what the model is to return of each token besides its loss."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    dropout_seeds: DropoutSeeds | None = None
    hidden: torch.Tensor | None = None
    subset_ids: torch.Tensor | None = None
    token_metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchRules:
    """How end-of-document tokens are treated, over which ranks the sequence is split, and whether
    samples are packed."""

    eod: int | None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    cp: Axis = Axis("cp")
    packed: bool = False


def make_batch(
    samples: torch.Tensor,
    rules: BatchRules,
    device: torch.device,
    dropout_seeds: DropoutSeeds | None = None,
    with_subset: bool = False,
    token_metrics: tuple[str, ...] = (),
) -> Batch:
    """Samples [b, s+1] on the host -> Batch on the device: inputs and labels are the same tokens,
    one apart. `with_subset`: [b, s+2], the last being the number of a subset.

    A document ends with its end-of-document token: the next position starts a new one.
    `eod_mask_loss` drops the loss where the INPUT is that token (predicting the first token of the
    next document), as Megatron does. A rank's chunks are taken last, since what holds for a token
    depends on those before it. Of packed samples [1, 4, s] see `_packed_batch`.
    """
    samples = samples.to(device, non_blocking=True)
    if rules.packed:
        return _packed_batch(samples, rules.cp, dropout_seeds, token_metrics)
    subset_ids = None
    if with_subset:
        samples, subset_ids = samples[:, :-1], samples[:, -1:]
    tokens = samples[:, :-1].contiguous()
    labels = samples[:, 1:].contiguous()
    loss_mask = position_ids = document_ids = None
    if rules.reset_position_ids or rules.reset_attention_mask or rules.eod_mask_loss:
        ends = tokens == rules.eod
        if rules.eod_mask_loss:
            loss_mask = (~ends).float()
        documents = ends.cumsum(1) - ends.long()
        if rules.reset_attention_mask:
            document_ids = documents
        if rules.reset_position_ids:
            positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
            starts = (
                torch.where(torch.nn.functional.pad(ends[:, :-1], (1, 0)), positions, 0)
                .cummax(1)
                .values
            )
            position_ids = positions - starts
    if rules.cp.size > 1 and position_ids is None:
        position_ids = torch.arange(tokens.shape[1], device=device).unsqueeze(0)
    mine = (
        None if x is None else my_chunks(x, rules.cp)
        for x in (tokens, labels, loss_mask, position_ids)
    )
    return Batch(
        *mine, document_ids, dropout_seeds, subset_ids=subset_ids, token_metrics=token_metrics
    )


def _packed_batch(
    lines: torch.Tensor,
    cp: Axis,
    dropout_seeds: DropoutSeeds | None,
    token_metrics: tuple[str, ...],
) -> Batch:
    """A row of packed samples, lines [1, 4, s] as
    `megatron.data.packed.packed_dataset.PackedDataset` has them: positions begin anew with each
    piece, attention stays inside it, and tokens without a label (0) have no loss."""
    positions = lines[:, POSITIONS]
    parts = (
        lines[:, TOKENS],
        lines[:, LABELS],
        (lines[:, LABELS] > 0).float(),
        positions,
        lines[:, SUBSET],
    )
    tokens, labels, loss_mask, position_ids, subset_ids = (
        my_chunks(x, cp).contiguous() for x in parts
    )
    return Batch(
        tokens,
        labels,
        loss_mask,
        position_ids,
        (positions == 0).cumsum(1),
        dropout_seeds,
        subset_ids=subset_ids,
        token_metrics=token_metrics,
    )


class Sampler(Protocol):
    """Which samples a rank reads, as a function of the samples consumed before."""

    step: int

    def micro_batch(self, consumed: int) -> list[int]:
        """Sample numbers of this rank's next micro-batch."""

    def micro_batches_left(self, consumed: int) -> int:
        """How many are left."""


def training_samples(
    sampler: Sampler,
    schedule: BatchSizeSchedule,
    skips: SkipRanges,
    first: int,
    last: int,
    shift: int = 0,
) -> Iterator[list[int]]:
    """Sample numbers, micro-batch by micro-batch, of the iterations first..last that are not
    skipped (1-based).

    `shift`: samples consumed beyond what the schedule says, after a resume with other batch sizes.
    """
    iteration = first
    while iteration <= last:
        skipped = skips.containing(iteration)
        if skipped:
            iteration = skipped[1] + 1
            continue
        consumed = schedule.samples_before(iteration) + shift
        for micro_batch in range(schedule.num_microbatches(consumed - shift)):
            yield sampler.micro_batch(consumed + micro_batch * sampler.step)
        iteration += 1


def evaluation_samples(sampler: Sampler, consumed: int) -> Iterator[list[int]]:
    """Sample numbers, micro-batch by micro-batch, from `consumed` on until there are none."""
    while sampler.micro_batches_left(consumed) > 0:
        yield sampler.micro_batch(consumed)
        consumed += sampler.step


def _stack(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))


def _stack_hashed(rows: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, int]:
    return _stack([tokens for tokens, _ in rows]), sum(value for _, value in rows)


def _start_worker(worker: int) -> None:
    WorkerSignals().install()
    torch.set_num_threads(1)


def load_samples(
    dataset: Any,
    micro_batches: Iterator[list[int]],
    num_workers: int,
    device: torch.device,
    on_hash: Callable[[int], None] | None = None,
) -> Iterator[torch.Tensor]:
    """Read micro-batches [b, s+1] in order, `num_workers` processes ahead (0: in this process).

    `on_hash`, for a dataset of pairs (tokens, hash), gets the sum of the hashes when a micro-batch
    is handed out. Raises ValueError where data cannot be read, in one line also when it was a
    worker that met it.
    """
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=micro_batches,
        num_workers=num_workers,
        collate_fn=_stack_hashed if on_hash else _stack,
        worker_init_fn=_start_worker,
        pin_memory=device.type == "cuda",
        multiprocessing_context="fork" if num_workers else None,
    )
    return handed_out(iter(loader), on_hash, num_workers > 0)


def handed_out(
    batches: Iterator[Any], on_hash: Callable[[int], None] | None, workers: bool
) -> Iterator[torch.Tensor]:
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (ValueError, OSError, EOFError) as error:
            text = str(error)
            # by a worker: torch puts its traceback before the message
            caught = text.startswith("Caught ")
            if workers and not caught and not isinstance(error, ValueError):
                name = type(error).__name__
                raise RuntimeError(
                    f"DataLoader worker died while it handed over a micro-batch ({name})"
                ) from error
            raise ValueError(
                text.strip().rpartition("\n")[2].partition(": ")[2] if caught else text
            ) from error
        if on_hash:
            batch, value = batch
            on_hash(value)
        yield batch
