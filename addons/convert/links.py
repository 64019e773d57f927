"""How our tensors correspond to those of another format: names and small transforms, each tensor
used exactly once.

A `Names` table maps our parameter names, without `.weight` / `.bias` and with {} for the layer's
number, to the other side's name or names; those with {expert} stand for one of each expert. An
entry of the whole name has whole names of the other side. Shapes of the other side follow from ours
by the transform. Imports torch where tensors are at hand alone: --help names the families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import (
    LAYER_PREFIX,
    OUTPUT_LAYER,
    WORD_EMBEDDING,
    ParameterSpec,
    parameter_table,
)
from megatron.model.blocks.gated_delta.facts import GatedDeltaNet

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.safetensors_file import Entry

_LAYER = re.compile(r"(decoder\.layers\.|mtp\.layers\.)(\d+)(\.transformer_layer)?(\..*)")
SHOWN = 5  # names of a kind that one error shows
# In a table of names: the prefix of a decoder's layer, and that of one of multi-token prediction.
DEPTHS = "mtp.layers.{}"
Shape = tuple[int, ...]
Header = tuple["torch.dtype", Shape]


class ConversionError(ValueError):
    """What cannot be converted, one line for each reason: tensor or key, value, remedy."""

    code = "[not-converted]"  # where a line has none of its own


@dataclass(frozen=True)
class Transform:
    """`split` makes the other side's tensors of ours, `join` is its inverse; both get the model."""

    split: Callable[[torch.Tensor, ModelConfig], Sequence[torch.Tensor]]
    join: Callable[[Sequence[torch.Tensor], ModelConfig], torch.Tensor]


