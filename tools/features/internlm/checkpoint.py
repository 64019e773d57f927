"""internlm-import: the folders of InternLM's and InternEvo's training, model_tp{t}_pp{p}.pt and
model_config.pt, and the optimizer's files.

Queries, keys and values of a rank are stored one after the other, so ranks are merged head by head;
the bias of the attention's output is on tensor rank 0 alone. Which of w2 and w3 is the up matrix
changed in February 2024: it is the one with the shape of w1, and where both have that shape the
user must say. Models of the first kind (model_type INTERNLM) only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.state import RunState
from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import (
    LAYER_PREFIX,
    OUTPUT_LAYER,
    WORD_EMBEDDING,
    parameter_table,
)
from megatron.config.tokenizer import TokenizerConfig
from tools.convert.config_keys import is_unset, names_of, not_known
from tools.convert.hf_files import PendingTensor, new_folder, work_folder
from tools.convert.links import QKV, ConversionError
from tools.convert.native import write_checkpoint
from tools.convert.torch_files import StoredPart, Unpickler
from tools.features.internlm.choices import MLP_ORDERS
from tools.features.internlm.optimizer import (
    Ranks,
    has_optimizer,
    optimizer_parts,
    read_flags,
    run_state,
)

MODEL_CONFIG = "model_config.pt"
_FILE = re.compile(r"model_tp(\d+)_pp(\d+)\.pt")
_LAYER = re.compile(r"(blocks\.)(\d+)(\..+)")
# Keys of model_config.pt under whose other values it would be another model.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_swiglu": (True,),
    "norm_type": ("rmsnorm",),
    "num_experts": (1, 0),
    "use_dynamic_ntk_rope": (False,),
    "is_reward": (False,),
    "rope_scaling_factor": (1, 1.0),
    "rope_type": ("normal",),
    "adapt_hf": (False,),
    "multiple_of": (256,),
    "tie_embeddings_and_output_weights": (False,),
}
_READ = names_of(
    "num_layers hidden_size num_attention_heads num_kv_attention_heads vocab_size rope_base "
    "qk_interleaved layer_norm_epsilon max_position_embeddings embed_split_hidden"
)
# ... and under whose other values nothing changes: for training and files, or read of shapes.
_HARMLESS = names_of("""
num_chunks checkpoint dtype embed_grad_scale parallel_output mlp_ratio residual_in_fp32 drop_rate
attn_drop_rate apply_post_layer_norm dropout_selective_checkpoint use_scaled_init use_flash_attn
enable_qkv_fusion mlp_layer_fusion *_init_std init_type moe_* device first last start_layer_idx
""")


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor on each tensor rank."""

    parts: Sequence[StoredPart]

    def read(self) -> list[torch.Tensor]:
        """Every rank's part."""
        return [part.read() for part in self.parts]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Every rank's shape."""
        return [part.shape for part in self.parts]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.parts[0].dtype


@dataclass(frozen=True)
class _Merge:
    """Makes one of our tensors of some of theirs."""

    model: ModelConfig
    name: str
    shape: tuple[int, ...]
    sources: Sequence[_StoredTensor]
    embed_split_hidden: bool

    @property
    def dtype(self) -> torch.dtype:
        """Theirs."""
        return self.sources[0].dtype

    def __call__(self) -> torch.Tensor:
        shards = [tensor.read() for tensor in self.sources]
        tail = self.name.split(".", 3)[3] if self.name.startswith(LAYER_PREFIX) else self.name
        match tail.rsplit(".", 1):
            case ["self_attention.linear_qkv", _]:
                qkv = [
                    torch.cat(of_ranks)
                    for of_ranks in zip(*(shard.chunk(3) for shard in shards[0]), strict=True)
                ]
                return QKV.join(qkv, self.model)
            case ["mlp.linear_fc1", _]:
                return torch.stack([torch.cat(of_ranks) for of_ranks in shards])
            case ["self_attention.linear_proj" | "mlp.linear_fc2", "weight"]:
                return torch.cat(shards[0], dim=1)
            case ["embedding.word_embeddings", _]:
                return torch.cat(shards[0], dim=1 if self.embed_split_hidden else 0)
            case ["output_layer", _]:
                return torch.cat(shards[0])
        if any(not torch.equal(shard, shards[0][0]) for shard in shards[0]):
            raise ConversionError(f"{self.name}: the tensor ranks should hold the same, and do not")
        return shards[0][0]


