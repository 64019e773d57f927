"""The table of all parameters of a model: name, global shape, splits and initial values.

It is the one truth from which the model is built, a plan counts bytes, and checkpoints know what to
expect.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from megatron.config.model import ModelConfig
from megatron.config.plan.parameter_spec import LAYER_PREFIX as LAYER_PREFIX
from megatron.config.plan.parameter_spec import Draw, ParameterSpec, Scheme, drawn, norm

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


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
    # With tied weights or multi-token prediction the first and the last pipeline stage each have a
    # copy that sees its own use alone.
    word_embedding = ParameterSpec(
        WORD_EMBEDDING,
        (padded_vocab_size, h),
        (("tp", 0),),
        **drawn(draw("word_embedding", 0)),
        partial=("ends",) if model.embeds_at_both_ends else (),
        real_rows=real_rows,
    )
    table = [word_embedding]
    if model.positions == "learned_absolute":
        rows = model.max_position_embeddings or model.seq_length
        table.append(
            ParameterSpec(
                "embedding.position_embeddings.weight",
                (rows, h),
                **drawn(draw("position_embedding", 0)),
            )
        )
    for number in range(model.num_layers):
        prefix = f"{LAYER_PREFIX}{number}."
        table += model.layer(number).parameters(model, prefix, number, draw)
    table += norm(model, "decoder.final_layernorm", h)
    if not model.tied:
        output = drawn(draw("output_layer", model.num_layers))
        table.append(replace(word_embedding, name=OUTPUT_LAYER, **output, partial=()))
    if model.mtp_num_layers:
        from megatron.model.blocks.mtp.facts import parameters

        table += parameters(model, draw)
    return table


def stage_table(
    table: Iterable[ParameterSpec], layers: Collection[int], first: bool, last: bool
) -> list[ParameterSpec]:
    """The parameters a pipeline stage with these (global) layers holds, in the table's order.

    The first stage has the embeddings, the last one the final norm, the output matrix and
    multi-token prediction; with that or tied weights a copy of the word embedding, once if it is
    the first stage too.
    """
    table = list(table)
    copied = any(spec.name == WORD_EMBEDDING and spec.partial for spec in table)

    def held(spec: ParameterSpec) -> bool:
        layer = spec.layer
        if layer is not None:
            return layer in layers
        if spec.name.startswith("embedding."):
            return first or (last and copied and spec.name == WORD_EMBEDDING)
        return last

    return [spec for spec in table if held(spec)]


def count_parameters(
    table: Iterable[ParameterSpec], axis_sizes: Mapping[str, int] | None = None
) -> int:
    """Number of elements: over all ranks, or on one rank of axes of these sizes."""
    return sum(math.prod(spec.local_shape(axis_sizes or {})) for spec in table)
