"""Row-blocked work on a CPU: scratch stays in the cache, and blocks are spread over threads.

torch does one operation at a time over the whole tensor, each a pass over memory, and all
threads wait for each other after each; a formula of eight operations over row blocks makes one
trip and waits once. On other devices, and where torch.compile fuses by itself, nothing is gained.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

# of one run; shorter ones are slower: after each operation a thread waits for the interpreter
BLOCK_ELEMENTS = 1 << 19
# for fewer numbers a function of ours in autograd costs more than what it saves
FEW = 1 << 13

Block = TypeVar("Block")


def pays_off(device: torch.device) -> bool:
    """Whether a formula is faster computed in row blocks than operation by operation, outside a
    graph."""
    return device.type == "cpu"


def row_blocks(rows: int, width: int) -> list[slice]:
    """Slices of `rows` rows, each of about BLOCK_ELEMENTS / `width` rows."""
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def for_each(
    blocks: Sequence[Block], device: torch.device, work: Callable[[Block], object]
) -> None:
    """`work(block)` for every block, without gradients: on a CPU in parallel, in as many threads as
    torch may use.

    Blocks must not write to the same memory. A thread does its block alone, so threads wait for
    each other once and not in every operation: on a machine with other work, and with many threads,
    that is most of the time.
    """
    threads = min(torch.get_num_threads(), len(blocks)) if device.type == "cpu" else 1
    if threads > 1 and not torch.compiler.is_compiling():
        inference = torch.is_inference_mode_enabled()  # which a thread has for itself

        def alike(block: Block) -> None:
            with torch.inference_mode(inference):
                work(block)

        list(_pool(torch.get_num_threads(), os.getpid()).map(alike if inference else work, blocks))
        return
    with torch.no_grad():
        for block in blocks:
            work(block)


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads whose torch operations are not spread any further; a forked process needs its own."""
    return ThreadPoolExecutor(threads, f"blocks-of-{process}", initializer=_work_alone)


def _work_alone() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the computation: fp32 for bf16 and fp16, else that of `x`."""
    return torch.promote_types(x.dtype, torch.float32)
