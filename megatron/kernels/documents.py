"""Documents in a batch as the kernels of variable length want them: where each begins. Knows no kernel."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)  # all layers of a micro-batch ask for the same; a few micro-batches are under way at a time
def cumulative_lengths(document_ids: Tensor) -> Tensor:
    """document_ids [b, s] -> int32 [documents + 1]: where each document begins in the flat batch b s, and its end.

    A document is a run of equal ids in one sample. The number of documents is data, so a CUDA device is waited for.
    """
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = starts.flatten().nonzero().flatten()
    return torch.cat((begins, begins.new_tensor([document_ids.numel()]))).to(torch.int32)
