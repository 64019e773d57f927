"""A corpus that is made in parts: all that makes any part of it, on any machine."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.data.parts import making
from megatron.data.parts.part_set import PartSet
from megatron.data.parts.plan import Unit
from megatron.data.preprocess.encode import Encoded, Job, tokenizer_of
from megatron.data.preprocess.encode_files import (
    EncodeLimits,
    Held,
    descriptions,
    encoded_blocks,
    trailer_of,
)
from megatron.data.preprocess.resumable_writer import Unfinished


class CorpusTotals(NamedTuple):
    """What parts have: `bytes` of text as read; `having`: documents with each of the job's
    `metadata_keys`."""

    parts: int = 0
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    bad: int = 0
    having: tuple[int, ...] = ()

    def plus(self, more: CorpusTotals) -> CorpusTotals:
        """Both together."""
        having = itertools.zip_longest(self.having, more.having, fillvalue=0)
        return CorpusTotals(
            self.parts + more.parts,
            self.documents + more.documents,
            self.tokens + more.tokens,
            self.bytes + more.bytes,
            self.bad + more.bad,
            tuple(map(sum, having)),
        )


@dataclass(frozen=True)
class Corpus:
    """`identity`: what decides, with the input, every byte that is written; `sets`: the parts of
    each pair. Picklable."""

    job: Job
    limits: EncodeLimits
    identity: Mapping[str, Any]
    units: tuple[Unit, ...]
    sets: tuple[PartSet, ...]

    def make(
        self,
        number: int,
        report: Callable[[Encoded], object] = lambda encoded: None,
        held: Held = contextlib.nullcontext,
    ) -> CorpusTotals:
        """Make the part, unless it is whole; what of it was made here. `report` hears of each
        block, and `held` is a context that nothing stops half-way. Raises ValueError and
        OSError."""
        counts = CorpusTotals()
        unit = self.units[number]

        def write(folder: str) -> None:
            nonlocal counts
            tokenizer = tokenizer_of(self.job.tokenizer)
            pairs = [f"{folder}/{key}" for key in range(len(self.sets))]
            work = Unfinished(
                f"{folder}/part",
                pairs,
                self.job.dtype(tokenizer),
                1,
                dict(self.identity),
                False,
                trailer_of(self.job, unit.files),
            )
            with contextlib.closing(work):
                work.bad_path = f"{folder}/bad"
                work.position = unit.position
                blocks = encoded_blocks(self.job, self.limits, unit.files, work, held, unit.span)
                for _, encoded in blocks:
                    report(encoded)
                record = {"part": {**unit.sources(), "made_of": self.sets[0].made_of[number]}}
                with held():
                    described = descriptions(self.job, tokenizer, work)
                    work.finish([{**each, **record} for each in described])
            counts = CorpusTotals(
                1, work.documents, sum(work.tokens), work.done, work.bad, tuple(work.having)
            )

        return counts if making.make(self.sets, number, write) else CorpusTotals()