def _cat(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    import torch

    return torch.cat(tuple(parts), dim)


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack(tuple(parts))


def _split_qkv(rows: torch.Tensor, m: ModelConfig) -> list[torch.Tensor]:
    """Rows by query group (its queries, their gates, its key, value) -> all queries, each with its
    gate behind it, all keys, all values."""
    grouped = rows.unflatten(0, (m.query_groups, -1, m.head_dim))
    queries, keys, values = grouped.split((grouped.shape[1] - 2, 1, 1), dim=1)
    queries = queries.unflatten(1, (1 + m.attention_output_gate, -1)).transpose(1, 2)
    return [block.reshape(-1, *rows.shape[1:]) for block in (queries, keys, values)]


def _join_qkv(foreign: Sequence[torch.Tensor], m: ModelConfig) -> torch.Tensor:
    queries, *others = (block.unflatten(0, (m.query_groups, -1, m.head_dim)) for block in foreign)
    queries = queries.unflatten(1, (-1, 1 + m.attention_output_gate)).transpose(1, 2).flatten(1, 2)
    return _cat((queries, *others), 1).flatten(0, 2)


def _by_key_head(rows: torch.Tensor, m: ModelConfig) -> torch.Tensor:
    return rows.unflatten(0, (m.linear_num_key_heads, -1))


def _split_delta(rows: torch.Tensor, m: ModelConfig) -> list[torch.Tensor]:
    """Rows by key head -> its queries, keys, values and their gates; its betas and decays."""
    parts = GatedDeltaNet(m).parts
    both = _by_key_head(rows, m).split((sum(parts[:4]), sum(parts[4:])), 1)
    return [block.flatten(0, 1) for block in both]


def _split_conv(rows: torch.Tensor, m: ModelConfig) -> list[torch.Tensor]:
    """Channels by key head [c, k] -> all queries, all keys, all values [c, 1, k]."""
    blocks = _by_key_head(rows, m).split(GatedDeltaNet(m).parts[:3], 1)
    return [_cat([block.flatten(0, 1) for block in blocks]).unsqueeze(1)]


def _join_conv(foreign: Sequence[torch.Tensor], m: ModelConfig) -> torch.Tensor:
    sizes = [m.linear_num_key_heads * part for part in GatedDeltaNet(m).parts[:3]]
    blocks = foreign[0].squeeze(1).split(sizes)
    return _cat([_by_key_head(block, m) for block in blocks], 1).flatten(0, 1)


def _matrix_t(x: torch.Tensor) -> torch.Tensor:
    return x.t() if x.dim() == 2 else x


def _heads(m: ModelConfig) -> list[int]:
    queries = m.num_attention_heads * (1 + m.attention_output_gate)
    return [n * m.head_dim for n in (queries, m.query_groups, m.query_groups)]


SAME = Transform(lambda x, m: [x], lambda foreign, m: foreign[0])
TRANSPOSED = Transform(lambda x, m: [_matrix_t(x)], lambda foreign, m: _matrix_t(foreign[0]))
QKV = Transform(_split_qkv, _join_qkv)
# Queries, keys and values one behind the other as columns of one matrix (GPT-2).
FUSED_QKV = Transform(
    lambda x, m: [_matrix_t(_cat(_split_qkv(x, m)))],
    lambda foreign, m: _join_qkv(_matrix_t(foreign[0]).split(_heads(m)), m),
)
# The same as rows (Phi-3).
FUSED_QKV_ROWS = Transform(
    lambda x, m: [_cat(_split_qkv(x, m))],
    lambda foreign, m: _join_qkv(foreign[0].split(_heads(m)), m),
)
# The rows into a gated delta net, and the channels of its convolution (Qwen3-Next).
DELTA_ROWS = Transform(
    _split_delta,
    lambda foreign, m: _cat([_by_key_head(x, m) for x in foreign], 1).flatten(0, 1),
)
DELTA_CONV = Transform(_split_conv, _join_conv)
GATE_UP = Transform(lambda x, m: list(x.unbind(0)), lambda foreign, m: _stack(foreign))
# Gate and up matrix one behind the other as rows of one matrix.
FUSED_GATE_UP = Transform(
    lambda x, m: [x.flatten(0, 1)], lambda foreign, m: foreign[0].unflatten(0, (2, -1))
)
# All experts in one tensor of matrices [in, out], gate and up in turns (gpt-oss).
EXPERTS_T = Transform(lambda x, m: [x.mT], lambda foreign, m: foreign[0].mT)
GATE_UP_IN_TURNS = Transform(
    lambda x, m: [x.transpose(1, 2).flatten(1, 2)],
    lambda foreign, m: foreign[0].unflatten(1, (-1, 2)).transpose(1, 2),
)
GATE_UP_IN_TURNS_T = Transform(
    lambda x, m: [x.permute(0, 3, 2, 1).flatten(2)],
    lambda foreign, m: foreign[0].unflatten(2, (-1, 2)).permute(0, 3, 2, 1),
)
# Experts, which have tensors of their own on the other side: one by one, as gate and up by turns.
EXPERTS = Transform(lambda x, m: list(x.unbind(0)), lambda foreign, m: _stack(foreign))
EXPERTS_GATE_UP = Transform(
    lambda x, m: list(x.flatten(0, 1).unbind(0)),
    lambda foreign, m: _stack(foreign).unflatten(0, (-1, 2)),
)

# The same as rows of one matrix of each expert (Granite MoE).
EXPERT_ROWS = Transform(
    lambda x, m: [x.flatten(1, 2)], lambda foreign, m: foreign[0].unflatten(1, (2, -1))
)
# A vector as the one row of a matrix.
ROW = Transform(lambda x, m: [x.unsqueeze(0)], lambda foreign, m: foreign[0].squeeze(0))

Names = Mapping[str, tuple[tuple[str, ...], Transform]]


@dataclass(frozen=True)
class Link:
    """One tensor of ours, the other side's tensors that it is made of, and how. Shapes are global,
    without padding rows."""

    native_name: str
    shape: Shape
    foreign_names: tuple[str, ...]
    transform: Transform
    model: ModelConfig

    def their_shapes(self) -> list[Shape]:
        """Shapes of the other side's tensors."""
        import torch

        return [tuple(block.shape) for block in self.split(torch.empty(self.shape, device="meta"))]

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Our tensor -> the other side's."""
        return self.transform.split(tensor, self.model)

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The other side's tensors -> ours."""
        return self.transform.join(tensors, self.model)


def links_of(model: ModelConfig, vocab_size: int, names: Names) -> list[Link]:
    """One link for every parameter of the model. Raises ConversionError for one that the format has
    no name for."""
    links = []
    for spec in parameter_table(model, vocab_size, vocab_size):
        stem, kind = spec.name.rsplit(".", 1)
        layer = _LAYER.fullmatch(stem)
        place, number = stem, 0
        decoders = of_heads = ""  # prefixes
        if layer:
            # a layer of multi-token prediction has the names of the decoder's, counted on, or a
            # prefix of its own
            of_depth = layer[1] != LAYER_PREFIX
            number = int(layer[2])
            if of_depth and DEPTHS in names:
                decoders, of_heads = names[DEPTHS][0]
            elif of_depth:
                number += model.num_layers
            place = f"{LAYER_PREFIX if layer[3] else layer[1]}{{}}{layer[4]}"
        whole = names.get(f"{place}.{kind}")
        entry = whole or names.get(place)
        if entry is None or (number and of_heads and "{}" not in entry[0][0]):
            raise ConversionError(f"{spec.name}: that format has no place for it")
        templates = [
            template.replace("{expert}", str(expert)).replace(decoders, of_heads)
            for expert in (range(spec.shape[0]) if "{expert}" in entry[0][0] else (0,))
            for template in entry[0]
        ]
        foreign_names = tuple(
            (name.format(number) if layer else name) + ("" if whole else f".{kind}")
            for name in templates
        )
        links.append(Link(spec.name, spec.shape, foreign_names, entry[1], model))
    return links


def check(
    links: Iterable[Link],
    headers: Mapping[str, Header],
    source: str,
    ignored: re.Pattern[str] | None = None,
) -> None:
    """Raise ConversionError unless the other side's tensors are exactly those of the links, with
    their shapes, and of one floating-point format each; every one that is missing, left over or of
    another shape is named."""
    shapes: dict[str, Shape] = {}
    for link in links:
        for name, shape in zip(link.foreign_names, link.their_shapes(), strict=True):
            assert name not in shapes, f"{name} is assigned twice"
            shapes[name] = shape
    extra = sorted(
        name for name in headers.keys() - shapes.keys() if not (ignored and ignored.fullmatch(name))
    )
    missing = sorted(shapes.keys() - headers.keys())
    lines = [
        _named(missing, "is missing", "are missing", source),
        _named(extra, "is not a part of this model", "are no part of this model", source),
    ]
    wrong = []
    for name in sorted(shapes.keys() & headers.keys()):
        dtype, shape = headers[name]
        if shape != shapes[name]:
            wrong.append(
                f"{source}: {name} has shape {list(shape)}, should have {list(shapes[name])} by "
                "the configuration"
            )
        elif not dtype.is_floating_point or dtype.itemsize == 1:
            wrong.append(
                f"{source}: {name} is {dtype}; quantized weights are not converted: give the "
                "full-precision model"
            )
    for link in links:
        formats = {headers[name][0] for name in link.foreign_names if name in headers}
        if len(formats) > 1:
            wrong.append(
                f"{source}: {', '.join(link.foreign_names)} become one tensor, but are "
                f"{sorted(map(str, formats))}"
            )
    if len(wrong) > SHOWN:
        wrong[SHOWN:] = [f"{source}: and {len(wrong) - SHOWN} more like these"]
    if any(lines) or wrong:
        raise ConversionError("\n".join(line for line in (*lines, *wrong) if line))


def _named(names: Sequence[str], singular: str, plural: str, source: str) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:SHOWN]) + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )
    return f"{source}: {shown} {singular if len(names) == 1 else plural}"


