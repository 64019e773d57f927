"""Causal attention of local heads: torch's fused kernel, blocks of query rows, C++ or flash-attn;
knows no layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels import flash_attention
from megatron.kernels.cpu import bf16_attention, fp32_attention
from megatron.kernels.cpu.blocking import for_each
from megatron.kernels.cu_seqlens import run_starts
from megatron.kernels.dropout import DropoutBits
from megatron.kernels.linear import low_precision_is_native
from megatron.kernels.reference_attention import plain_attention

IMPLEMENTATIONS = ("auto", "sdpa", "chunked", "plain", "tiles", "vectors", "flash")
QUERY_ROWS = 64  # of one block; few, so that little above the diagonal is computed in vain
BLOCK_ELEMENTS = 1 << 18  # of the scores of one block on a CPU, so that they stay in the cache
LAUNCH_ELEMENTS = 1 << 26  # elsewhere, where each operation is a launch
SEED_STEP = 0x9E3779B97F4A7C15  # of the dropout streams of two heads
# so many positions: chunks are faster than torch's kernel there (docs/performance.md)
CHUNKS_ON_CPU = range(448, 768)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    document_ids: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """softmax(scale q k^T, causal) v for local heads.

    q [s, b, n, d], k and v [s, b, g, d] with n a multiple of g (query head i uses key head i // (n
    / g)) -> [s, b, n, d]. `document_ids` [b, s] int: a position sees only positions of its own id.
    Dropout on the probabilities needs `dropout_seed`, of which (with the shape and the
    implementation) the mask is a pure function.

    `implementation`: "sdpa" (torch's fused kernel: plain causal, no dropout), "chunked" (blocks of
    query rows, all cases), "tiles" (C++, bf16 on a CPU with AMX or AVX512-BF16; documents must be
    runs of one id), "vectors" (C++, fp32 arithmetic on a CPU with AVX2: plain causal, no dropout),
    "flash" (flash-attn: CUDA, 16 bits, no dropout), "plain" (the formula, all cases) or "auto".
    None but "plain" holds an s x s tensor. Raises ValueError for a request that cannot be met.
    """
    chosen, _, _ = select_attention(
        q.device,
        q.dtype,
        dropout_p,
        document_ids is not None,
        implementation,
        len(q),
        q.shape[-1] if q.shape[-1] == v.shape[-1] else 0,
    )
    if chosen == "sdpa":
        return _sdpa(q, k, v, scale)
    if chosen == "vectors":
        return fp32_attention.vector_attention(q, k, v, scale)
    if chosen == "flash":
        return flash_attention.flash_attention(q, k, v, scale, document_ids)
    if dropout_p > 0.0 and dropout_seed is None:
        raise ValueError(
            "attention with dropout_p > 0 needs dropout_seed: pass the seed of this layer and site"
        )
    if chosen == "tiles":
        starts = None if document_ids is None else run_starts(document_ids)
        if document_ids is None or starts is not None:
            return bf16_attention.tile_attention(
                q, k, v, scale, dropout_p, dropout_seed or 0, starts
            )
        if implementation == "tiles":
            raise ValueError(
                "attention implementation 'tiles' needs documents that are runs of one id, and "
                "one of these ids returns after another: use 'auto' or 'chunked'"
            )
    if chosen == "plain":
        return plain_attention(q, k, v, scale, dropout_p, dropout_seed, document_ids)
    return _ChunkedAttention.apply(q, k, v, scale, dropout_p, dropout_seed, document_ids)


def select_attention(
    device: torch.device,
    dtype: torch.dtype,
    dropout_p: float,
    documents: bool,
    implementation: str = "auto",
    seq_length: int = CHUNKS_ON_CPU.start,
    head_dim: int = 1,
) -> tuple[str, str, str]:
    """Which implementation runs, why, and why not the other of "sdpa" and "chunked". Raises
    ValueError if the one asked for cannot (whether flash-attn is there, select.py has asked)."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {implementation!r} is unknown: use one of {IMPLEMENTATIONS}"
        )
    obstacles = [
        reason
        for reason, there in (
            ("attention dropout", dropout_p > 0.0),
            ("document masks", documents),
            ("fp64", dtype == torch.float64),
        )
        if there
    ]
    if implementation == "sdpa" and obstacles:
        raise ValueError(
            f"attention implementation 'sdpa' cannot do {' and '.join(obstacles)} without an s x s "
            "tensor or a hidden generator: use 'auto' or 'chunked'"
        )
    no_tiles = bf16_attention.obstacle(device, dtype, head_dim, seq_length)
    if implementation == "tiles" and no_tiles:
        raise ValueError(
            f"attention implementation 'tiles' cannot run: {no_tiles}; use 'auto' or 'chunked'"
        )
    no_vectors = " and ".join(obstacles) or fp32_attention.obstacle(
        device, dtype, head_dim, seq_length
    )
    if implementation == "vectors" and no_vectors:
        raise ValueError(
            f"attention implementation 'vectors' cannot run: {no_vectors}; use 'auto' or 'chunked'"
        )
    if implementation == "flash" and dropout_p > 0.0:
        raise ValueError(
            "attention implementation 'flash' drops by a generator of its own: use 'auto' or "
            "'chunked'"
        )
    if implementation != "auto":
        return implementation, "asked for", "not asked for"
    if no_tiles is None:
        others = f", or cannot do {' and '.join(obstacles)}" if obstacles else ""
        masks = "; dropout masks of its own" if dropout_p > 0.0 else ""
        return (
            "tiles",
            f"this CPU has {bf16_attention.instructions()}{masks}",
            f"slower in bf16 on this CPU{others}",
        )
    if obstacles:
        return (
            "chunked",
            f"needed for {' and '.join(obstacles)}",
            "would hold an s x s tensor or a hidden generator",
        )
    emulated = not low_precision_is_native(device.type, dtype)
    if no_vectors is None and (emulated or dtype == torch.float32):
        return "vectors", "this CPU has AVX512 or AVX2, computes in fp32", "slower here"
    if emulated:
        return "chunked", "computes in fp32", f"this {device.type} emulates {dtype}"
    if device.type == "cpu" and dtype == torch.float32 and seq_length in CHUNKS_ON_CPU:
        return (
            "chunked",
            f"a CPU, {CHUNKS_ON_CPU[0]} to {CHUNKS_ON_CPU[-1]} positions",
            "slower at these lengths",
        )
    return "sdpa", "plain causal attention", "needs more passes over memory"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q_, k_, v_ = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    gqa = q.shape[2] != k.shape[2]
    return F.scaled_dot_product_attention(
        q_, k_, v_, is_causal=True, scale=scale, enable_gqa=gqa
    ).permute(2, 0, 1, 3)


