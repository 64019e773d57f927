"""Bits per byte: how well a model predicts text, whatever its tokenizer.

bits per byte = loss / ln 2 * tokens / bytes, where loss is in nats per token. Tokens and bytes are
those of the whole data set as tools/preprocess_data.py counted them: all tokens, end-of-document
tokens included, and the UTF-8 bytes of the texts, to which end-of-document tokens add nothing.
"""

import math
from collections.abc import Sequence

import numpy as np

from megatron.data.gpt_dataset import MockGPTDataset
from megatron.data.sample_lookup import Dataset, is_blend


def bits_per_byte(loss: float | None, bytes_per_token: float | None) -> float | None:
    """`loss` (nats per token) in bits per byte of text; None where the bytes are unknown."""
    return None if loss is None or bytes_per_token is None else loss / math.log(2) / bytes_per_token


def bytes_per_token(dataset: Dataset) -> float | None:
    """Bytes of text per token of what `dataset` shows; None where a data set that it reads has
    none.

    In a blend each data set counts by its share of the samples. Mock data and packed samples have
    no count of bytes.
    """
    members = dataset.datasets if is_blend(dataset) else [dataset]
    return _mean(_shares(dataset), [_of_member(member) for member in members])


def _shares(dataset: Dataset) -> Sequence[float]:
    if is_blend(dataset) and hasattr(dataset, "dataset_index"):
        return np.bincount(dataset.dataset_index, minlength=len(dataset.datasets)).tolist()
    return dataset.shares.weights if hasattr(dataset, "shares") else [1]


def _of_member(member: Dataset) -> float | None:
    if isinstance(member, MockGPTDataset):
        return None
    if hasattr(member, "corpus"):
        return _of_pair(member.corpus.path_prefix)
    if hasattr(member, "token_counts"):
        counts = member.token_counts()
        return _mean(list(counts.values()), [_of_pair(prefix) for prefix in counts])
    return None


def _of_pair(prefix: str) -> float | None:
    from megatron.data.tokenizers.metadata import text_size

    size = text_size(prefix)
    return None if size is None else size[1] / size[0]


def _mean(weights: Sequence[float], values: Sequence[float | None]) -> float | None:
    sizes = [value for value in values if value is not None]
    if len(sizes) < len(values):
        return None
    return sum(weight * value for weight, value in zip(weights, sizes, strict=True)) / sum(weights)
