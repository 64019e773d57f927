"""The notation of --pipeline-model-parallel-layout, as in Megatron: read, checked and turned into
the layers of each stage; stages where embedding or loss count as a layer."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, NoReturn

from megatron.config.parallel import CHUNKS, EMBEDDING, LAYOUT, LOSS, Split

MOST_SYMBOLS = 100_000
_WORDS = {
    "E": "the embedding",
    "t": "a transformer layer",
    "m": "a multi-token prediction layer",
    "L": "the loss",
}


class TypedSymbol(NamedTuple):
    """A symbol of the expanded layout, and the character (from 1) it was typed at."""

    symbol: str
    position: int


def _refuse(layout: str, position: int, problem: str) -> NoReturn:
    """Raise ValueError: the flag, the character it is about, and a remedy."""
    raise ValueError(
        f"{LAYOUT} {layout}, character {position}: {problem} [pipeline-layout-not-valid]"
    )


def _repetitions(layout: str, star: int, symbols: int) -> tuple[int, int]:
    """The number behind the `*` at index `star`, of so many symbols, and the index after it."""
    stop = star + 1
    while layout[stop : stop + 1].isdecimal():
        stop += 1
    digits = layout[star + 1 : stop]
    if not digits or int(digits) < 1:
        _refuse(layout, star + 1, "* needs a number of repetitions, at least 1")
    if len(digits) > 6 or symbols * int(digits) > MOST_SYMBOLS:
        _refuse(layout, star + 1, f"repeats to more than {MOST_SYMBOLS} symbols")
    return int(digits), stop


def expand(layout: str) -> list[TypedSymbol]:
    """The symbols E, t, m, L and | of a layout in order, repetitions (`t*3`, `(tt|)*4`) written
    out; commas mean nothing.

    Raises ValueError with the position of the first character that cannot stand where it does.
    """
    typed: list[TypedSymbol] = []
    group: tuple[int, int] | None = None  # of the open parenthesis: position, symbols before it
    offset = 0
    while offset < len(layout):
        char = layout[offset]
        position = offset + 1
        start = len(typed)
        offset += 1
        if char == ",":
            continue
        if char == "(" and group is None:
            group = position, start
            continue
        if char == ")" and group is not None:
            opened, start = group
            group = None
            if start == len(typed) or layout[offset : offset + 1] != "*":
                _refuse(layout, opened, "parentheses hold symbols to repeat, as in (tt|)*4")
        elif char in "EtmL|":
            typed.append(TypedSymbol(char, position))
        else:
            _refuse(
                layout, position, f"{char!r} is unexpected; symbols are E, t, m, L, |, (...)*N, *N"
            )
        if layout[offset : offset + 1] == "*":
            count, offset = _repetitions(layout, offset, len(typed) - start)
            typed[start:] = typed[start:] * count
    if group is not None:
        _refuse(layout, group[0], "this parenthesis is not closed")
    return typed


def _check(layout: str, typed: list[TypedSymbol], num_layers: int, depths: int) -> None:
    """The embedding once and first, the loss once and last, `num_layers` layers between, and behind
    them, on one stage, `depths` layers of multi-token prediction."""
    counts = {symbol: [i for i in typed if i.symbol == symbol] for symbol in _WORDS}
    for symbol, index in (("E", 0), ("L", -1)):
        required = "first" if index == 0 else "last"
        if not typed or typed[index].symbol != symbol:
            position = typed[index].position if typed else 1
            _refuse(layout, position, f"{_WORDS[symbol]} ({symbol}) must come {required}")
        if len(counts[symbol]) > 1:
            extra = counts[symbol][1 if index == 0 else 0]
            _refuse(layout, extra.position, f"{_WORDS[symbol]} ({symbol}) must be there only once")
    layers = counts["t"]
    if len(layers) != num_layers:
        extra = layers[num_layers] if len(layers) > num_layers else typed[-1]
        _refuse(
            layout,
            extra.position,
            f"the layout has {len(layers)} transformer layers (t) and --num-layers is "
            f"{num_layers}; make them equal",
        )
    stop = len(typed) - 1 - (typed[-2].symbol == "|")
    before_loss = typed[stop - depths : stop]
    wrong = [entry for entry in before_loss if entry.symbol != "m"]
    wrong += [entry for entry in counts["m"] if entry not in before_loss]
    if wrong:
        _refuse(
            layout,
            wrong[0].position,
            f"{_WORDS['m']} (m) must be there as often as --mtp-num-layers says ({depths}), all on "
            "one stage, just before L or the stage of L alone",
        )


def parse_layout(
    layout: str, num_layers: int, stages: int, chunks: int | None = None, depths: int = 0
) -> Split:
    """The global layer numbers of each stage's chunks, `parse_layout(...)[stage][chunk]`.

    A part between two | is a virtual stage, and part c x stages + s is chunk c of stage s. E and L
    may have a virtual stage of their own. `chunks`: virtual stages of a rank, where given.
    `depths`: layers of multi-token prediction. Raises ValueError with flag, position and remedy.
    """
    entries = expand(layout)
    _check(layout, entries, num_layers, depths)
    sizes = [0]
    empty = True
    for entry in entries:
        if entry.symbol == "|" and empty:
            _refuse(layout, entry.position, "this virtual stage is empty; give it a layer")
        empty = entry.symbol == "|"
        if empty:
            sizes.append(0)
        sizes[-1] += entry.symbol == "t"
    end = f"{LAYOUT} {layout}, character {entries[-1].position}"
    if len(sizes) > stages == 1:
        border = next(entry.position for entry in entries if entry.symbol == "|")
        problem = "virtual stages need --pipeline-model-parallel-size 2 or more"
        _refuse(layout, border, problem)
    if mtp_is_apart(layout) and stages == 2 < len(sizes):
        _refuse(
            layout,
            entries[-3].position,
            f"{_WORDS['m']} (m) would be on the rank of the embedding, in another virtual stage; "
            "put it on the stage of L",
        )
    return deal(sizes, stages, end, chunks)


def deal(sizes: list[int], stages: int, typed: str, chunks: int | None = None) -> Split:
    """The global layer numbers of each stage's chunks, where virtual stages have so many layers.
    `typed`: the flag that says so. Raises ValueError."""
    if len(sizes) % stages or (chunks is not None and len(sizes) != stages * chunks):
        per_rank = "" if chunks is None else f" x {CHUNKS} {chunks} = {stages * chunks}"
        raise ValueError(
            f"{typed}: it ends after {len(sizes)} virtual stages, which must be "
            + ("a multiple of " if chunks is None else "")
            + f"--pipeline-model-parallel-size {stages}{per_rank} [pipeline-layout-not-valid]"
        )
    split: list[list[range]] = [[] for _ in range(stages)]
    start = 0
    for number, size in enumerate(sizes):
        split[number % stages].append(range(start, start + size))
        start += size
    return tuple(map(tuple, split))


def mtp_is_apart(layout: str | None) -> bool:
    """Has multi-token prediction its place before the stage of the loss?"""
    return "m|L" in "".join(entry.symbol for entry in expand(layout or ""))


def split_with_ends(
    num_layers: int, stages: int, chunks: int, embedding: bool, loss: bool
) -> Split:
    """As `split_layers`, where the embedding, the loss or both count as a layer of the virtual
    stage they are on, and all virtual stages are alike.

    Raises ValueError with the flags, values and remedy.
    """
    counted = num_layers + embedding + loss
    size, remainder = divmod(counted, stages * chunks)
    flags = " and ".join([EMBEDDING] * embedding + [LOSS] * loss)
    if remainder or not size:
        lower = counted - remainder - embedding - loss
        fits = [n for n in (lower, lower + stages * chunks) if n > 0]
        raise ValueError(
            f"{flags}: --num-layers {num_layers} + {embedding + loss} is not a multiple of "
            f"--pipeline-model-parallel-size {stages}"
            + f" x {chunks} virtual stages"
            * (chunks > 1)
            + f"; use --num-layers {' or '.join(map(str, fits))}, or omit the flag "
            "[layers-not-divisible-by-stages]"
        )
    stops = [min(num_layers, number * size - embedding) for number in range(1, stages * chunks + 1)]
    sizes = [stop - start for start, stop in pairwise((0, *stops))]
    return deal(sizes, stages, flags, chunks)