@dataclass(frozen=True)
class _Block:
    """Query rows start..stop of one set of heads, which see keys first..stop."""

    start: int
    stop: int
    first: int
    # 0 where seen, -inf where not: [rows, rows] over the last keys, or [rows, keys] with documents
    bias: Tensor


class _Plan:
    """How one attention call is cut: sets of heads of a few samples, and blocks of query rows in
    each set."""

    def __init__(self, q: Tensor, k: Tensor, document_ids: Tensor | None):
        self.s, self.b, n, self.d = q.shape
        self.groups = k.shape[2]
        self.repeats = n // self.groups
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.device = q.device
        self.rows = [(i, min(i + QUERY_ROWS, self.s)) for i in range(0, self.s, QUERY_ROWS)]
        self.ids = document_ids
        self.first = (
            _first_keys(document_ids)
            if document_ids is not None and read_ids(self.device)
            else None
        )
        upper = torch.full(
            (QUERY_ROWS, QUERY_ROWS), -torch.inf, dtype=self.dtype, device=self.device
        )
        self.upper = upper.triu_(1)

    def head_sets(self) -> list[tuple[int, int]]:
        """Ranges of the b * g key heads; within one sample if it has documents, whose masks they
        share."""
        longest = min(QUERY_ROWS, self.s) * self.s * self.repeats
        per_set = max(
            1, (BLOCK_ELEMENTS if self.device.type == "cpu" else LAUNCH_ELEMENTS) // longest
        )
        ends = self.groups if self.ids is not None else self.b * self.groups
        ranges = [(i, min(i + per_set, ends)) for i in range(0, ends, per_set)]
        samples = self.b if self.ids is not None else 1
        return [
            (i + ends * sample, j + ends * sample) for sample in range(samples) for i, j in ranges
        ]

    def blocks(self, heads: tuple[int, int]):
        for start, stop in self.rows:
            if self.ids is None:
                yield _Block(start, stop, 0, self.upper[: stop - start, : stop - start])
                continue
            sample = heads[0] // self.groups
            ids = self.ids[sample]
            first = min(self.first[sample][start:stop]) if self.first else 0
            other = ids[start:stop, None] != ids[None, first:stop]
            bias = torch.zeros(other.shape, dtype=self.dtype, device=self.device).masked_fill_(
                other, -torch.inf
            )
            bias[:, start - first :] += self.upper[: stop - start, : stop - start]
            yield _Block(start, stop, first, bias)

    def load(self, t: Tensor, heads: tuple[int, int]) -> Tensor:
        """[s, b, g r, d] -> [heads, r, s, d] of a set of heads, contiguous, in the dtype of the
        maths."""
        per_head = t.shape[2] // self.groups
        part = t.flatten(1, 2)[:, heads[0] * per_head : heads[1] * per_head].unflatten(
            1, (-1, per_head)
        )
        out = torch.empty(
            (heads[1] - heads[0], per_head, self.s, self.d), dtype=self.dtype, device=self.device
        )
        return out.copy_(part.permute(1, 2, 0, 3))

    def store(self, target: Tensor, heads: tuple[int, int], values: Tensor) -> None:
        """[heads, r, s, d] -> its place in target [s, b g r, d]."""
        per_head = values.shape[1]
        target[:, heads[0] * per_head : heads[1] * per_head] = values.flatten(0, 1).transpose(0, 1)

    def probabilities(self, rows: Tensor, keys: Tensor, block: _Block) -> Tensor:
        """softmax of the scores of a block: rows [heads, r rows, d] (scaled), keys [heads, s,
        d]."""
        scores = torch.bmm(rows, keys[:, block.first : block.stop].transpose(1, 2))
        lines = scores.view(-1, block.stop - block.start, scores.shape[2])
        lines[:, :, -block.bias.shape[1] :].add_(block.bias)
        return torch.softmax(scores, -1)


