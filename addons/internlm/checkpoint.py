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
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.safetensors_file import Entry
from megatron.checkpoint.state import RunState
from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import (
    LAYER_PREFIX,
    OUTPUT_LAYER,
    WORD_EMBEDDING,
    parameter_table,
)
from megatron.config.tokenizer import TokenizerConfig

from ..convert.config_keys import is_unset, names_of, not_known
from ..convert.hf_files import new_folder
from ..convert.links import QKV, ConversionError, Shape
from ..convert.megatron_layout import MegatronCheckpoint, check_parts
from ..convert.native import write_checkpoint
from ..convert.torch_files import StoredPart, read_all, read_file
from .choices import MLP_ORDERS
from .optimizer import (
    has_optimizer,
    optimizer_parts,
    read_flags,
    run_state,
)

MODEL_CONFIG = "model_config.pt"
_FILE = re.compile(r"model_tp(\d+)_pp(\d+)\.pt")
_EMBEDDING = ("embedding.weight", "embedding.word_embeddings.weight")
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


Tensors = Mapping[str, Sequence[StoredPart]]  # by their names the parts on the tensor ranks


class InternLMCheckpoint(MegatronCheckpoint):
    """The open files of a step. Raises ConversionError."""

    layer_name = re.compile(r"(blocks\.)(\d+)(\..+)")

    def __init__(self, source: Path):
        self.source = source
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
        names = {(t, p): f"model_tp{t}_pp{p}.pt" for t in range(tp) for p in range(pp)}
        missing = [name for rank, name in names.items() if rank not in files]
        if missing:
            raise ConversionError(
                f"{source}: {', '.join(missing)} missing of {tp} tensor x {pp} pipeline ranks"
            )
        self.args = dict(read_file(source / MODEL_CONFIG).values)
        self._open(read_all(files))

    def _chunks(self, tp: int) -> Iterator[tuple[int, list[tuple[str, str]]]]:
        for pp in range(self.pp):
            names = {path: path.removeprefix("model.") for path in self.files[tp, pp].tensors}
            yield (
                pp,
                [
                    (path, "embedding" if name in _EMBEDDING else name)
                    for path, name in names.items()
                    if not name.endswith(".inv_freq")
                ],
            )

    def of_rank(self, rank: tuple[int, int]) -> dict[str, StoredPart]:
        """The tensors of a (tensor, pipeline) rank in the order of the model's parameters."""
        path = self.files[rank].path
        every = ((name, part) for name, parts in self.parts.items() for part in parts)
        return {name: part for name, part in every if part.file == path}


def _merged(
    model: ModelConfig, name: str, sources: Sequence[Sequence[StoredPart]], split_hidden: bool
) -> torch.Tensor:
    """One of our tensors of some of theirs."""
    shards = [[part.read() for part in parts] for parts in sources]
    tail = name.split(".", 3)[3] if name.startswith(LAYER_PREFIX) else name
    match tail.rsplit(".", 1):
        case ["self_attention.linear_qkv", _]:
            qkv = [
                torch.cat(of_ranks)
                for of_ranks in zip(*(shard.chunk(3) for shard in shards[0]), strict=True)
            ]
            return QKV.join(qkv, model)
        case ["mlp.linear_fc1", _]:
            return torch.stack([torch.cat(of_ranks) for of_ranks in shards])
        case ["self_attention.linear_proj" | "mlp.linear_fc2", "weight"]:
            return torch.cat(shards[0], dim=1)
        case ["embedding.word_embeddings", _]:
            return torch.cat(shards[0], dim=1 if split_hidden else 0)
        case ["output_layer", _]:
            return torch.cat(shards[0])
    if any(not torch.equal(shard, shards[0][0]) for shard in shards[0]):
        raise ConversionError(f"{name}: the tensor ranks should hold the same, and do not")
    return shards[0][0]


def _order(tensors: Tensors, source: Path) -> str:
    """Which of w2 and w3 is the up matrix: a key of MLP_ORDERS. Raises ConversionError where shapes
    do not show it."""
    shapes = {
        name: [part.shape for part in tensors[f"blocks.0.mlp.{name}.weight"]]
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


def _model(
    config: Mapping[str, Any],
    tensors: Tensors,
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
        ffn_hidden_size=sum(part.shape[0] for part in tensors["blocks.0.mlp.w1.weight"]),
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


def _check(
    checkpoint: InternLMCheckpoint, model: ModelConfig, rows: int, order: str, split_hidden: bool
) -> None:
    """Raise ConversionError for what is missing, of another shape, or no part of this model."""
    expected: dict[str, Shape] = {}
    on_one_rank = set()
    for spec in parameter_table(model, rows, rows):
        names = _sources(spec.name, order)
        shape = list(spec.shape[1:] if ".linear_fc1." in spec.name else spec.shape)
        by_columns = spec.name.endswith(("linear_proj.weight", "linear_fc2.weight")) or (
            spec.name == WORD_EMBEDDING and split_hidden
        )
        if spec.name.endswith("linear_proj.bias"):  # on all ranks in some files
            on_one_rank |= set(names)
        elif "layernorm" not in spec.name:
            shape[1 if by_columns else 0] //= checkpoint.tp
        expected |= dict.fromkeys(names, tuple(shape))
    check_parts(
        checkpoint,
        expected,
        on_one_rank,
        lambda name: "; is --mlp-weights the other one?" if ".mlp.w" in name else "",
    )


def _made_of(
    tensors: Tensors, model: ModelConfig, rows: int, order: str, split_hidden: bool, prefix: str
) -> Iterator[Entry]:
    """Our tensors, made of theirs of one kind, under names with this prefix."""
    for spec in parameter_table(model, rows, rows):
        parts = [tensors[name] for name in _sources(spec.name, order)]
        make = partial(_merged, model, spec.name, parts, split_hidden)
        yield Entry(prefix + spec.name, parts[0][0].dtype, spec.shape, make)


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
    checkpoint = InternLMCheckpoint(source)
    config, tensors, tp = checkpoint.args, checkpoint.parts, checkpoint.tp
    positions = positions or config.get("max_position_embeddings") or 2048
    model = _model(config, tensors, source / MODEL_CONFIG, positions, ignored)
    order = order or _order(tensors, source)
    rows = config["vocab_size"]
    split = bool(config.get("embed_split_hidden"))
    _check(checkpoint, model, rows, order, split)
    weights = list(_made_of(tensors, model, rows, order, split, ""))
    state = None
    if run:
        ranks = {rank: checkpoint.of_rank(rank) for rank in checkpoint.files}
        shards = optimizer_parts(source, ranks)
        state = run_state(source, run, model, shards)
        # a weight that is fp32 itself has no other
        whole = {f"optimizer.fp32_param.{t.key}" for t in weights if t.dtype == torch.float32}
        for kind, parts in shards.parts.items():
            made = _made_of(parts, model, rows, order, split, f"optimizer.{kind}.")
            weights += [tensor for tensor in made if tensor.key not in whole]
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
