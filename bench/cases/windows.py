"""Attention inside windows, beside that over all earlier positions."""

from __future__ import annotations

from collections.abc import Iterator

from harness import Case, Setup, Side, benchmark, each

ATTENTION = "attention_call:Attention"
# what computes the window: what computes all positions where it is chosen
CAUSAL = {"cpp_fp32": "cpp_fp32", "cpp_bf16": "cpp_bf16", "chunked": "sdpa"}


@benchmark
def windows(
    setup: Setup,
    window: int = 128,
    s: int = 4096,
    heads: int = 8,
    kernel: str = each("cpp_fp32", "chunked"),
) -> Iterator[Case]:
    """Attention of one sequence, forward and backward: inside a window by `kernel` (cpp_fp32,
    chunked, cpp_bf16) beside all earlier positions by what is chosen there. The gain is to be
    compared with the pairs."""
    if kernel not in CAUSAL:
        raise ValueError(f"kernel={kernel}: is none of {', '.join(CAUSAL)}")
    length = 256 if setup.small else s
    dtype = "bfloat16" if kernel == "cpp_bf16" else "float32"
    common = {"s": length, "heads": heads, "dtype": dtype}
    inside = {"window": window, "kernel": kernel, **common}
    sides = setup.ours(ATTENTION, lambda tree: inside, "window")
    causal = {"window": 0, "kernel": CAUSAL[kernel], **common}
    sides.append(Side("causal", ATTENTION, causal, waiting=True))
    pairs = sum(min(window, query + 1) for query in range(length))
    times = length * (length + 1) / 2 / pairs
    title = f"window {window} of {length}, {kernel}, {times:.1f} x fewer pairs"
    yield Case(title, sides, length, "positions")
