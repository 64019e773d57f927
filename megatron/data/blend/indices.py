"""Which data set sample i of a blend is of: by the C++ of `megatron.data.index_helpers`, or by
numpy with the same result."""

from collections.abc import Sequence

import numpy as np

from megatron.data.index_helpers import CPP

NARROW_DATASETS = 32766  # so many have ids of int16, as in Megatron; more have int32


def dataset_index_dtype(datasets: int) -> np.dtype:
    """int16 where Megatron has it, int32 for blends of more datasets than it can hold."""
    return np.dtype(np.int16 if datasets <= NARROW_DATASETS else np.int32)


def build_blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which dataset (int16 or int32 [size]) and which of its samples (int64 [size]) sample i of a
    weighted blend is.

    `weights` sum to 1. Sample i is the next one of the first dataset that maximises weight * max(i,
    1) - taken in float64. Source: Megatron's build_blending_indices.
    """
    dataset_index = np.empty(size, dataset_index_dtype(len(weights)))
    sample_index = np.empty(size, np.int64)
    (CPP.fill_blending if CPP else fill_blending)(
        np.array(weights, np.float64), dataset_index, sample_index
    )
    return dataset_index, sample_index


def build_exhaustive_blending_indices(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Like `build_blending_indices` for weights in proportion to `sizes`, using every sample of
    each dataset once."""
    total = int(sum(sizes))
    dataset_index = np.empty(total, dataset_index_dtype(len(sizes)))
    sample_index = np.empty(total, np.int64)
    fill = CPP.fill_exhaustive_blending if CPP else fill_exhaustive_blending
    fill(np.array(sizes, np.int64), dataset_index, sample_index)
    return dataset_index, sample_index


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