def _order(tensors: Mapping[str, _StoredTensor], source: Path) -> str:
    """Which of w2 and w3 is the up matrix: a key of MLP_ORDERS. Raises ConversionError where shapes
    do not show it."""
    shapes = {
        name: tensors[f"blocks.0.mlp.{name}.weight"].shapes
        for name in ("w1", "w2", "w3")
        if f"blocks.0.mlp.{name}.weight" in tensors
    }
    fitting = [key for key, (up, _) in MLP_ORDERS.items() if shapes.get(up) == shapes["w1"]]
    if len(fitting) != 1:
        raise ConversionError(
            f"{source}: the shapes of blocks.0.mlp.w2 and w3 do not show which is the up matrix; "
            "give --mlp-weights"
        )
    return fitting[0]


def _sources(name: str, order: str) -> list[str]:
    """Their names of what one of our tensors is made of."""
    up, down = MLP_ORDERS[order]
    if name in (WORD_EMBEDDING, OUTPUT_LAYER):
        return ["embedding" if name == WORD_EMBEDDING else "head.weight"]
    if name == "decoder.final_layernorm.weight":
        return ["norm.weight"]
    layer, parameter = name.removeprefix(LAYER_PREFIX).split(".", 1)
    stem, kind = parameter.rsplit(".", 1)
    names = {
        "input_layernorm": ["norm1"],
        "pre_mlp_layernorm": ["norm2"],
        "self_attention.linear_qkv": ["mixer.Wqkv"],
        "self_attention.linear_proj": ["mixer.out_proj"],
        "mlp.linear_fc1": ["mlp.w1", f"mlp.{up}"],
        "mlp.linear_fc2": [f"mlp.{down}"],
    }
    return [f"blocks.{layer}.{internlm_name}.{kind}" for internlm_name in names[stem]]


def _open(source: Path, unpickler: Unpickler) -> tuple[dict[str, Any], Ranks]:
    """(model_config.pt, of each (tensor, pipeline) rank its tensors by their name with global layer
    numbers, in the order of the model's parameters)."""
    files = {
        (int(m[1]), int(m[2])): path
        for path in (source.iterdir() if source.is_dir() else [])
        if (m := _FILE.fullmatch(path.name))
    }
    if not files or not (source / MODEL_CONFIG).is_file():
        raise ConversionError(
            f"{source}: needs model_tp0_pp0.pt and {MODEL_CONFIG}; give the folder of one step"
        )
    tp, pp = (1 + max(numbers) for numbers in zip(*files, strict=True))
    missing = [f"model_tp{t}_pp{p}.pt" for t in range(tp) for p in range(pp) if (t, p) not in files]
    if missing:
        raise ConversionError(
            f"{source}: {', '.join(missing)} missing of {tp} tensor x {pp} pipeline ranks"
        )
    config = unpickler.read(source / MODEL_CONFIG).values
    opened = unpickler.read_all(files)
    ranks: Ranks = {}
    for t in range(tp):
        offset = 0
        for p in range(pp):
            file = opened[t, p]
            ranks[t, p] = {}
            layers = set()
            for path, (_, shape) in file.headers().items():
                name = path.removeprefix("model.")
                if name.endswith(".inv_freq"):
                    continue
                if match := _LAYER.fullmatch(name):
                    layers.add(int(match[2]))
                    name = f"{match[1]}{int(match[2]) + offset}{match[3]}"
                if name in ("embedding.weight", "embedding.word_embeddings.weight"):
                    name = "embedding"
                ranks[t, p][name] = StoredPart(file, path, shape)
            offset += len(layers)
    return config, ranks


