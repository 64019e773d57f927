"""Document boundaries of a batch as attention kernels take them (`cu_seqlens`)."""

from functools import lru_cache

import torch
from torch import Tensor


def cumulative_lengths(document_ids: Tensor) -> Tensor:
    """document_ids [b, s] -> int32 [documents + 1]: where each document begins in the flat batch b
    s, and its end.

    A document is a run of equal ids in one sample. The number of documents is data: the device is
    waited for, unless the ids came with it (`with_lengths`).
    """
    lengths = getattr(document_ids, "cu_seqlens", None)
    return _read_lengths(document_ids) if lengths is None else lengths


def with_lengths(document_ids: Tensor, on_host: Tensor) -> Tensor:
    """`document_ids` [b, s] on a device with their `cumulative_lengths`, found in the same ids on
    the host."""
    if on_host.device.type == "meta":  # of --dry-run --trace: a document a row
        lengths = torch.empty(len(on_host) + 1, dtype=torch.int32, device="meta")
    else:
        lengths = _read_lengths(on_host)
    if document_ids.device.type == "cuda":
        lengths = lengths.pin_memory()
    lengths = lengths.to(document_ids.device, non_blocking=True)
    # an attribute, which a graph can read, of a class that declares none
    document_ids.cu_seqlens = lengths  # type: ignore[attr-defined]
    return document_ids


# all layers of a micro-batch ask for the same; a few micro-batches are under way at a time
@lru_cache(maxsize=8)
def _read_lengths(document_ids: Tensor) -> Tensor:
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = starts.flatten().nonzero().flatten()
    return torch.cat((begins, begins.new_tensor([document_ids.numel()]))).to(torch.int32)


@lru_cache(maxsize=8)
def run_starts(document_ids: Tensor) -> Tensor | None:
    """document_ids [b, s] -> int32 [b, s]: where the run of equal ids begins in which a position
    is.

    None if an id returns after another one: then its documents are no runs. The ids are read, which
    waits for a device.
    """
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    for ids, begins in zip(document_ids, starts, strict=True):
        of_runs = ids[begins]
        if len(of_runs.unique()) < len(of_runs):
            return None
    positions = torch.arange(document_ids.shape[1], dtype=torch.int32, device=document_ids.device)
    return torch.where(starts, positions, 0).cummax(1).values.contiguous()
