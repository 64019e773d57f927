"""What an iteration read, and the runs of tokens in it that stand out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.sample_lookup import TokenSpan
from tools.shared.run_data import Reading

from . import text_anomalies
from .loss_outliers import MASKED, mean_loss

HEAD = 16  # tokens shown
ENOUGH = 64  # samples to compare with; neighbouring iterations give what an iteration lacks


@dataclass(frozen=True)
class BatchRow:
    """A sample of an iteration: its number in the training data, and who reads it in which
    micro-batch."""

    sample: int
    dp_rank: int
    micro_batch: int


@dataclass(frozen=True)
class Suspect:
    """A run of tokens that an iteration reads, and how it stands out. `bytes` are its position in
    `<dataset>.bin`; `loss` is its mean in nats per token at a checkpoint, where one was asked."""

    score: float
    reason: str
    dataset: str
    document: int
    offset: int
    tokens: int
    bytes: tuple[int, int] | None
    sample: int
    dp_rank: int
    micro_batch: int
    head: str
    loss: float | None = None

    def line(self) -> str:
        """Which it is and its position."""
        span = "" if self.bytes is None else f", bytes {self.bytes[0]} .. {self.bytes[1]}"
        return (
            f"{self.dataset} document {self.document}, tokens {self.offset} .. "
            f"{self.offset + self.tokens}{span}"
        )


def batch_rows(
    reading: Reading, iteration: int, micro_batch: int | None = None, dp_rank: int | None = None
) -> list[BatchRow]:
    """The samples of an iteration, of all its micro-batches and ranks or of one. Raises ValueError
    where there are none."""
    if not 1 <= iteration <= reading.plan.train_iters:
        raise ValueError(
            f"--iteration {iteration}: the run has the iterations 1 to {reading.plan.train_iters}"
        )
    for flag, value, count in (
        ("--microbatch", micro_batch, reading.plan.num_microbatches(iteration)),
        ("--dp-rank", dp_rank, reading.plan.data_parallel_size),
    ):
        if value is not None and not 0 <= value < count:
            raise ValueError(f"{flag} {value}: iteration {iteration} has 0 to {count - 1}")
    rows = [BatchRow(*row) for row in reading.batch(iteration, reading.samplers())]
    return [
        row
        for row in rows
        if micro_batch in (None, row.micro_batch) and dp_rank in (None, row.dp_rank)
    ]


def neighbours(reading: Reading, first: int, last: int) -> list[int]:
    """Iterations around a range, as many as give enough samples to compare with."""
    iterations = reading.plan.train_iters
    distances = range(1, iterations)
    around = (n for far in distances for n in (first - far, last + far) if 1 <= n <= iterations)
    chosen: list[int] = []
    count = sum(reading.plan.global_batch_size(n) for n in range(first, last + 1))
    while count < ENOUGH and (n := next(around, None)):
        chosen.append(n)
        count += reading.plan.global_batch_size(n)
    return sorted(chosen)


def usual(reading: Reading, iterations: Sequence[int]) -> list[text_anomalies.Measures]:
    """The measures of all that these iterations read, to compare with."""
    samples = (row.sample for iteration in iterations for row in batch_rows(reading, iteration))
    return [
        text_anomalies.measure(ids, reading.text(ids))
        for sample in samples
        for _, _, ids in reading.pieces(sample)
    ]


def suspects(
    reading: Reading,
    read: Sequence[BatchRow],
    baseline: Sequence[text_anomalies.Measures] = (),
    losses: Callable[[Sequence[np.ndarray]], Iterator[np.ndarray]] | None = None,
) -> list[Suspect]:
    """The pieces of documents in these samples, in their order, compared with each other and with
    `baseline`; `losses` gives those of the tokens 1 .. of each sample."""
    samples = [reading.tokens(row.sample) for row in read]
    of_tokens = losses(samples) if losses else iter([None] * len(read))
    examined = []
    measures = []
    for row, each in zip(read, of_tokens, strict=True):
        for token_span, position, ids in reading.pieces(row.sample):
            # a token's loss stands before it
            own_losses = (
                None
                if each is None
                else each[max(0, position - 1) : position - 1 + token_span.length]
            )
            text = reading.text(ids)
            measures.append(text_anomalies.measure(ids, text))
            head = str(ids[:HEAD].tolist()) if text is None else text[: 6 * HEAD]
            examined.append((token_span, row, head, own_losses))
    return [
        _suspect(suspicion, *measured)
        for suspicion, measured in zip(
            text_anomalies.rank(measures, baseline), examined, strict=True
        )
    ]


def _suspect(
    suspicion: text_anomalies.Suspicion,
    token_span: TokenSpan,
    row: BatchRow,
    head: str,
    losses: np.ndarray | None,
) -> Suspect:
    begin, end = token_span.first_byte, token_span.end_byte
    return Suspect(
        suspicion.score,
        suspicion.reason,
        token_span.prefix,
        token_span.document,
        token_span.offset,
        token_span.length,
        None if begin is None or end is None else (begin, end),
        row.sample,
        row.dp_rank,
        row.micro_batch,
        head,
        mean_loss(losses) if losses is not None and (losses != MASKED).any() else None,
    )


def height(loss: float | None) -> float:
    """A loss, for an order: one that is no number is the highest, none is the lowest."""
    if loss is None:
        return -np.inf
    return loss if np.isfinite(loss) else np.inf
