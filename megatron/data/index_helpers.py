"""Sample index and blending indices: by the C++ (`megatron.data.helpers_cpp`) or by numpy, with the
same results.

`IMPLEMENTATION` says which one is in use and `REASON` why it is not the C++; nothing is built at
run time.
"""

from collections.abc import Sequence

import numpy as np

INTERFACE = 3  # an installed build of an older helpers.cpp may be found with a newer checkout

try:
    from megatron.data import helpers_cpp as _cpp  # type: ignore[attr-defined]  # C++ has no stubs
except ImportError as error:  # not built: no compiler at install, or run from a plain checkout
    _cpp = None
    REASON = f"megatron.data.helpers_cpp is not built ({error}); pip install . builds it"
else:
    REASON = ""
    if getattr(_cpp, "INTERFACE", None) != INTERFACE:
        REASON = f"{_cpp.__file__} was built from other source; pip install . rebuilds it"
        _cpp = None
IMPLEMENTATION = "C++" if _cpp else "numpy"

RAW_NUMBERS = 1 << 20  # random numbers drawn at a time for a shuffle
NARROW_DATASETS = 32766  # so many have ids of int16, as in Megatron; more have int32


def dataset_index_dtype(datasets: int) -> np.dtype:
    """int16 where Megatron has it, int32 for blends of more datasets than it can hold."""
    return np.dtype(np.int16 if datasets <= NARROW_DATASETS else np.int32)


def document_index_dtype(sequences: int) -> np.dtype:
    """int32 where Megatron has it, int64 for more than 2**31 sequences."""
    return np.dtype(np.int32 if sequences <= 1 << 31 else np.int64)


def sample_index_dtype(document_entries: int, longest: int) -> np.dtype:
    """int32 while places in the document index and offsets in a document fit it, else int64
    (megatron-core's rule)."""
    return np.dtype(
        np.int32 if max(document_entries, longest) <= np.iinfo(np.int32).max else np.int64
    )


def shuffle(random: np.random.RandomState, values: np.ndarray) -> None:
    """What `random.shuffle(values)` does, to the array [n] and to the generator, in a third of the
    time with the C++."""
    if _cpp is None or len(values) > 1 << 32:
        random.shuffle(values)
        return
    unshuffled = len(values) - 1
    while unshuffled > 0:
        state = random.get_state()
        count = min(RAW_NUMBERS, 2 * unshuffled + 64)
        unshuffled, used = _cpp.shuffle(
            values, unshuffled, random.randint(0, 1 << 32, size=count, dtype=np.uint32)
        )
        if used < count:  # the rest were not drawn
            random.set_state(state)
            random.randint(0, 1 << 32, size=used, dtype=np.uint32)


def build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, sequence_length: int, num_samples: int
) -> np.ndarray:
    """Where each sample starts: int32 or int64 [num_samples + 1, 2].

    `lengths` int32 [S] are tokens per sequence, `document_index` int32 or int64 [entries] the order
    they are read in. Row r is (place in document_index, token offset) of token r * sequence_length;
    neighbours share one token, the label of the last token of one sample. Source: Megatron's
    build_sample_idx. Raises ValueError if there are too few tokens.
    """
    longest = int(lengths.max()) if len(lengths) else 0
    rows = np.empty((num_samples + 1, 2), sample_index_dtype(len(document_index), longest))
    lengths = np.require(lengths, np.int32, ["C", "A"])
    wide = np.int64 if document_index.dtype.itemsize > 4 else np.int32
    document_index = np.require(document_index, wide, ["C", "A"])
    (_cpp.fill_sample_index if _cpp else fill_sample_index)(
        lengths, document_index, sequence_length, rows
    )
    return rows


def build_blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which dataset (int16 or int32 [size]) and which of its samples (int64 [size]) sample i of a
    weighted blend is.

    `weights` sum to 1. Sample i is the next one of the first dataset that maximises weight * max(i,
    1) - taken in float64. Source: Megatron's build_blending_indices.
    """
    dataset_index = np.empty(size, dataset_index_dtype(len(weights)))
    sample_index = np.empty(size, np.int64)
    (_cpp.fill_blending if _cpp else fill_blending)(
        np.array(weights, np.float64), dataset_index, sample_index
    )
    return dataset_index, sample_index


def build_exhaustive_blending_indices(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Like `build_blending_indices` for weights in proportion to `sizes`, using every sample of
    each dataset once."""
    total = int(sum(sizes))
    dataset_index = np.empty(total, dataset_index_dtype(len(sizes)))
    sample_index = np.empty(total, np.int64)
    fill = _cpp.fill_exhaustive_blending if _cpp else fill_exhaustive_blending
    fill(np.array(sizes, np.int64), dataset_index, sample_index)
    return dataset_index, sample_index


def fill_sample_index(
    lengths: np.ndarray, documents: np.ndarray, sequence_length: int, rows: np.ndarray
) -> None:
    """The numpy twin: token r * sequence_length is in the first document that ends behind it."""
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    last = len(rows) - 1
    if last > 0 and (len(ends) == 0 or last * sequence_length >= ends[-1]):
        raise ValueError("the documents have fewer tokens than the samples need")
    rows[0] = 0
    first_tokens = np.arange(1, last + 1, dtype=np.int64) * sequence_length
    document = np.searchsorted(ends, first_tokens, side="right")
    starts = ends - lengths[documents]
    rows[1:, 0] = document
    rows[1:, 1] = first_tokens - starts[document]


def fill_blending(weights: np.ndarray, dataset_index: np.ndarray, sample_index: np.ndarray) -> None:
    """The numpy twin of the greedy weighted blend."""
    _fill_greedy(weights, None, dataset_index, sample_index)


def fill_exhaustive_blending(
    sizes: np.ndarray, dataset_index: np.ndarray, sample_index: np.ndarray
) -> None:
    """The numpy twin of the exhaustive blend."""
    _fill_greedy(sizes / max(len(dataset_index), 1), sizes, dataset_index, sample_index)


def _fill_greedy(
    weights: np.ndarray,
    limit: np.ndarray | None,
    dataset_index: np.ndarray,
    sample_index: np.ndarray,
) -> None:
    drawn = np.zeros(len(weights))  # float64 counts are exact below 2**53
    lag = np.empty(len(weights))
    if limit is not None:
        drawn[limit <= 0] = np.inf
    multiply = np.multiply
    subtract = np.subtract
    for i in range(len(dataset_index)):
        multiply(weights, max(i, 1), lag)
        subtract(lag, drawn, lag)
        chosen = lag.argmax()
        count = drawn[chosen]
        dataset_index[i] = chosen
        sample_index[i] = count
        drawn[chosen] = np.inf if limit is not None and count + 1 == limit[chosen] else count + 1
