"""`spikes.py verify`: checks by a run's data ledger that exactly the requested ranges were skipped.
Reads ledgers and, of skipped iterations, the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.arguments import values_of
from megatron.checkpoint.filesystem import CheckpointError
from megatron.data.ledger import SKIPPED, read_ledger
from megatron.data.sampler import Sampler
from tools.shared.program import complain
from tools.shared.run_data import Reading, checkpoint_after, hash_of, open_run

from .options import VerifyOptions

GOOD = 0
WRONG = 1
UNREADABLE = 2
SHOWN = 20


@dataclass(frozen=True)
class Table:
    """A ledger. `rows` by iteration: first sample, samples, skipped, hash."""

    path: str
    rows: dict[int, tuple[int, int, bool, int]]


def read(path: str, sequence_length: int) -> Table:
    """A ledger of samples of so many tokens. Raises ValueError."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file; give a file that --data-ledger wrote")
    length, records = read_ledger(path)
    if length != sequence_length:
        raise ValueError(
            f"{path}: is of samples of {length} tokens, the run's --seq-length is "
            f"{sequence_length}; give the ledger of this run"
        )
    if not len(records):
        raise ValueError(f"{path}: has no iteration; give the ledger of a run that has trained")
    return Table(
        path,
        {
            n: (first, count, flag == SKIPPED, value)
            for n, first, count, flag, value in records.tolist()
        },
    )


def skipped_as_asked(table: Table, reading: Reading) -> Iterator[str]:
    """Iterations that the ledger lacks, records as skipped without a request, or as trained against
    one."""
    for n in range(min(table.rows), max(table.rows) + 1):
        if n not in table.rows:
            yield f"{table.path}: iteration {n} is not in it"
            continue
        _, _, skipped, value = table.rows[n]
        if skipped != reading.plan.skips.is_skipped(n):
            problem = (
                "skipped without a request" if skipped else "trained, though it was to be skipped"
            )
            yield f"{table.path}: iteration {n} was {problem}"
        elif skipped and value:
            yield (
                f"{table.path}: iteration {n} is marked as skipped and has the hash "
                f"{value:016x} of something read"
            )


def same_but_skipped(table: Table, reference: Table) -> Iterator[str]:
    """Iterations that read something else than in the reference, or other places of the data."""
    for n in sorted(table.rows.keys() & reference.rows.keys()):
        row = table.rows[n]
        expected = reference.rows[n]
        if row[:2] != expected[:2]:
            yield (
                f"iteration {n}: {row[1]} samples from {row[0]} on in {table.path}, {expected[1]} "
                f"from {expected[0]} on in {reference.path}"
            )
        elif not row[2] and row != expected:
            shown = "skipped" if expected[2] else f"hash {expected[3]:016x}"
            yield f"iteration {n}: hash {row[3]:016x} in {table.path}, {shown} in {reference.path}"


Opened = tuple[Reading, list[Sampler]]


class Data:
    """The data of a run, opened by its flags at the end, and where these do not fit an iteration by
    those it ran with.

    Raises ValueError.
    """

    def __init__(self, args: VerifyOptions) -> None:
        self._args = args
        self._opened: dict[str, Opened] = {}
        self._last = self._open(args.run, args.flags)
        self.last = self._last[0]

    def _open(self, run: str | None, flags: Sequence[str] | None = None) -> Opened:
        opened = open_run(run, flags, None, self._args.world_size)
        return opened, opened.samplers()

    def reading_at(self, iteration: int, samples: tuple[int, int]) -> Opened:
        """The data as an iteration at `samples` (first sample, samples) read them."""
        run = self._args.run
        if run is None or _samples_of(self.last, iteration) == samples:
            return self._last
        folder = str(checkpoint_after(run, iteration))
        if folder not in self._opened:
            self._opened[folder] = self._open(folder)
        return self._opened[folder]


def hashes_of_skipped(table: Table, reference: Table | None, data: Data) -> Iterator[str]:
    """Skipped iterations whose samples, read now, are not what the reference read there, or were
    trained elsewhere."""
    trained = {value: n for n, (_, _, skipped, value) in table.rows.items() if not skipped}
    for n, (first, count, skipped, _) in sorted(table.rows.items()):
        if not skipped:
            continue
        reading, samplers = data.reading_at(n, (first, count))
        start, size = _samples_of(reading, n)
        if (start, size) != (first, count):
            yield (
                f"iteration {n}: {count} samples from {first} on in {table.path}, by the run's "
                f"flags {size} from {start} on"
            )
            continue
        value = hash_of(reading, n, samplers)
        expected = reference.rows.get(n) if reference else None
        if reference and expected and not expected[2] and expected[3] != value:
            yield (
                f"iteration {n}: its samples have the hash {value:016x} now, {expected[3]:016x} "
                f"in {reference.path}"
            )
        if value in trained:
            yield (
                f"iteration {n}: was skipped, and its samples were trained in iteration "
                f"{trained[value]}"
            )


def _samples_of(reading: Reading, iteration: int) -> tuple[int, int]:
    """(first sample, samples) of an iteration by the flags."""
    return reading.first_sample(iteration), reading.plan.global_batch_size(iteration)


def report(title: str, problems: Iterator[str]) -> bool:
    """Print a line on a check, and lines on what it found; whether all is well."""
    lines = list(problems)
    print(f"{'wrong' if lines else 'good'}: {title}")
    for line in lines[:SHOWN]:
        print(f"  {line}")
    if len(lines) > SHOWN:
        print(f"  ... and {len(lines) - SHOWN} more of these")
    return not lines


def verify(args: VerifyOptions) -> int:
    """Check by its data ledger that a run skipped what it was to skip, and nothing else. Exit
    codes: 0 it did, 1 it did not, 2 unreadable."""
    try:
        data = Data(args)
        reading = data.last
        length = reading.config.model.seq_length
        path = args.ledger or values_of(reading.config).get("data_ledger")
        if path is None:
            raise ValueError(
                "--ledger is missing: the run's flags name no --data-ledger; give the file"
            )
        table = read(path, length)
        reference = read(args.reference, length) if args.reference else None
        print(
            f"{path}: {len(table.rows)} iterations, "
            f"{sum(row[2] for row in table.rows.values())} of them skipped"
        )
        good = report(
            "the iterations marked as skipped, and no others, are those that were to be skipped",
            skipped_as_asked(table, reading),
        )
        if reference:
            good &= report(
                f"all others read what they do in {args.reference}",
                same_but_skipped(table, reference),
            )
        good &= report(
            "the samples of the skipped iterations, read now, were trained nowhere"
            + (f", and are those of {args.reference}" if reference else ""),
            hashes_of_skipped(table, reference, data),
        )
    except (ValueError, OSError, CheckpointError) as error:
        complain(error)
        return UNREADABLE
    return GOOD if good else WRONG