def read_ids(device: torch.device) -> bool:
    """Whether to read document ids on the host, to leave out keys that no row of a block sees. Only
    a CPU does not wait for that; elsewhere shapes do not depend on them, and the masks do it
    all."""
    return device.type == "cpu"


def _first_keys(document_ids: Tensor) -> list[list[int]]:
    """For each position [b, s] the first position of its sample with its id."""
    b, s = document_ids.shape
    ids, names = torch.unique(document_ids, return_inverse=True)
    slots = names + torch.arange(b, device=names.device)[:, None] * len(ids)
    positions = torch.arange(s, device=names.device).expand(b, s)
    first = torch.full((b * len(ids),), s, device=names.device)
    first.scatter_reduce_(0, slots.flatten(), positions.flatten(), "amin")
    return first[slots].tolist()


def _rows(t: Tensor, block: _Block) -> Tensor:
    """[heads, r, s, d] -> [heads, r rows, d] of a block."""
    return t[:, :, block.start : block.stop].flatten(1, 2)


def _bits_of(
    seed: int | None, p: float, device: torch.device, heads: tuple[int, int]
) -> DropoutBits | None:
    """The stream of a set of heads, whose seed is far from that of every other set; None without
    dropout."""
    return DropoutBits((seed + SEED_STEP * heads[0]) % 2**63, p, device) if p > 0.0 else None


