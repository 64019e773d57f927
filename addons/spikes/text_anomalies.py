"""Scores how much a piece of text differs from its neighbours: repeats, invalid bytes, tokens per
character."""

from __future__ import annotations

import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERIODS = range(1, 14)  # tokens after which a repeat begins again
TIMES = 32  # that a pattern must come to count
FEW = 32  # tokens of which nothing is compared with others
MOST = 20.0  # a measure counts no more than this
SPREAD = 0.05  # of the median: neighbours are not taken for more alike than this


@dataclass(frozen=True)
class Suspicion:
    """Why a piece stands out. `score` is the largest of the reasons, in the spread of its
    neighbours or, for shares of the piece, 20 for all of it; `reason` is for a reader."""

    score: float
    reason: str


@dataclass(frozen=True)
class Measures:
    """Of one piece: shares of its tokens within repeats and of its characters that are no text, its
    tokens per character, and the size to which its ids compress."""

    tokens: int
    repeated: float
    period: int
    junk: float
    per_character: float
    compressed: float


def measure(ids: np.ndarray, text: str | None) -> Measures:
    """The measures of the ids [n]; `text` is what they spell (None: unknown)."""
    repeated, period = _repeats(ids)
    raw = ids.astype("<u4").tobytes()
    if not text:
        return Measures(
            len(ids), repeated, period, 0.0, 0.0, len(zlib.compress(raw, 1)) / max(1, len(raw))
        )
    junk = sum(
        c == "\ufffd" or (unicodedata.category(c) in ("Cc", "Cn", "Co") and c not in "\t\n\r\f")
        for c in text
    )
    return Measures(
        len(ids),
        repeated,
        period,
        junk / len(text),
        len(ids) / len(text),
        len(zlib.compress(raw, 1)) / max(1, len(raw)),
    )


def _repeats(ids: np.ndarray) -> tuple[float, int]:
    """(share of the tokens that are in repeats of one pattern, its length); the pattern with the
    largest share."""
    best = (0.0, 0)
    for period in PERIODS:
        if len(ids) < period * TIMES:
            break
        same = np.concatenate([[False], ids[period:] == ids[:-period], [False]])
        edges = np.flatnonzero(np.diff(same.astype(np.int8)))
        lengths = edges[1::2] - edges[::2] + period
        share = float(lengths[lengths >= period * TIMES].sum() / len(ids))
        if share > best[0]:
            best = (min(1.0, share), period)
    return best


def rank(spans: Sequence[Measures], baseline: Sequence[Measures] = ()) -> list[Suspicion]:
    """How suspicious each of the pieces is, compared with each other and `baseline`."""
    long = [span for span in (*spans, *baseline) if span.tokens >= FEW]
    return [_suspicion(span, long) for span in spans]


def _suspicion(span: Measures, baseline: Sequence[Measures]) -> Suspicion:
    anomalies = [
        (
            MOST * span.repeated,
            f"{span.repeated:.0%} of it repeats {span.period} token{'s' * (span.period > 1)}",
        ),
        (MOST * span.junk, f"{span.junk:.0%} of its characters are no text"),
    ]
    if span.tokens >= FEW:
        for name, text in (
            ("per_character", "tokens per character"),
            ("compressed", "of its size when compressed"),
        ):
            values = np.array([getattr(measures, name) for measures in baseline])
            median = float(np.median(values))
            spread = max(1.4826 * float(np.median(np.abs(values - median))), SPREAD * median, 1e-9)
            value = getattr(span, name)
            anomalies.append(
                (
                    min(MOST, abs(value - median) / spread),
                    f"{value:.2f} {text}, where {median:.2f} is usual",
                )
            )
    score, reason = max(anomalies)
    return Suspicion(score, reason if score >= 3 else "nothing stands out")
