"""One kind of collective of a rank, and those of a layer that is split over tensor-parallel
ranks."""

from typing import NamedTuple, Protocol


class Hidden(Protocol):
    """Of `costs.Sizes`: hidden states of a micro-batch on a rank."""

    sequence: bool
    tokens: int
    hidden: int
    itemsize: int


class Transfer(NamedTuple):
    """One kind of collective of a rank: `calls` of it, over all ranks of `axis`, with `nbytes`
    together.

    Bytes are those of whole tensors: what an all-reduce sums, an all-gather brings together, a
    reduce-scatter is given and a send carries.
    """

    axis: str
    operation: str
    calls: int
    nbytes: int

    def sent(self, size: int) -> int:
        """Bytes that a rank sends, and as many it receives, where `size` ranks do it by the
        shortest way (a ring)."""
        # of a reduce or a broadcast one rank sends nothing, the others everything
        once = size - 1
        share = {
            "all-reduce": 2 * once,
            "all-gather": once,
            "reduce-scatter": once,
            "all-to-all": once,
            "reduce": once,
            "broadcast": once,
            "send": size,
        }
        return self.nbytes * share[self.operation] // size


class Traffic(NamedTuple):
    """What a block sends for one micro-batch: in `forward` (and in a second one) and `backward`; in
    a second forward whose result nothing needs, which ends before its last sum (`unneeded`); and
    of its parts that are recomputed by themselves (`recomputed`)."""

    forward: list[Transfer]
    backward: list[Transfer]
    unneeded: list[Transfer]
    recomputed: list[Transfer]


def times(number: int, sent: list[Transfer]) -> list[Transfer]:
    """So many times the same."""
    return [t._replace(calls=number * t.calls, nbytes=number * t.nbytes) for t in sent]


def gathered_input(sizes: Hidden) -> list[Transfer]:
    """The input of a column-parallel layer, whole only with sequence parallelism's gather."""
    gather = Transfer("tp", "all-gather", 1, sizes.tokens * sizes.hidden * sizes.itemsize)
    return [gather] if sizes.sequence else []


def summed_result(sizes: Hidden) -> list[Transfer]:
    """The result of a row-parallel layer; also the gradient of a column-parallel one's input."""
    operation = "reduce-scatter" if sizes.sequence else "all-reduce"
    return [Transfer("tp", operation, 1, sizes.tokens * sizes.hidden * sizes.itemsize)]


def column_to_row_backward(sizes: Hidden) -> list[Transfer]:
    """The backward of a column-parallel layer and the row-parallel one behind it. With sequence
    parallelism it gathers the input once more, and the gradient of the result."""
    return [*times(2, gathered_input(sizes)), *summed_result(sizes)]