class _ChunkedAttention(torch.autograd.Function):
    """Probabilities are computed again in backward and dropout bits drawn again: only q, k and v
    are kept."""

    @staticmethod
    def forward(ctx, q, k, v, scale, dropout_p, seed, document_ids):
        ctx.save_for_backward(q, k, v, document_ids)
        ctx.scale = scale
        ctx.dropout_p = dropout_p
        ctx.seed = seed
        plan = _Plan(q, k, document_ids)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)

        def work(heads: tuple[int, int]) -> None:
            bits = _bits_of(seed, dropout_p, q.device, heads)
            queries = plan.load(q, heads).mul_(scale)
            keys = plan.load(k, heads).squeeze(1)
            values = plan.load(v, heads).squeeze(1)
            result = torch.empty_like(queries)
            for block in plan.blocks(heads):
                probs = plan.probabilities(_rows(queries, block), keys, block)
                if bits is not None:
                    probs.mul_(bits.keep(probs.numel(), probs.dtype).view(probs.shape))
                part = torch.bmm(probs, values[:, block.first : block.stop])
                result[:, :, block.start : block.stop] = part.view(
                    len(part), plan.repeats, -1, plan.d
                )
            plan.store(
                out.flatten(1, 2),
                heads,
                result if bits is None else result.mul_(1.0 / (1.0 - dropout_p)),
            )

        for_each(plan.head_sets(), q.device, work)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, document_ids = ctx.saved_tensors
        plan = _Plan(q, k, document_ids)
        grads = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))

        def work(heads: tuple[int, int]) -> None:
            bits = _bits_of(ctx.seed, ctx.dropout_p, q.device, heads)
            for target, values in zip(
                grads, _head_set_grads(ctx, plan, heads, (q, k, v, grad_out), bits), strict=True
            ):
                plan.store(target.flatten(1, 2), heads, values)

        for_each(plan.head_sets(), q.device, work)
        return *grads, None, None, None, None


def _head_set_grads(
    ctx, plan: _Plan, heads: tuple[int, int], tensors: tuple[Tensor, ...], bits: DropoutBits | None
):
    """Gradients of q, k and v of one set of heads, each [heads, r, s, d]."""
    queries, keys, values, grad_out = (plan.load(t, heads) for t in tensors)
    keys = keys.squeeze(1)
    values = values.squeeze(1)
    queries.mul_(ctx.scale)
    if bits is not None:
        grad_out.mul_(1.0 / (1.0 - ctx.dropout_p))
    grad_q = torch.empty_like(queries)
    # Kept transposed, [heads, d, s]: the product with the probabilities then reads them row by row.
    grad_k, grad_v = (torch.zeros_like(keys).view(len(keys), plan.d, plan.s) for _ in range(2))
    for block in plan.blocks(heads):
        seen = slice(block.first, block.stop)
        rows = _rows(queries, block)
        grad_rows = _rows(grad_out, block)
        probs = plan.probabilities(rows, keys, block)
        grad_probs = torch.bmm(grad_rows, values[:, seen].transpose(1, 2))
        dropped = probs
        if bits is not None:
            keep = bits.keep(probs.numel(), probs.dtype).view(probs.shape)
            dropped = probs * keep
            grad_probs.mul_(keep)
        grad_v[:, :, seen].baddbmm_(grad_rows.transpose(1, 2), dropped)
        grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
        grad_k[:, :, seen].baddbmm_(rows.transpose(1, 2), grad_scores)
        part = torch.bmm(grad_scores, keys[:, seen])
        grad_q[:, :, block.start : block.stop] = part.view(len(part), plan.repeats, -1, plan.d)
    return (
        grad_q.mul_(ctx.scale),
        grad_k.transpose(1, 2).unsqueeze(1),
        grad_v.transpose(1, 2).unsqueeze(1),
    )
