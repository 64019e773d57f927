"""Stand-ins for libraries that need CUDA: their signatures, and the numbers they should give, by
torch's plain operations.

Signatures are those of the pinned sources; test_signatures.py holds them to that, and each of our
calls is made over them. No code of ours is used here, so that what our adapters ask for is judged by somebody else.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CALLS: list[tuple[str, dict]] = []


def module(name: str, **content) -> ModuleType:
    """An importable module of that name."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    vars(made).update(content)
    return made


def install(*modules: ModuleType) -> None:
    """Put modules where imports find them, as attributes of their parents too. Only for processes
    of a test's own, or with `monkeypatch.setitem` for each."""
    for one in modules:
        sys.modules[one.__name__] = one
        parent, _, child = one.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, one)


def formula(q, k, v, scale, hidden) -> torch.Tensor:
    """q [b, s, n, d], k and v [b, s, g, d], hidden [s, s] -> [b, s, n, d]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bind,bjnd->bnij", q, k) * scale
    return torch.einsum("bnij,bjnd->bind", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def later(s: int, device: torch.device | None = None, window=(-1, -1)) -> torch.Tensor:
    """What causal attention hides, and what is more than window[0] positions before."""
    hidden = torch.ones(s, s, dtype=torch.bool, device=device)
    if window[0] < 0:
        return hidden.triu(1)
    assert window[1] == 0, window
    return hidden.triu(1) | hidden.tril(-1 - window[0])


def of_documents(q, k, v, scale, ends, window=(-1, -1)) -> torch.Tensor:
    """q [t, n, d], k and v [t, g, d], each document between two of `ends` by itself."""
    if ends.is_meta:  # a tensor without values: one document
        return formula(q[None], k[None], v[None], scale, later(len(q), q.device, window))[0]
    assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(q), ends
    spans = list(zip(ends.tolist(), ends.tolist()[1:], strict=False))
    return torch.cat(
        [
            formula(q[None, i:j], k[None, i:j], v[None, i:j], scale, later(j - i, None, window))[0]
            for i, j in spans
        ]
    )


# flash-attn
def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    assert causal and dropout_p == 0.0
    CALLS.append(("flash_attn_func", {"deterministic": deterministic}))
    return formula(q, k, v, softmax_scale, later(q.shape[1], q.device, window_size))


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert causal and dropout_p == 0.0 and cu_seqlens_q is cu_seqlens_k
    assert max_seqlen_q == max_seqlen_k
    assert q.is_meta or max_seqlen_q >= int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
    CALLS.append(("flash_attn_varlen_func", {"deterministic": deterministic}))
    return of_documents(q, k, v, softmax_scale, cu_seqlens_q, window_size)


def flash_attn() -> list[ModuleType]:
    """The package."""
    return [
        module(
            "flash_attn",
            flash_attn_func=flash_attn_func,
            flash_attn_varlen_func=flash_attn_varlen_func,
        )
    ]


# apex
def apex() -> list[ModuleType]:
    """NVIDIA's package and its two extensions."""

    def rows(x):
        """What the kernel reads at a tensor's address: rows without gaps, whatever the strides
        say."""
        return x.as_strided(x.shape, (x.shape[1], 1)).float()

    def accumulate(inputs, grad_output, weight_grad):
        assert weight_grad.is_contiguous()
        weight_grad += (rows(grad_output).t() @ rows(inputs)).to(weight_grad.dtype)

    def layer(inputs, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        return F.layer_norm(inputs, normalized_shape, weight, bias, eps)

    def rms(inputs, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        return F.rms_norm(inputs, normalized_shape, weight, eps)

    return [
        module("apex"),
        module("apex.normalization"),
        module("fused_layer_norm_cuda"),
        module(
            "apex.normalization.fused_layer_norm",
            fused_layer_norm_affine=layer,
            fused_rms_norm_affine=rms,
        ),
        module("fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=accumulate),
    ]


# Transformer Engine
def all_reduce(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def gather(x, group, size):
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def scatter(x, group, size):
    return all_reduce(x, group).chunk(size)[dist.get_rank(group)].clone()


def to_fp8(x: torch.Tensor, on: bool) -> torch.Tensor:
    """x rounded to e4m3 with a scale of its own."""
    if not on:
        return x
    scale = 448.0 / x.abs().max().clamp(min=1e-30)
    return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        many = layer.tp_size > 1
        sp = layer.sequence_parallel
        whole = (
            gather(x, layer.tp_group, layer.tp_size)
            if many and sp and layer.parallel_mode == "column"
            else x
        )
        on = autocast.running is not None
        ctx.save_for_backward(whole, weight)
        ctx.layer = layer
        ctx.weight = weight
        ctx.biased = bias is not None
        y = to_fp8(whole, on) @ to_fp8(weight, on).t()
        if many and layer.parallel_mode == "row":
            y = scatter(y, layer.tp_group, layer.tp_size) if sp else all_reduce(y, layer.tp_group)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad):
        whole, weight = ctx.saved_tensors
        layer = ctx.layer
        many = ctx.layer.tp_size > 1
        bias = grad.flatten(0, -2).sum(0) if ctx.biased else None
        if many and layer.sequence_parallel and layer.parallel_mode == "row":
            grad = gather(grad, layer.tp_group, layer.tp_size)
        x = grad @ weight
        if many and layer.parallel_mode == "column":
            sp = layer.sequence_parallel
            x = scatter(x, layer.tp_group, layer.tp_size) if sp else all_reduce(x, layer.tp_group)
        product = grad.flatten(0, -2).t() @ whole.flatten(0, -2)
        if layer.fuse_wgrad_accumulation:
            ctx.weight.main_grad.add_(product)
            product = None
        return x, product, bias, None


class Linear(nn.Module):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__()
        self.tp_group = tp_group
        self.tp_size = tp_size
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        out_features //= tp_size if parallel_mode == "column" else 1
        in_features //= tp_size if parallel_mode == "row" else 1
        self.shape = (out_features, in_features)
        self.use_bias = bias
        self.weight = nn.Parameter(torch.empty(self.shape, device=device, dtype=params_dtype))
        self.unset = [self.weight]  # not a parameter
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=params_dtype))

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        assert self.weight.shape == self.shape and self.weight is not self.unset[0]
        return LinearFunction.apply(inp, self.weight, self.bias if self.use_bias else None, self)


class RMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        *,
        device=None,
        dtype=None,
        sm_margin=0,
    ):
        super().__init__()
        self.eps = eps
        self.shift = int(zero_centered_gamma)
        self.weight = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight + self.shift, self.eps)


