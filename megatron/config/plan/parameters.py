"""The table of all parameters of a model: name, global shape, splits and initial values.

It is the one truth from which the model is built, a plan counts bytes, and checkpoints know what to
expect.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from megatron.config.model import ModelConfig

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
LAYER_PREFIX = "decoder.layers."
EXPERT_BIAS = "router.expert_bias"


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter under its global name, whichever rank, stage or format holds it.

    `shape` is global; `splits` says which rank axis cuts which dim; `init` is "normal" (with `std`:
    one for all, or one for each index of dim 0), "xavier_uniform", "zeros", "ones" or "constant"
    (`std` is the value). `partial`
    names axes whose ranks hold a copy but always see only part of its gradient. `real_rows`: rows
    of dim 0 that mean something when a vocabulary is padded (the rest stay 0), else None.
    `trained`: has it a gradient? Others are at least fp32.
    """

    name: str
    shape: tuple[int, ...]
    splits: tuple[tuple[str, int], ...] = ()
    init: str = "zeros"
    std: float | tuple[float, ...] = 0.0
    partial: tuple[str, ...] = ()
    real_rows: int | None = None
    trained: bool = True

    def partial_axes(self, sequence_parallel: bool) -> tuple[str, ...]:
        """Axes over which the gradients of copies are summed: `partial` and, with sequence
        parallelism, tp unless it is split over tp: each copy then sees part of the tokens."""
        whole = sequence_parallel and not {"tp", "etp"} & dict(self.splits).keys()
        return tuple(dict.fromkeys((*self.partial, *("tp",) * whole)))

    @property
    def size(self) -> int:
        """Number of elements over all ranks."""
        return math.prod(self.shape)

    @property
    def padding(self) -> int:
        """Number of these that are in padding rows."""
        return (
            0
            if self.real_rows is None
            else (self.shape[0] - self.real_rows) * math.prod(self.shape[1:])
        )

    @functools.cached_property
    def layer(self) -> int | None:
        """Global number of the transformer layer it belongs to, or None."""
        return (
            int(self.name[len(LAYER_PREFIX) :].split(".", 1)[0])
            if self.name.startswith(LAYER_PREFIX)
            else None
        )

    def local_shape(self, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one rank's part; axes that `axis_sizes` lacks have size 1. Raises ValueError on
        an uneven cut."""
        shape = list(self.shape)
        for axis, dim in self.splits:
            size = axis_sizes.get(axis, 1)
            if shape[dim] % size:
                raise ValueError(
                    f"{self.name}: dim {dim} of size {shape[dim]} does not split over {axis} {size}"
                )
            shape[dim] //= size
        return tuple(shape)


Draw = tuple[str, float | tuple[float, ...]]
Scheme = Callable[[str, int], Draw]


def megatron_scheme(model: ModelConfig) -> Scheme:
    """Megatron's initial values of matrices: (role, layer) -> (init, std).

    Roles: word_embedding, position_embedding, output_layer, qkv, attention_output, mlp_in, mlp_out,
    router. The two that end a residual branch have std / sqrt(2 * num_layers) with the total depth,
    and with muP all but the first three std / sqrt(relative width);
    another suite's scheme is another function of the same form, of the layer too where its std
    depends on it."""
    hidden = model.init_method_std / math.sqrt(model.mup_width)

    def draw(role: str, layer: int) -> Draw:
        if model.init_method_xavier_uniform:
            return "xavier_uniform", 0.0
        if role in ("word_embedding", "position_embedding", "output_layer"):
            return "normal", model.init_method_std
        ends = role in ("attention_output", "mlp_out")
        return "normal", hidden / math.sqrt(2.0 * model.num_layers) if ends else hidden

    return draw


def parameter_table(
    model: ModelConfig,
    padded_vocab_size: int,
    vocab_size: int | None = None,
    scheme: Scheme | None = None,
) -> list[ParameterSpec]:
    """All parameters in the model's order.

    `vocab_size` is the number of rows of the (padded) vocabulary that mean something; without it
    all do. `scheme` gives the initial values of matrices (default: that of --init-scheme).
    """
    draw = scheme or megatron_scheme(model)
    h = model.hidden_size
    real_rows = vocab_size if vocab_size not in (None, padded_vocab_size) else None
    # With tied weights the first and the last pipeline stage each have a copy that sees its own use
    # alone.
    word_embedding = ParameterSpec(
        WORD_EMBEDDING,
        (padded_vocab_size, h),
        (("tp", 0),),
        **_drawn(draw("word_embedding", 0)),
        partial=("ends",) if model.tied else (),
        real_rows=real_rows,
    )
    table = [word_embedding]
    if model.positions == "learned_absolute":
        rows = model.max_position_embeddings or model.seq_length
        table.append(
            ParameterSpec(
                "embedding.position_embeddings.weight",
                (rows, h),
                **_drawn(draw("position_embedding", 0)),
            )
        )
    for layer in range(model.num_layers):
        table += _layer_table(model, layer, draw)
    table += _norm(model, "decoder.final_layernorm", h)
    if not model.tied:
        drawn = _drawn(draw("output_layer", model.num_layers))
        table.append(replace(word_embedding, name=OUTPUT_LAYER, **drawn))
    return table


def stage_table(
    table: Iterable[ParameterSpec], layers: Collection[int], first: bool, last: bool
) -> list[ParameterSpec]:
    """The parameters a pipeline stage with these (global) layers holds, in the table's order.

    The first stage has the embeddings, the last one the final norm and the output matrix: with tied
    weights a copy of the word embedding, once if it is the first stage too.
    """
    table = list(table)
    tied = all(spec.name != OUTPUT_LAYER for spec in table)

    def held(spec: ParameterSpec) -> bool:
        layer = spec.layer
        if layer is not None:
            return layer in layers
        if spec.name.startswith("embedding."):
            return first or (last and tied and spec.name == WORD_EMBEDDING)
        return last

    return [spec for spec in table if held(spec)]


def count_parameters(
    table: Iterable[ParameterSpec], axis_sizes: Mapping[str, int] | None = None
) -> int:
    """Number of elements: over all ranks, or on one rank of axes of these sizes."""
    return sum(math.prod(spec.local_shape(axis_sizes or {})) for spec in table)


def _layer_table(model: ModelConfig, layer: int, draw: Scheme) -> list[ParameterSpec]:
    prefix = f"{LAYER_PREFIX}{layer}."
    h = model.hidden_size
    d = model.head_dim
    query = model.num_attention_heads * d
    qkv = query + 2 * model.query_groups * d
    table = [] if model.no_pre_layernorm else _norm(model, prefix + "input_layernorm", h)
    table += _column(
        prefix + "self_attention.linear_qkv", (qkv, h), model.qkv_bias, draw("qkv", layer)
    )
    if model.qk_layernorm and model.qk_layernorm_all_heads:
        for name, width in (("q_layernorm", query), ("k_layernorm", model.query_groups * d)):
            (spec,) = _norm(model, f"{prefix}self_attention.{name}", width)
            table.append(replace(spec, splits=(("tp", 0),)))
    # applied to the heads of one rank, so its gradient is partial
    elif model.qk_layernorm:
        for name in ("q_layernorm", "k_layernorm"):
            table += _norm(model, f"{prefix}self_attention.{name}", d, partial=("tp",))
    table += _row(
        prefix + "self_attention.linear_proj",
        (h, query),
        model.attention_output_bias,
        draw("attention_output", layer),
    )
    if model.post_self_attn_layernorm:
        table += _norm(model, prefix + "post_self_attn_layernorm", h)
    if not model.no_pre_layernorm:
        table += _norm(model, prefix + "pre_mlp_layernorm", h)
    if model.is_moe_layer(layer):
        table += _moe_layer(model, prefix + "mlp.", layer, draw)
    else:
        table += _mlp(model, prefix + "mlp.", model.ffn, layer, draw)
    if model.xielu:
        table += _xielu(prefix + "mlp.xielu.")
    if model.post_mlp_layernorm:
        table += _norm(model, prefix + "post_mlp_layernorm", h)
    return table


def _mlp(
    model: ModelConfig, prefix: str, width: int, layer: int, draw: Scheme
) -> list[ParameterSpec]:
    h = model.hidden_size
    up = (2, width, h) if model.gated else (width, h)
    return [
        *_column(prefix + "linear_fc1", up, model.mlp_bias, draw("mlp_in", layer)),
        *_row(prefix + "linear_fc2", (h, width), model.mlp_bias, draw("mlp_out", layer)),
    ]


def _xielu(prefix: str) -> list[ParameterSpec]:
    """Softplus of the two scalars is 0.8 and 0.3 at first; each rank sees its part of the MLP."""
    return [
        ParameterSpec(
            prefix + name, (1,), init="constant", std=math.log(math.expm1(value)), partial=("tp",)
        )
        for name, value in (("alpha_p", 0.8), ("alpha_n", 0.3))
    ]


def _moe_layer(model: ModelConfig, prefix: str, layer: int, draw: Scheme) -> list[ParameterSpec]:
    """Router, experts (each matrix of all of them in one tensor, experts first) and the shared
    expert; experts have no biases."""
    h = model.hidden_size
    experts = model.experts
    router = _drawn(draw("router", layer))
    table = [ParameterSpec(prefix + "router.weight", (experts, h), **router)]
    if model.moe_router_enable_expert_bias:
        table.append(ParameterSpec(prefix + EXPERT_BIAS, (experts,), trained=False))
    for spec in _mlp(model, prefix + "experts.", model.expert_ffn, layer, draw):
        splits = (("ep", 0), *(("etp", dim + 1) for _, dim in spec.splits))
        table.append(replace(spec, shape=(experts, *spec.shape), splits=splits))
    shared = model.moe_shared_expert_intermediate_size
    if shared:
        table += _mlp(model, prefix + "shared_experts.", shared, layer, draw)
        if model.moe_shared_expert_gate:
            table.append(ParameterSpec(prefix + "shared_experts.gate_weight", (1, h), **router))
    return table


def count_idle(model: ModelConfig, table: Iterable[ParameterSpec]) -> int:
    """Number of parameters of the experts that are not selected for a token."""
    experts = sum(spec.size for spec in table if ".mlp.experts." in spec.name)
    if not experts:
        return 0
    return experts // model.experts * (model.experts - model.moe_router_topk)


def _drawn(draw: Draw) -> dict:
    return dict(init=draw[0], std=draw[1])


def _norm(
    model: ModelConfig, name: str, width: int, partial: tuple[str, ...] = ()
) -> list[ParameterSpec]:
    weight = "zeros" if model.apply_layernorm_1p else "ones"
    table = [ParameterSpec(f"{name}.weight", (width,), init=weight, partial=partial)]
    if model.normalization == "LayerNorm":
        table.append(ParameterSpec(f"{name}.bias", (width,), partial=partial))
    return table


def _column(name: str, shape: tuple[int, ...], bias: bool, draw: Draw) -> list[ParameterSpec]:
    """A matrix split by output feature: the dim before the last, so gate and up ([2, ffn, h]) are
    split alike."""
    splits = (("tp", len(shape) - 2),)
    table = [ParameterSpec(f"{name}.weight", shape, splits, **_drawn(draw))]
    return table + [ParameterSpec(f"{name}.bias", shape[:-1], splits)] if bias else table


def _row(name: str, shape: tuple[int, int], bias: bool, draw: Draw) -> list[ParameterSpec]:
    """A matrix split by input feature; its bias is added after the sum over ranks and is whole on
    each."""
    table = [ParameterSpec(f"{name}.weight", shape, (("tp", 1),), **_drawn(draw))]
    return table + [ParameterSpec(f"{name}.bias", shape[:1])] if bias else table
