"""The table of all parameters of a model: name, global shape, splits and initial values.

It is the one truth from which the model is built, a plan counts bytes, and checkpoints know what to
expect.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatron.config.model import ModelConfig
from megatron.config.plan.buckets import DECODER, EMBEDDING, HEAD, UnitName
from megatron.config.plan.parameter_spec import LAYER_PREFIX as LAYER_PREFIX
from megatron.config.plan.parameter_spec import Draw, ParameterSpec, Scheme, drawn, norm

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
MTP = "mtp"
MTP_PREFIX = f"{MTP}.layers."


def megatron_scheme(model: ModelConfig) -> Scheme:
    """Megatron's initial values of matrices: (role, layer) -> (init, std).

    Roles: word_embedding, position_embedding, output_layer, qkv, attention_output, mlp_in, mlp_out,
    router. The two that end a residual branch have std / sqrt(number of all such branches),
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
        return "normal", hidden / math.sqrt(model.residual_branches) if ends else hidden

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
    # With tied weights or multi-token prediction several pipeline stages each have a copy that sees
    # its own use alone.
    word_embedding = ParameterSpec(
        WORD_EMBEDDING,
        (padded_vocab_size, h),
        (("tp", 0),),
        **drawn(draw("word_embedding", 0)),
        partial=("ends",) if model.embeds_again else (),
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
    for depth, number in enumerate(model.mtp_layers):
        table += model.layer(number).parameters(model, f"{MTP_PREFIX}{depth}.", number, draw)
    return table


def head_weight(model: ModelConfig) -> str:
    """The name of the output layer's matrix."""
    return WORD_EMBEDDING if model.tied else OUTPUT_LAYER


def active_size(model: ModelConfig, spec: ParameterSpec) -> int:
    """How many of its elements compute a token: of experts those that its router selects."""
    if "ep" not in dict(spec.splits):
        return spec.size
    return spec.size * model.moe_router_topk // model.experts


def freeze(table: Sequence[ParameterSpec], train_only: Sequence[str]) -> list[ParameterSpec]:
    """The table with all frozen whose names match none of the globs; without globs nothing is.
    Raises ValueError for a glob that matches no name, and where nothing is left to train."""
    names = [spec.name for spec in table]
    for glob in train_only:
        if not any(fnmatchcase(name, glob) for name in names):
            near = difflib.get_close_matches(glob[:60], names, 3, 0.0)
            raise ValueError(
                f"--train-only {glob[:60]}: no parameter has such a name; near ones are "
                f"{', '.join(near)} [train-only-unmatched]"
            )
    chosen = {name for name in names for glob in train_only if fnmatchcase(name, glob)}
    table = [replace(spec, frozen=bool(train_only) and spec.name not in chosen) for spec in table]
    if not any(spec.trained for spec in table):
        raise ValueError(
            f"--train-only {' '.join(train_only)}: freezes everything that has a gradient; name a "
            "weight too [train-only-nothing]"
        )
    return table


class Chunk(NamedTuple):
    """The layers of a part of a GPT, by their global numbers. The `first` chunk has the embedding,
    the `final` one the final norm and multi-token prediction, the `last` one, most often the same,
    output layer and loss; each of them may have no layers."""

    layers: range
    first: bool
    final: bool
    last: bool

    def calls(self, tied: bool, depths: int) -> list[tuple[UnitName, ...]]:
        """The units of each module that it calls in training, in order; a tied output layer is of
        the embedding's. Modules of multi-token prediction (`depths`) embed later tokens."""
        predicted = [((MTP, depth), EMBEDDING) for depth in range(depths)]
        return [
            *[(EMBEDDING,)] * self.first,
            *(((DECODER, layer),) for layer in self.layers),
            *[(HEAD,), *predicted] * self.final,
            *[(EMBEDDING if tied else HEAD,)] * self.last,
        ]


def stage_table(table: Iterable[ParameterSpec], *chunks: Chunk) -> list[ParameterSpec]:
    """The parameters that a pipeline stage with these chunks holds, in the table's order.

    The word embedding is where it is used: on the first stage, with tied weights on the last, with
    multi-token prediction on the final one; once on each of these stages.
    """
    table = list(table)
    layers = {layer for chunk in chunks for layer in chunk.layers}
    first, final, last = map(any, zip(*(chunk[1:] for chunk in chunks), strict=True))
    names = {spec.name for spec in table}
    embeds = first or last and OUTPUT_LAYER not in names
    embeds |= final and any(name.startswith(MTP_PREFIX) for name in names)

    def held(spec: ParameterSpec) -> bool:
        if spec.layer is not None:
            return spec.layer in layers
        if spec.name.startswith("embedding."):
            return embeds if spec.name == WORD_EMBEDDING else first
        return last if spec.name == OUTPUT_LAYER else final

    return [spec for spec in table if held(spec)]


def count_parameters(
    table: Iterable[ParameterSpec], axis_sizes: Mapping[str, int] | None = None
) -> int:
    """Number of elements: over all ranks, or on one rank of axes of these sizes."""
    return sum(math.prod(spec.local_shape(axis_sizes or {})) for spec in table)
