"""Processes that encode blocks of documents, each of which writes its own ids to their place; and
what is done about one that dies or does not finish.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from megatron.data.preprocess.encode import Encoded, Encoder, Job, Order
from megatron.data.preprocess.readers import FileBlock
from megatron.data.preprocess.trial import SECONDS

# blocks of the usual size that a worker may have before it: so that it need not wait for this
# process
QUEUE = 4
# blocks for each worker that may be on their way while one of them is at a long document: bounds
# memory
AHEAD = 64
BYTES_PER_SECOND = 100_000  # of a record, for which it has more time
TICK = 1.0  # seconds between two looks at a record that holds up the others

Placing = Callable[[FileBlock, Encoded], Order]


def encode_all(
    job: Job,
    paths: Sequence[Sequence[str]],
    blocks: Iterable[FileBlock],
    workers: int,
    placing: Placing,
    first_line: Callable[[FileBlock], int],
    seconds: float = SECONDS,
) -> Generator[tuple[FileBlock, Encoded], None, None]:
    """Each block with what became of it, in order, once its ids are in the files; by `workers`
    processes.

    `placing` is called for the blocks in order and says where the ids go; `first_line` is that of a
    block whose predecessors have been placed. Raises WorkerKilled if a worker dies, ValueError if
    it is not done with a record within `seconds` (one more for each BYTES_PER_SECOND), and what
    reading, encoding and writing raise. However it is left, no worker outlives it.
    """
    team: list[_Worker] = []
    flying: deque[_Ticket] = deque()
    try:
        for _ in range(workers):
            team.append(_Worker(job, paths))
        yield from _work(team, iter(blocks), placing, flying, seconds)
    except WorkerDied as death:
        record_name = _record_of(death.worker, flying, first_line)
        kind = ValueError if death.seconds else WorkerKilled
        raise kind(death.message(workers, record_name)) from None
    finally:
        for worker in team:
            worker.process.kill()
        for worker in team:
            worker.process.join()


def _record_of(
    worker: _Worker, flying: Iterable[_Ticket], first_line: Callable[[FileBlock], int]
) -> str:
    """The record at which a worker is."""
    number, record, _ = worker.mark.tolist()
    waiting = [ticket.block for ticket in flying if ticket.encoded is None]
    block = next((block for block in waiting if block.number == number), None)
    if not record or block is None:
        return ""
    if block.start == 0:
        return f"{block.name}, line {record}"
    # where lines are counted in order, only the first that waits knows what came before it
    line = first_line(block) if block is waiting[0] else 0
    if line:
        return f"{block.name}, line {line + record - 1}"
    unit = "row" if block.kind == "rows" else "byte"
    return f"{block.name}, record {record} after {unit} {block.start}"


@dataclass
class _Ticket:
    """A block on its way."""

    block: FileBlock
    worker: _Worker
    encoded: Encoded | None = None
    placed: bool = False
    written: bool = False


def _work(  # noqa: C901
    team: Sequence[_Worker],
    blocks: Iterator[FileBlock],
    placing: Placing,
    flying: deque[_Ticket],
    seconds: float,
) -> Iterator[tuple[FileBlock, Encoded]]:
    clock = _Clock(seconds)
    by_number: dict[int, _Ticket] = {}
    answers = selectors.DefaultSelector()  # made once: `connection.wait` makes one for each answer
    for worker in team:
        answers.register(worker.pipe, selectors.EVENT_READ, worker)
    ahead = next(blocks, None)
    while ahead or flying:
        while ahead and len(flying) < AHEAD * len(team):
            worker = min(team, key=lambda worker: sum(worker.weights))
            # bytes: to one who reads them now
            if sum(worker.weights) >= QUEUE if ahead.data is None else worker.weights:
                break
            worker.send(ahead)
            by_number[ahead.number] = _Ticket(ahead._replace(data=None), worker)
            flying.append(by_number[ahead.number])
            ahead = next(blocks, None)
        for worker in team:
            if worker.orders and not worker.weights:
                worker.send(None)
        for key, _ in answers.select(TICK):
            number, encoded, written = key.data.receive()
            if encoded is not None:
                by_number[number].encoded = encoded
            for done in written:
                by_number.pop(done).written = True
        for ticket in flying:
            if ticket.encoded is None:
                clock.look(ticket.worker)
                break
            if not ticket.placed:
                ticket.worker.orders.append(placing(ticket.block, ticket.encoded))
                ticket.placed = True
        while flying and flying[0].written:
            done = flying.popleft()
            assert done.encoded is not None  # it was written
            yield done.block, done.encoded


@dataclass
class _Clock:
    """Measures how long the worker that all others wait for has been at one record."""

    seconds: float
    mark: Sequence[int] = ()
    spent: float = 0.0
    looked: float = 0.0

    def look(self, worker: _Worker) -> None:
        """Raises WorkerDied if it takes too long. Time in which this process itself was suspended
        does not count."""
        now = time.monotonic()
        mark = worker.mark.tolist()
        same = mark == self.mark and mark[1]
        self.spent = self.spent + min(now - self.looked, 2 * TICK) if same else 0.0
        self.mark = mark
        self.looked = now
        if self.spent > self.seconds + mark[2] / BYTES_PER_SECOND:
            raise WorkerDied(worker, self.spent)


class WorkerKilled(ValueError):
    """A worker process was killed: the same work may succeed another time."""


class WorkerDied(Exception):
    """A worker process has died, or has been at one record for so many `seconds`."""

    def __init__(self, worker: _Worker, seconds: float = 0.0):
        super().__init__()
        self.worker = worker
        self.seconds = seconds

    def message(self, workers: int, record_name: str) -> str:
        """For the user; `record_name` may be empty."""
        if self.seconds:
            return (
                f"{record_name}: the tokenizer or the chat template has not finished this "
                f"record in {self.seconds:.0f} s; remove the record, use another tokenizer or "
                "template, or raise --record-timeout [record-timeout]"
            )
        self.worker.process.join(10)
        code = self.worker.process.exitcode or 0
        signal_name = f" by signal {-code}" if code < 0 else ""
        at_record = f" at {record_name}" if record_name else ""
        return (
            f"--workers {workers}: a worker process was killed{signal_name}{at_record}, most "
            "often for want of memory; use fewer workers [worker-killed]"
        )


@dataclass
class _Worker:
    """A process that encodes and writes one block after the other.

    It has a pipe of its own, whose other end it alone holds: whenever it dies, within a message
    too, this side reads an end of file, and no lock is left behind. `weights`: of the blocks
    without an answer, 0 for orders alone. `orders`: what the next message carries.
    """

    job: Job
    paths: Sequence[Sequence[str]]
    weights: deque[int] = field(default_factory=deque)
    orders: list[Order] = field(default_factory=list)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, child_end = context.Pipe()
        self.mark = memoryview(mmap.mmap(-1, 3 * 8)).cast("q")  # shared; see `Encoder`
        arguments = (child_end, self.job, self.paths, self.mark, os.getpid())
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        child_end.close()

    def send(self, block: FileBlock | None) -> None:
        """Have the orders carried out and then the block, if any, encoded. Raises WorkerDied."""
        try:
            self.pipe.send((self.orders, block))
        except OSError:
            raise WorkerDied(self) from None
        self.orders = []
        self.weights.append(block.weight if block else 0)

    def receive(self) -> tuple[int, Encoded | None, list[int]]:
        """The answer: number and what became of the block, numbers of the blocks written. Raises
        what was raised there."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied(self) from None
        if isinstance(answer, Exception):
            raise answer
        self.weights.popleft()
        return answer


def _serve(
    pipe: connection.Connection,
    job: Job,
    paths: Sequence[Sequence[str]],
    mark: memoryview[int],
    parent: int,
) -> None:
    """The life of a worker: orders and blocks in, what became of them out."""
    _serve_quietly(parent)
    encoder = None
    while True:
        try:
            orders, block = pipe.recv()
        except EOFError:
            return
        try:
            encoder = encoder or Encoder(job, paths, mark)
            for order in orders:
                encoder.write(order)
            encoded = encoder.encode(block) if block else None
            answer: Any = (
                block.number if block else -1,
                encoded,
                [order.number for order in orders],
            )
        except Exception as error:
            answer = error
        try:
            pipe.send(answer)
        except OSError:  # nobody is there any more
            return


def _serve_quietly(parent: int) -> None:
    """In a worker: Ctrl-C is the parent's to answer, and a worker does not outlive a parent that
    was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
