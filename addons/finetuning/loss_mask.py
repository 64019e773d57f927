"""The loss mask inside the token ids of a packed sample: one int32 per token says which token it is
and whether the model is trained to predict it.

A token that is trained is its id; one that is not is -id. So an id of 0 is
never trained: in many vocabularies 0 is a token for padding or unknown text. In others it is
ordinary text ("!" of GPT-2 and Llama 3), so 0 with training is `TRAINED_ZERO`, which a reader that
does not know it refuses as an id outside the vocabulary.
"""

import numpy as np

from megatron.data.sample_lookup import LABEL_OF_ZERO, NO_LABEL

TRAINED_ZERO = int(np.iinfo(np.int32).min)


def mark(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Stored values, int32 [n], of ids [n] and whether each is trained, bool [n]."""
    return np.where(trained, np.where(ids == 0, TRAINED_ZERO, ids), -ids).astype(np.int32)


def tokens_of(stored: np.ndarray) -> np.ndarray:
    """The ids the model reads, of stored values int64 [n]."""
    return np.where(stored == TRAINED_ZERO, 0, np.abs(stored))


def is_trained(stored: np.ndarray) -> np.ndarray:
    """bool [n]: whether the model is trained to predict each token."""
    return (stored > 0) | (stored == TRAINED_ZERO)


def labels_of(stored: np.ndarray) -> np.ndarray:
    """The labels of a row: the id, `LABEL_OF_ZERO` for id 0, `NO_LABEL` for tokens without loss."""
    return np.where(stored == TRAINED_ZERO, LABEL_OF_ZERO, np.maximum(stored, NO_LABEL))


def count_trained(path: str, dtype: np.dtype) -> int:
    """How many tokens of a .bin file are trained; reads it in blocks."""
    count = 0
    with open(path, "rb") as file:
        while len(block := np.fromfile(file, dtype, 1 << 22)):
            count += int(is_trained(block).sum())
    return count