def _by_name(ranks: Ranks) -> dict[str, _StoredTensor]:
    """Each tensor with its parts on the tensor ranks."""
    parts_by_name: dict[str, list[StoredPart]] = {}
    for parts in ranks.values():
        for name, part in parts.items():
            parts_by_name.setdefault(name, []).append(part)
    return {name: _StoredTensor(parts) for name, parts in parts_by_name.items()}


def _model(
    config: Mapping[str, Any],
    tensors: Mapping[str, _StoredTensor],
    where: Path,
    positions: int,
    ignored: Collection[str],
) -> ModelConfig:
    """The architecture. Raises ConversionError for what cannot be represented."""
    neutral = {**_NEUTRAL, "num_kv_attention_heads": (config.get("num_attention_heads"),)}
    problems = [
        f"{where}: {name} {config[name]!r} cannot be represented here: models of type INTERNLM "
        f"have {values[0]!r} [config-key-not-supported]"
        for name, values in neutral.items()
        if config.get(name) is not None and config[name] not in values
    ]
    unknown = {
        name: value
        for name, value in config.items()
        if name not in {*neutral, *ignored}
        and not (_READ.fullmatch(name) or _HARMLESS.fullmatch(name) or is_unset(value))
    }
    if unknown:
        problems.append(not_known(where, unknown))
    problems += [
        f"{where}: {name} is {config.get(name)!r}, must be a whole number"
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
        if type(config.get(name)) is not int
    ]
    if "blocks.0.mlp.w1.weight" not in tensors:
        problems.append(
            f"{where.parent}: blocks.0.mlp.w1.weight is missing; models of type INTERNLM are "
            "imported"
        )
    if problems:
        raise ConversionError("\n".join(problems))
    return ModelConfig(
        num_layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        seq_length=positions,
        max_position_embeddings=positions,
        ffn_hidden_size=sum(shape[0] for shape in tensors["blocks.0.mlp.w1.weight"].shapes),
        swiglu=True,
        position_embedding_type="rope",
        rotary_base=int(config.get("rope_base") or 10000),
        rotary_interleaved=bool(config.get("qk_interleaved")),
        normalization="RMSNorm",
        norm_epsilon=config.get("layer_norm_epsilon") or 1e-5,
        untie_embeddings_and_output_weights=True,
        add_bias_linear=False,
        add_qkv_bias="blocks.0.mixer.Wqkv.bias" in tensors,
        add_attention_output_bias="blocks.0.mixer.out_proj.bias" in tensors,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def _merges(
    source: Path,
    model: ModelConfig,
    rows: int,
    tensors: Mapping[str, _StoredTensor],
    order: str,
    tp: int,
    split_hidden: bool,
) -> dict[str, _Merge]:
    """How each of our tensors is made of theirs. Raises ConversionError for what is missing, of
    another shape, or no part of this model."""
    merges: dict[str, _Merge] = {}
    used = set()
    problems = []
    for spec in parameter_table(model, rows, rows):
        names = _sources(spec.name, order)
        used |= set(names)
        lost = [name for name in names if name not in tensors]
        if lost:
            problems.append(f"{source}: {lost[0]} is missing")
            continue
        stored = [tensors[name] for name in names]
        problems += _misfits(spec.name, spec.shape, stored, names, tp, split_hidden, source)
        merges[spec.name] = _Merge(model, spec.name, spec.shape, stored, split_hidden)
    problems += [
        f"{source}: {name} is not a part of this model" for name in sorted(tensors.keys() - used)
    ]
    if problems:
        raise ConversionError("\n".join(problems[:20]))
    return merges


def _optimizer_tensors(
    kind: str,
    parts: Mapping[str, list[StoredPart]],
    merges: Mapping[str, _Merge],
    order: str,
) -> Iterator[PendingTensor]:
    """Those of one kind, merged like the weights. A weight that is fp32 itself has no other."""
    for name, merge in merges.items():
        if kind == "fp32_param" and merge.dtype == torch.float32:
            continue
        stored = [_StoredTensor(parts[internlm_name]) for internlm_name in _sources(name, order)]
        yield PendingTensor(
            f"optimizer.{kind}.{name}", torch.float32, merge.shape, replace(merge, sources=stored)
        )


def internlm_import(
    source: Path,
    target: Path,
    *,
    order: str | None = None,
    positions: int | None = None,
    tokenizer: Path | None = None,
    args_file: Path | None = None,
    ignored: Collection[str] = (),
) -> str:
    """Make a run directory of a step's folder. `order`: a key of MLP_ORDERS, if shapes do not show
    it; `positions`: the context, if the file does not say; `tokenizer`: its SentencePiece model,
    else ids are numbers; `args_file`: flags of the run, with which the optimizer is converted too;
    `ignored`: unknown keys that may be set. Returns what to say of it."""
    run = read_flags(args_file) if args_file else None
    new_folder(target)
    with (
        work_folder(target, "unpacked") as folder,
        Unpickler(folder) as unpickler,
    ):
        config, ranks = _open(source, unpickler)
        tensors = _by_name(ranks)
        tp = 1 + max(t for t, _ in ranks)
        positions = positions or config.get("max_position_embeddings") or 2048
        model = _model(config, tensors, source / MODEL_CONFIG, positions, ignored)
        order = order or _order(tensors, source)
        rows = config["vocab_size"]
        split = bool(config.get("embed_split_hidden"))
        merges = _merges(source, model, rows, tensors, order, tp, split)
        weights = [
            PendingTensor(name, merge.dtype, merge.shape, merge) for name, merge in merges.items()
        ]
        state = None
        if run:
            shards = optimizer_parts(source, unpickler, ranks)
            state = run_state(source, unpickler, run, model, shards)
            weights += [
                tensor
                for kind, parts in shards.parts.items()
                for tensor in _optimizer_tensors(kind, parts, merges, order)
            ]
        flags: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": rows}
        if run:
            flags = {field.name: getattr(run.data, field.name) for field in fields(TokenizerConfig)}
        if tokenizer:
            flags = {
                "tokenizer_type": "Llama2Tokenizer",
                "tokenizer_model": str(tokenizer.absolute()),
            }
        written = write_checkpoint(
            target, model, weights, rows, "internlm", [], flags=flags, state=state
        )
    return f"{written}: {len(weights)} tensors from {tp} tensor ranks; {_summary(state, source)}"


def _summary(state: RunState | None, source: Path) -> str:
    """What a run continues with, and what is lost."""
    if state is not None:
        return (
            f"with the optimizer's state, iteration {state.iteration}. Lost: random states "
            "(dropout masks will be others); the order of the data follows from the flags, "
            "not from sampler.pt"
        )
    lost = "weights only: --load starts at iteration 0 with a new optimizer and schedule, as "
    lost += 'InternLM\'s content=("model",) does'
    if has_optimizer(source):
        lost += "; to resume, give --args with the flags that tools/internlm_config.py made"
    return lost


def _misfits(
    name: str,
    shape: Sequence[int],
    tensors: Sequence[_StoredTensor],
    names: Sequence[str],
    tp: int,
    split_hidden: bool,
    source: Path,
) -> list[str]:
    """What is wrong with the shapes of the parts of one tensor of ours."""
    # on tensor rank 0 only; some files have it everywhere
    alone = name.endswith("linear_proj.bias")
    by_columns = name.endswith(("linear_proj.weight", "linear_fc2.weight")) or (
        name == WORD_EMBEDDING and split_hidden
    )
    full_shape = list(shape[1:] if ".linear_fc1." in name else shape)
    if "layernorm" not in name and not alone:
        dim = 1 if by_columns else 0
        full_shape[dim] //= tp
    lines = []
    for stored, internlm_name in zip(tensors, names, strict=True):
        if len(stored.parts) != tp and not (alone and len(stored.parts) == 1):
            lines.append(
                f"{source}: {internlm_name} is on {len(stored.parts)} of {tp} tensor ranks"
            )
        hint = "; is --mlp-weights the other one?" if ".mlp.w" in internlm_name else ""
        lines += [
            f"{source}: {internlm_name} has shape {list(shape_stored)}, should be "
            f"{full_shape}{hint}"
            for shape_stored in stored.shapes
            if list(shape_stored) != full_shape
        ]
    return lines
