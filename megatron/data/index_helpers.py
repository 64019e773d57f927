"""The sample index and shuffles: by the C++ (`megatron.data.helpers_cpp`) or by numpy, with the
same results.

`IMPLEMENTATION` says which one is in use and `REASON` why it is not the C++; nothing is built at
run time.
"""

import numpy as np

INTERFACE = 3  # an installed build of an older helpers.cpp may be found with a newer checkout

try:
    from megatron.data import helpers_cpp as CPP  # type: ignore[attr-defined]  # C++ has no stubs
except ImportError as error:  # not built: no compiler at install, or run from a plain checkout
    CPP = None
    REASON = f"megatron.data.helpers_cpp is not built ({error}); pip install . builds it"
else:
    REASON = ""
    if getattr(CPP, "INTERFACE", None) != INTERFACE:
        REASON = f"{CPP.__file__} was built from other source; pip install . rebuilds it"
        CPP = None
IMPLEMENTATION = "C++" if CPP else "numpy"

RAW_NUMBERS = 1 << 20  # random numbers drawn at a time for a shuffle


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
    if CPP is None or len(values) > 1 << 32:
        random.shuffle(values)
        return
    unshuffled = len(values) - 1
    while unshuffled > 0:
        state = random.get_state()
        count = min(RAW_NUMBERS, 2 * unshuffled + 64)
        unshuffled, used = CPP.shuffle(
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
    (CPP.fill_sample_index if CPP else fill_sample_index)(
        lengths, document_index, sequence_length, rows
    )
    return rows


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
