"""Slices: rectangular parts of global tensors, as integers.

A box is one (start, stop) pair per dim; the box of a 0-dim tensor is () and holds one element.
"""

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of `shape`."""
    return tuple((0, size) for size in shape)


def extent(box: Box) -> tuple[int, ...]:
    """Shape of the part that `box` cuts out."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements in `box`."""
    return prod(extent(box))


def intersection(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None where they have no element in common."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Box, origin: Box) -> Box:
    """`box` in the coordinates of `origin`, which contains it."""
    return tuple((p[0] - q[0], p[1] - q[0]) for p, q in zip(box, origin, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """`box` as an index for a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def of_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """The boxes that elements `start` to `stop` of a row-major tensor of `shape` are, in order: at
    most 2k-1 of k dims."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    first = -(-start // inner)
    last = stop // inner  # rows entirely in the range
    if first > last:  # inside one row
        yield from (
            ((last, first), *box)
            for box in of_range(start - last * inner, stop - last * inner, shape[1:])
        )
        return
    yield from (
        ((first - 1, first), *box)
        for box in of_range(start - (first - 1) * inner, inner, shape[1:])
    )
    if first < last:
        yield ((first, last), *whole(shape[1:]))
    yield from (((last, last + 1), *box) for box in of_range(0, stop - last * inner, shape[1:]))


def problem_of(box: Box, shape: Sequence[int]) -> str | None:
    """Why `box` is not a part of a tensor of `shape`, or None when it is."""
    if len(box) != len(shape):
        return f"has {len(box)} dims, the tensor has {len(shape)}"
    for dim, ((start, stop), size) in enumerate(zip(box, shape, strict=True)):
        if not 0 <= start <= stop <= size:
            return f"has {start}:{stop} in dim {dim}, which is not within 0:{size}"
    return None


def text(box: Box) -> str:
    """`box` as a person reads it: [0:4,2:8]."""
    return "[" + ",".join(f"{start}:{stop}" for start, stop in box) + "]"


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of `boxes` (none empty) that have an element in common, or None; a sweep along dim 0."""
    active: list[Box] = []
    for box in sorted(boxes):
        if not box:
            return None if len(boxes) == 1 else (boxes[0], boxes[1])
        active = [earlier for earlier in active if earlier[0][1] > box[0][0]]
        for earlier in active:
            if intersection(box, earlier):
                return earlier, box
        active.append(box)
    return None


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a row-major tensor of `shape`."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def span(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """First and one past the last element of the non-empty `box` in a row-major tensor of
    `shape`."""
    steps = strides(shape)
    first = sum(start * step for (start, _), step in zip(box, steps, strict=True))
    last = sum((stop - 1) * step for (_, stop), step in zip(box, steps, strict=True))
    return first, last + 1


def cut(box: Box, shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Cut the non-empty `box` along its outermost dims until each piece spans at most `limit`
    elements."""
    first, stop = span(box, shape)
    long = [dim for dim, (start, end) in enumerate(box) if end - start > 1]
    if stop - first <= limit or not long:
        yield box
        return
    dim = long[0]
    start, end = box[dim]
    step = max(1, min(end - start - 1, limit // prod(shape[dim + 1 :])))
    for low in range(start, end, step):
        section = (*box[:dim], (low, min(low + step, end)), *box[dim + 1 :])
        yield from cut(section, shape, limit)