class LayerNorm(RMSNorm):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        *,
        device=None,
        dtype=None,
        sm_margin=0,
    ):
        super().__init__(
            normalized_shape,
            eps,
            zero_centered_gamma=zero_centered_gamma,
            device=device,
            dtype=dtype,
        )
        self.bias = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight + self.shift, self.bias, self.eps)


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        softcap=0.0,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
        name=None,
    ):
        super().__init__()
        assert attention_dropout == 0.0
        self.heads = num_attention_heads
        self.groups = num_gqa_groups
        self.width = kv_channels
        self.scale = softmax_scale
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window = window_size or (-1, -1)

    def forward(
        self,
        query_layer=None,
        key_layer=None,
        value_layer=None,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        **more,
    ):
        form = qkv_format or self.qkv_format
        mask = attn_mask_type or self.attn_mask_type
        q = query_layer
        k = key_layer
        v = value_layer
        assert q.shape[-2:] == (self.heads, self.width) and k.shape[-2:] == (
            self.groups,
            self.width,
        )
        if form == "thd":
            assert (
                mask == "padding_causal"
                and cu_seqlens_q is cu_seqlens_kv
                and max_seqlen_q == max_seqlen_kv
            )
            return of_documents(q, k, v, self.scale, cu_seqlens_q, self.window).flatten(-2)
        assert form == "sbhd" and mask == "causal"
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        hidden = later(q.shape[1], q.device, self.window)
        return formula(q, k, v, self.scale, hidden).transpose(0, 1).flatten(-2)


class autocast:  # noqa: N801
    running = None

    def __init__(
        self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False
    ):
        self.recipe = recipe
        self.group = amax_reduction_group

    def __enter__(self):
        assert autocast.running is None
        autocast.running = self
        CALLS.append(("autocast", {"recipe": self.recipe, "group": self.group}))

    def __exit__(self, *error):
        autocast.running = None


def DelayedScaling(  # noqa: N802
    *,
    margin=0,
    fp8_format="hybrid",
    amax_history_len=1024,
    amax_compute_algo="max",
    reduce_amax=True,
):
    return SimpleNamespace(kind="DelayedScaling", **locals())


def Float8CurrentScaling(*, fp8_format="hybrid"):  # noqa: N802
    return SimpleNamespace(kind="Float8CurrentScaling", fp8_format=fp8_format)


def transformer_engine() -> list[ModuleType]:
    """The package, as much of it as we call."""

    recipe = module(
        "transformer_engine.common.recipe",
        Format=SimpleNamespace(E4M3="e4m3", HYBRID="hybrid"),
        DelayedScaling=DelayedScaling,
        Float8CurrentScaling=Float8CurrentScaling,
    )
    return [
        module("transformer_engine"),
        module("transformer_engine.common"),
        recipe,
        module(
            "transformer_engine.pytorch",
            Linear=Linear,
            RMSNorm=RMSNorm,
            LayerNorm=LayerNorm,
            DotProductAttention=DotProductAttention,
            autocast=autocast,
        ),
    ]


def pretend_cuda() -> None:
    """For a process of a test's own: all libraries are there, and a CPU counts as a device they run
    on."""
    from megatron.kernels import libraries

    install(*transformer_engine(), *flash_attn(), *apex())
    libraries.transformer_engine_unavailable_reason = lambda device, dtype: None