def joined(
    spec: ParameterSpec, reads: Sequence[Callable[[], torch.Tensor]], alike: bool = False
) -> torch.Tensor:
    """A tensor of ours from what each tensor-parallel rank holds of it, in their order; of one that
    each holds whole, that of the first. `alike`: raise ConversionError unless the others are."""
    shape = spec.local_shape({"tp": len(reads)})
    dims = [dim for axis, dim in spec.splits if axis == "tp"]
    if dims:
        return _cat([read().reshape(shape) for read in reads], dims[0])
    whole = reads[0]().reshape(shape)
    for rank, read in enumerate(reads if alike else ()):
        if not read().reshape(shape).equal(whole):
            raise ConversionError(
                f"{spec.name}: tensor ranks 0 and {rank} should hold the same, and do not"
            )
    return whole


def optimizer_entries(
    makers: Mapping[str, Mapping[str, Callable[[], torch.Tensor]]],
    table: Mapping[str, ParameterSpec],
    weights: Mapping[str, Entry],
) -> list[Entry]:
    """The optimizer's tensors of what makes them, by kind and name. Of a weight that is fp32 itself
    there is no main weight."""
    import torch

    from megatron.checkpoint.safetensors_file import Entry

    return [
        Entry(f"optimizer.{kind}.{name}", torch.float32, table[name].shape, make)
        for kind, tensors in makers.items()
        for name, make in tensors.items()
        if kind != "fp32_param" or weights[name].dtype != torch.float32
    ]


def is_vocabulary(name: str) -> bool:
    """Has this tensor of ours one row for each id, and padding rows behind them?"""
    return name in (WORD_EMBEDDING, OUTPUT_LAYER)
