"""Scalars of TensorBoard. Its reader (`reader.py`) and this are all that imports tensorboard."""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron import log
from megatron.training.logging.output import OutputFile

REFRESH = 60.0  # seconds after which queued events are written


class _EventFile:
    """A file of events, each with a step. It is written in this thread, so that a disk that fails
    is seen where it does."""

    def __init__(self, directory: str, queue_size: int):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        process = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        name = f"events.out.tfevents.{int(time.time()):010d}.{process}"
        self._file = OutputFile(os.path.join(directory, name), "--tensorboard-dir")
        self._queue = io.BytesIO()
        self._records = RecordWriter(self._queue)
        self._make = Event
        self._queue_size = queue_size
        self._queued = 0
        self._written_at = time.monotonic()
        self._put(Event(file_version="brain.Event:2"))
        self.flush()

    def take_over(self, step: int) -> None:
        """From this step on, points that were written before are given up."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._put(self._make(step=step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, summary: Any, step: int) -> None:
        """Queue a summary; write the queue when it is full or a minute old."""
        self._put(self._make(summary=summary, step=int(step)))
        if self._queued >= self._queue_size or time.monotonic() - self._written_at > REFRESH:
            self.flush()

    def _put(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._queued += 1

    def flush(self) -> None:
        """Write what is queued."""
        self._written_at = time.monotonic()
        if self._queued:
            self._file.write(self._queue.getvalue())
            self._queue.seek(0)
            self._queue.truncate()
            self._queued = 0

    def close(self) -> None:
        """Write what is queued; no more will come."""
        self.flush()
        self._file.close()


class TensorBoard:
    """A writer of scalars against iterations and, where they are given, against samples."""

    def __init__(self, directory: str, queue_size: int):
        """Opens an event file in `directory`; `queue_size` events are kept in memory before they
        are written. Raises ValueError where the package is missing, OSError for a directory that
        cannot be written."""
        try:
            from torch.utils.tensorboard import summary
        except ImportError:
            raise ValueError(
                "--tensorboard-dir needs the package tensorboard: pip install tensorboard, or "
                "omit the flag (--metrics-file needs no package) [package-missing]"
            ) from None
        self._summary = summary
        self._directory = directory
        self._used = any(Path(directory).glob("events.out.tfevents.*"))
        self._events = _EventFile(directory, queue_size)

    def start(self, iteration: int, against_samples: bool) -> None:
        """See `Board`."""
        if iteration and not against_samples:  # the points of samples have other steps
            self._events.take_over(iteration + 1)
        elif not iteration and self._used:
            log.print_rank_last(
                f"WARNING: --tensorboard-dir {self._directory}: has the events of an earlier run, "
                "which those of this one, from iteration 1 on, will hide: TensorBoard makes one "
                "curve of the files of a directory. Give each run its own, such as "
                f"{os.path.join(self._directory, 'NAME')}; --logdir {self._directory} shows all of "
                "them [tensorboard-directory-used]"
            )

    def arguments(self, values: Mapping[str, Any], iteration: int) -> None:
        """Every argument as text."""
        for name, value in values.items():
            self._events.add(self._summary.text(name, str(value)), iteration)

    def scalar(self, tag: str, value: float, iteration: int, samples: int | None = None) -> None:
        """A point under `tag` at `iteration`, and under `tag vs samples` at `samples`."""
        self._events.add(self._summary.scalar(tag, value), iteration)
        if samples is not None:
            self._events.add(self._summary.scalar(f"{tag} vs samples", value), samples)

    def flush(self) -> None:
        """Write what is queued."""
        self._events.flush()

    def close(self) -> None:
        """Write what is queued; no more will come."""
        self._events.close()
