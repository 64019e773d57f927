"""One micro-batch: which samples it holds, and from their tokens to what the model takes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from megatron import interrupt, object_stores
from megatron.config.plan.batch_size import BatchSizeSchedule
from megatron.config.skip_ranges import SkipRanges
from megatron.data.sample_lookup import LOSS_MASK, NO_LABEL, POSITIONS
from megatron.data.sampler import Sampler
from megatron.data.samples import Sample
from megatron.parallel.context import Axis
from megatron.parallel.random import DropoutSeeds
from megatron.training.launch.signals import WorkerSignals

if TYPE_CHECKING:
    from megatron.config.plan.plan import Plan
    from megatron.config.tree import Config
    from megatron.model.blocks.module import RouterStep
    from megatron.model.blocks.mtp.module import Depths
    from megatron.model.gpt import TokenMetrics


@dataclass(frozen=True)
class Batch:
    """What one forward pass reads; [b, s] each. None stands for the plain case: every token counts,
    positions run from 0 to s - 1, one document per row, no dropout. With context parallelism these
    are this rank's chunks, [b, s/cp], and position_ids are always there, [1, s/cp] where all rows
    have the same; document_ids stay whole. `hidden` [s, b, h] comes from the pipeline stage before,
    if there is one. Of packed samples b is 1 and s a whole row. `subset_ids`, where subsets of the
    data are counted, say which each token is of: [b, 1], of packed samples [1, s/cp].
    `token_metrics`: what the model is to tell of each token besides its loss, where the step counts
    it. `router_step`: with experts, what routers exchange with the step. `depths`: what multi-token
    prediction reads and tells, in training. `counted`: where a feature weighs tokens, and
    `loss_mask` has its weights, the mask without them, which the step's counters get."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    dropout_seeds: DropoutSeeds | None = None
    hidden: torch.Tensor | None = None
    subset_ids: torch.Tensor | None = None
    token_metrics: TokenMetrics | None = None
    router_step: RouterStep | None = None
    depths: Depths | None = None
    counted: torch.Tensor | None = None

    @property
    def extras(self) -> dict[str, Any]:
        """What a GPTModel takes besides tokens, positions and labels, by keyword."""
        return {
            "document_ids": self.document_ids,
            "dropout_seeds": self.dropout_seeds,
            "hidden": self.hidden,
            "router_step": self.router_step,
            "token_metrics": self.token_metrics,
            "depths": self.depths,
        }


@dataclass(frozen=True)
class BatchRules:
    """How end-of-document tokens are treated, and over which ranks the sequence is split."""

    eod: int | None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    cp: Axis = Axis("cp")


