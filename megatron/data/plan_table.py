"""The table of what a run will read: documents, tokens, samples, share and epochs per data set."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.config.plan.report import entry, noted

MANY_EPOCHS = 20  # of validation: what they find is known after the first
SHOWN = 40  # rows of a split; the rest is summarized in one line
NAMED = 3  # data sets of a split in its summary
TITLES = ("split", "data", "documents", "tokens", "samples", "share", "epochs")


@dataclass(frozen=True)
class Row:
    """One data set in one split; `samples` are those the run reads."""

    split: str
    name: str
    documents: int
    tokens: int
    samples: float
    sequence_length: int

    @property
    def epochs(self) -> float:
        """How often each of its tokens is read, on average."""
        return self.samples * self.sequence_length / self.tokens if self.tokens else 0.0


def _cells(row: Row, total: float) -> tuple[str, ...]:
    share = 100 * row.samples / total if total else 0.0
    return (
        row.split,
        row.name,
        f"{row.documents:,}",
        f"{row.tokens:,}",
        f"{row.samples:,.0f}",
        f"{share:.3f} %",
        f"{row.epochs:.4g}",
    )


def _of_split(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    total = sum(row.samples for row in rows)
    for row in rows[:SHOWN]:
        yield _cells(row, total)
    further = rows[SHOWN:]
    if further:
        documents = sum(row.documents for row in further)
        tokens = sum(row.tokens for row in further)
        samples = sum(row.samples for row in further)
        length = further[0].sequence_length
        summary = Row(further[0].split, f"{len(further)} more", documents, tokens, samples, length)
        yield _cells(summary, total)


def plan_table(rows: Sequence[Row]) -> list[str]:
    """Lines: a head, a row for each data set of each split, in the order given."""
    if not rows:
        return []
    cells: list[tuple[str, ...]] = [TITLES]
    for split in dict.fromkeys(row.split for row in rows):
        cells += _of_split([row for row in rows if row.split == split])
    width = [max(len(line[column]) for line in cells) for column in range(len(TITLES))]
    aligned = [str.ljust] * 2 + [str.rjust] * (len(TITLES) - 2)
    lines = []
    for line in cells:
        padded = (align(cell, n) for align, cell, n in zip(aligned, line, width, strict=True))
        lines.append(f"  {'  '.join(padded)}")
    return lines


def validation_note(rows: Sequence[Row]) -> list[str]:
    """A line where validation reads its data again and again."""
    valid = [row for row in rows if row.split == "valid"]
    tokens = sum(row.tokens for row in valid)
    epochs = sum(row.samples * row.sequence_length for row in valid) / tokens if tokens else 0.0
    if epochs <= MANY_EPOCHS:
        return []
    return [
        f"note: all evaluations together read the {tokens:,} tokens of validation {epochs:,.0f} "
        "times; fewer --eval-iters take less time and find the same [validation-repeats]"
    ]


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for each split of what it reads."""
    lines = []
    shown = ""
    for split in dict.fromkeys(row.split for row in rows):
        rows_of_split = [row for row in rows if row.split == split]
        names = ", ".join(
            row.name for row in rows_of_split[:NAMED]
        ) + f" and {len(rows_of_split) - NAMED} more" * (len(rows_of_split) > NAMED)
        tokens = sum(row.tokens for row in rows_of_split)
        read = sum(row.samples for row in rows_of_split)
        epochs = read * rows_of_split[0].sequence_length / tokens if tokens else 0.0
        times = f"{epochs:.3g} epoch" + "s" * (f"{epochs:.3g}" != "1")
        label = {"train": "data", "valid": "validation"}.get(split, split)
        named = "" if names == shown else f"{names}: "
        shown = names
        lines.append(entry(label, f"{named}{tokens:,} tokens; {read:,.0f} samples ({times})"))
    return [*lines, *noted(validation_note(rows))]
