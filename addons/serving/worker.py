"""The thread that decodes: requests wait in a queue, take free rows of the engine between two
steps, and leave when they are finished or given up."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.data.tokenizers.base import Tokenizer
from megatron.inference.engine import Engine, Generation, NewToken, Request
from megatron.inference.text import TextStream


class QueueFull(Exception):
    """No place for more requests now."""


@dataclass(frozen=True)
class TextChunk:
    """What one step added to an answer: text that can be shown, the token (with log-probabilities
    if asked for), and in the last one why it ended: "stop", "length" or "error"."""

    text: str
    token: NewToken | None
    finish_reason: str | None


@dataclass(eq=False)
class Job:
    """One answer to generate. `emit` is called in the model's thread with each piece."""

    request: Request
    stop: Sequence[str]
    emit: Callable[[TextChunk], None]
    stream: TextStream | None = None
    generation: Generation | None = None
    cancelled: bool = False


@dataclass
class Counters:
    """What has happened since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected: int = 0
    steps: int = 0


class Worker:
    """Decodes jobs on one engine. At most `queue_limit` jobs wait while every row is taken."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, queue_limit: int):
        self.engine = engine
        self.counters = Counters()
        self.failed = False
        self._tokenizer = tokenizer
        self._queue_limit = queue_limit
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> int:
        """Jobs that can be decoded or wait at the same time."""
        return self.engine.rows + self._queue_limit

    @property
    def waiting(self) -> int:
        """Jobs without a row."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Jobs that are being decoded."""
        return len(self._running)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all these jobs or none. Raises QueueFull, or RuntimeError after a failure."""
        with self._changed:
            if self.failed or self._closing:
                raise RuntimeError("the model's thread has ended")
            if len(self._waiting) + len(self._running) + len(jobs) > self.capacity:
                self.counters.rejected += 1
                raise QueueFull
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody waits for these any more: their rows are free before the next step."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its current step."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._admit():
                for generation, token in self.engine.step():
                    self._deliver(self._running[id(generation)], token)
                self.counters.steps += 1
        except Exception:
            traceback.print_exc(file=sys.stderr)
            with self._changed:
                self.failed = True
                unfinished = [*self._running.values(), *self._waiting]
                self._waiting.clear()
                self._running.clear()
            for job in unfinished:
                job.emit(TextChunk("", None, "error"))

    def _admit(self) -> bool:
        """Free the rows of cancelled jobs and give free rows to waiting ones; waits while there is
        nothing to do. False when it is over."""
        with self._changed:
            while not self._closing:
                self._drop_cancelled()
                while self._waiting and self.engine.running < self.engine.rows:
                    self._start(self._waiting.popleft())
                if self._running:
                    return True
                self._changed.wait()
            return False

    def _drop_cancelled(self) -> None:
        gone = [job for job in (*self._running.values(), *self._waiting) if job.cancelled]
        for job in gone:
            if job.generation is None:
                self._waiting.remove(job)
            else:
                self.engine.stop(job.generation)
                del self._running[id(job.generation)]
            self.counters.cancelled += 1

    def _start(self, job: Job) -> None:
        job.stream = TextStream(job.request.prompt, self._tokenizer.detokenize, job.stop)
        job.generation = self.engine.add(job.request)
        self._running[id(job.generation)] = job
        self.counters.prompt_tokens += len(job.request.prompt)

    def _deliver(self, job: Job, token: NewToken | None) -> None:
        stream = job.stream
        generation = job.generation
        assert stream is not None and generation is not None, "_admit sets both"
        text = ""
        if token is not None:
            self.counters.generated_tokens += 1
            text = stream.push(token.id)
        if stream.stopped:
            self.engine.stop(generation)
        reason = generation.finish_reason
        if reason:
            text += stream.finish()
            reason = "stop" if stream.stopped else reason
            with self._changed:
                del self._running[id(generation)]
            self.counters.finished += 1
        job.emit(TextChunk(text, token, reason))