class MicroBatch(NamedTuple):
    """The samples of one micro-batch as a loader hands them out, int64.

    One tensor holds them, since data workers and devices get one tensor faster than several: `rows`
    [b, s + 1] of consecutive tokens, with `subset` [b, s + 2] whose last column is the subset, and
    packed [b, 4, s] of tokens, labels, positions and subsets; with their own loss masks [b, 5, s],
    where labels are plain ids. This class alone packs and unpacks them. Pickled by value: torch
    would share the memory over a socket in the temporary directory, which a killed process leaves
    there.
    """

    rows: torch.Tensor
    packed: bool = False
    subset: bool = False
    hash: int = 0  # the sum of those of the samples
    counted: bool = False  # with their own loss masks: positions are 0 to s - 1 in all rows

    @classmethod
    def pack(cls, samples: Sequence[Sample]) -> MicroBatch:
        """Samples of one kind and length in one tensor."""
        first = samples[0]
        packed = first.labels is not None
        counted = False
        subset = first.subset is not None and not packed
        if packed:
            lines: list[Any] = [line for sample in samples for line in sample[:4]]
            rows = np.stack(lines).reshape(len(samples), 4, -1)
            if first.loss_mask is not None:
                masks: list[Any] = [sample.loss_mask for sample in samples]
                rows = np.concatenate((rows, np.stack(masks)[:, None]), 1)
                counted = bool((rows[:, POSITIONS] == np.arange(rows.shape[2])).all())
        else:
            rows = np.stack([sample.tokens for sample in samples])
        if subset:
            rows = np.column_stack((rows, [sample.subset for sample in samples]))
        value = sum(sample.hash for sample in samples)
        return cls(torch.from_numpy(rows), packed, subset, value, counted)

    def __reduce__(self) -> tuple[Callable[..., MicroBatch], tuple[Any, ...]]:
        return _from_values, (self.rows.numpy(), *self[1:])

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`, where it may be."""
        from_host = device.type == "cuda" and not self.rows.is_cuda
        rows = self.rows.pin_memory() if from_host else self.rows
        return self._replace(rows=rows.to(device, non_blocking=True))

    @property
    def tokens(self) -> torch.Tensor:
        """[b, s]."""
        return self.rows[:, 0] if self.packed else self._sequences()[:, :-1].contiguous()

    @property
    def labels(self) -> torch.Tensor:
        """[b, s]: the next tokens; of packed samples 0 where there is none, -1 for id 0 (not of
        those with their own loss mask)."""
        return self.rows[:, 1] if self.packed else self._sequences()[:, 1:].contiguous()

    @property
    def positions(self) -> torch.Tensor | None:
        """[b, s] of packed samples, 0 where a sample begins; None: 0 to s - 1."""
        return self.rows[:, 2] if self.packed and not self.counted else None

    @property
    def loss_mask(self) -> torch.Tensor | None:
        """[b, s] fp32 of samples that have their own."""
        if not self.packed or self.rows.shape[1] <= LOSS_MASK:
            return None
        return self.rows[:, LOSS_MASK].int().view(torch.float32)

    @property
    def subset_ids(self) -> torch.Tensor | None:
        """The subset of each row [b, 1], or of each token of packed samples [b, s]."""
        if self.packed:
            return self.rows[:, 3]
        return self.rows[:, -1:] if self.subset else None

    def _sequences(self) -> torch.Tensor:
        """Consecutive tokens [b, s + 1]."""
        return self.rows[:, :-1] if self.subset else self.rows


def make_batch(
    samples: MicroBatch,
    rules: BatchRules,
    device: torch.device,
    dropout_seeds: DropoutSeeds | None = None,
    depth_scales: Sequence[float | torch.Tensor] = (),
) -> Batch:
    """Samples on the host -> Batch on the device, with the depths of multi-token prediction that
    have `depth_scales`.

    Masks and positions are made for whole sequences; this rank's chunks of them are taken last.
    """
    on_host = samples
    samples = samples.to(device)
    tokens = samples.tokens
    labels = samples.labels
    subset_ids = samples.subset_ids
    loss_mask, position_ids, document_ids = masks_of(samples, rules)
    if document_ids is not None and device.type != "cpu":
        from megatron.kernels.cu_seqlens import with_lengths

        ids_on_host = masks_of(on_host, rules)[2]
        assert ids_on_host is not None
        document_ids = with_lengths(document_ids, ids_on_host)

    def own(x: torch.Tensor) -> torch.Tensor:
        if rules.cp.size == 1:
            return x.contiguous()
        from megatron.parallel.zigzag import my_chunks

        return my_chunks(x, rules.cp).contiguous()

    depths = None
    if samples.packed and subset_ids is not None:
        labels = labels.clamp(min=0)
        subset_ids = own(subset_ids)
    if depth_scales:
        from megatron.model.blocks.mtp.module import Depth, Depths, rolled

        whole = rolled(tokens, labels, loss_mask, document_ids, len(depth_scales))
        parts = [Depth(*map(own, depth)) for depth in whole]
        depths = Depths(list(zip(parts, depth_scales, strict=True)))
    if rules.cp.size > 1 and position_ids is None:
        position_ids = torch.arange(tokens.shape[1], device=device).unsqueeze(0)
    return Batch(
        own(tokens),
        own(labels),
        None if loss_mask is None else own(loss_mask),
        None if position_ids is None else own(position_ids),
        document_ids,
        dropout_seeds,
        subset_ids=subset_ids,
        depths=depths,
    )


# (loss mask, position ids, document ids), [b, s] each; None stands for the plain case.
Masks = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def masks_of(samples: MicroBatch, rules: BatchRules) -> Masks:
    """Those of whole sequences, as samples and rules say."""
    positions = samples.positions
    if samples.loss_mask is not None:
        return samples.loss_mask, positions, _document_masks(samples.tokens, rules)[2]
    if positions is not None:
        return _packed_masks(samples.labels, positions)
    return _document_masks(samples.tokens, rules)


def _document_masks(tokens: torch.Tensor, rules: BatchRules) -> Masks:
    """Masks at the ends of documents. A document ends with its end-of-document token: the next
    position starts a new one. `eod_mask_loss` masks the loss where the INPUT is that token
    (predicting the first token of the next document), as Megatron does."""
    loss_mask = position_ids = document_ids = None
    if rules.reset_position_ids or rules.reset_attention_mask or rules.eod_mask_loss:
        assert rules.eod is not None  # `build_tokenizer` refuses a tokenizer without it
        ends = tokens == rules.eod
        if rules.eod_mask_loss:
            loss_mask = (~ends).float()
        documents = ends.cumsum(1) - ends.long()
        if rules.reset_attention_mask:
            document_ids = documents
        if rules.reset_position_ids:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            starts = (
                torch.where(torch.nn.functional.pad(ends[:, :-1], (1, 0)), positions, 0)
                .cummax(1)
                .values
            )
            position_ids = positions - starts
    return loss_mask, position_ids, document_ids


def _packed_masks(labels: torch.Tensor, positions: torch.Tensor) -> Masks:
    """Masks of packed samples: attention stays inside a sample, and tokens without a label have no
    loss."""
    return (labels != NO_LABEL).float(), positions, (positions == 0).cumsum(1)


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


def _from_values(rows: np.ndarray, *optional: Any) -> MicroBatch:
    return MicroBatch(torch.from_numpy(rows), *optional)


def _start_worker(parent: int) -> None:
    interrupt.end_with_parent(parent)
    WorkerSignals().install()
    torch.set_num_threads(1)


def open_samples(
    config: Config, plan: Plan, dataset: Any, micro_batches: Iterator[list[int]]
) -> Generator[MicroBatch, None, None]:
    """`load_samples` with the workers of the run and, of an object store, what it fetches ahead."""
    data, batch = config.data, plan.batch
    ahead = None
    if data.object_storage_cache_path and data.object_storage_prefetch:
        per_iteration = batch.final_global_batch_size // batch.divisor
        ahead = object_stores.part("read_ahead").reader(data, per_iteration)
    return load_samples(dataset, micro_batches, data.num_workers, ahead)


def load_samples(
    dataset: Any,
    micro_batches: Iterator[list[int]],
    num_workers: int,
    ahead: Callable[..., Any] | None = None,
) -> Generator[MicroBatch, None, None]:
    """Read micro-batches of a dataset of `Sample` in order, `num_workers` processes ahead (0: in
    this process). `ahead` starts what fetches them before.

    Raises ValueError where data cannot be read, in one line also when a worker met it.
    """
    parent = os.getpid()
    fetching = None
    if ahead:
        fetching = ahead(dataset.dataset, micro_batches, lambda: _start_worker(parent))
    with warnings.catch_warnings():
        # torch's advice for fewer workers than cores, which suits those that compute
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=micro_batches,
            num_workers=num_workers,
            collate_fn=MicroBatch.pack,
            worker_init_fn=lambda worker: _start_worker(parent),
            multiprocessing_context="fork" if num_workers else None,
        )
        batches = iter(loader)
    return handed_out(batches, num_workers > 0, fetching)


def handed_out(
    batches: Iterator[MicroBatch], workers: bool, fetching: Any = None
) -> Generator[MicroBatch, None, None]:
    """The micro-batches of a DataLoader, whose errors become one line; close() ends its workers."""
    try:
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
            if fetching:
                fetching.take()
            yield batch
    finally:
        if fetching:
            fetching.close()
        # Python kills workers that are alive when it exits, which torch reports as an error.
        if workers and hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
