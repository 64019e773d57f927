"""Input files through a team of workers to the files of unfinished work: what one process does for
a whole corpus or for a part of one."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.data.document_sources import Trailer
from megatron.data.preprocess.encode import Encoded, Job
from megatron.data.preprocess.readers import FileBlock, FileReader
from megatron.data.preprocess.resumable_writer import BadRecords, Unfinished
from megatron.data.preprocess.trial import SECONDS
from megatron.data.preprocess.workers import encode_all
from megatron.data.tokenizers.build import Tokenizer
from megatron.data.tokenizers.metadata import description

Held = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class EncodeLimits:
    """`workers`: processes; `seconds`: in which a record must be tokenized; `bad_records`: that may
    be skipped; `txt_lines`: whether each line of a .txt file is a document."""

    workers: int
    bad_records: int = 0
    seconds: float = SECONDS
    txt_lines: bool = False


def encoded_blocks(
    job: Job,
    limits: EncodeLimits,
    files: Sequence[str],
    work: Unfinished,
    held: Held,
    span: tuple[int, int] | None = None,
    opened: Callable[[str], object] = lambda file: None,
) -> Iterator[tuple[FileBlock, Encoded]]:
    """Each block of the files, or of the bytes or rows `span` of the one file, that has been
    written; what is done with it is within `held`, which nothing stops half-way. `opened` is called
    with each file's name. Raises ValueError and OSError."""
    needed, optional = job.columns
    reader = FileReader(files, needed, limits.txt_lines, optional, span)
    bad = BadRecords(limits.bad_records, work.bad)
    results = encode_all(
        job,
        work.paths(),
        reader.blocks(work.position, opened),
        limits.workers,
        lambda block, encoded: work.take(block, encoded, bad),
        work.first_line,
        limits.seconds,
    )
    with contextlib.closing(results):
        for block, encoded in results:
            with held():  # a line that is half printed would swallow the one about the end
                work.confirm(block)
                yield block, encoded


def trailer_of(job: Job, files: Sequence[str]) -> Trailer | None:
    """What is kept of the documents of these files beside their tokens."""
    sizes = [(os.path.abspath(file), os.path.getsize(file)) for file in files]
    return Trailer(job.metadata_keys, sizes) if job.metadata_keys else None


def descriptions(job: Job, tokenizer: Tokenizer, work: Unfinished) -> list[dict[str, Any]]:
    """What the .json of each pair says, without checksums."""
    counts: dict[str, Any] = {
        "append_eod": job.append_eod,
        "documents": work.documents,
        "bad_records": work.bad,
        "blank_lines": work.blank,
        "input_bytes": work.done,
    }
    if job.chat and not work.finishing:
        counts |= job.chat.described(work.paths()[0], job.dtype(tokenizer))
    identity = tokenizer.identity()
    size = tokenizer.vocab_size
    return [
        description(identity, size, {**counts, "tokens": tokens, "text_bytes": text_bytes})
        for tokens, text_bytes in zip(work.tokens, work.text_bytes, strict=True)
    ]
