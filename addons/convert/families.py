"""config.json <-> our flags, for every family of Hugging Face models.

A model may be written as a family if reading the written config.json back gives the same model
(`config_for`), so what a family cannot express is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import architecture
from megatron.config.model import ModelConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.tree import Config

from .block_scales import block_of
from .config_keys import CONFIG, FULL_CONTEXT, Keys, read_json
from .family_table import Family, NeedsExperts
from .links import SHOWN, ConversionError, links_of
from .options import families


class CannotExpress(ConversionError):
    """What a family cannot express of a model."""


FAMILIES = families()
# in the run directory of an imported model: its config.json and tokenizer files
ORIGIN = "huggingface"

# What tests/test_verified_exports.py compared with transformers: by family the values of
# `features`, all pairs of them but those `apart`.
VERIFIED = Path(__file__).with_name("verified_exports.json")


def read_config(keys: Keys, max_positions: int | None = None) -> tuple[Family, ModelConfig, int]:
    """(family, architecture, rows of the vocabulary) that a config.json says. Raises
    ConversionError.

    `max_positions` shortens the context (--max-position-embeddings).
    """
    model_type = keys.take("model_type", "", str)
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConversionError(
            f"{keys.source}: model_type {model_type!r} is not converted; these are: "
            f"{', '.join(FAMILIES)}"
        )
    architectures = keys.take("architectures", [family.architecture], list)
    if architectures != [family.architecture]:
        keys.refuse("architectures", architectures, f"{family.architecture} is converted")
    _quantized(keys)
    positions = keys.table.get("max_position_embeddings")
    if max_positions is not None and isinstance(positions, int) and 0 < max_positions <= positions:
        keys.table = keys.table | {
            "max_position_embeddings": max_positions,
            FULL_CONTEXT: positions,
        }
    elif max_positions is not None:
        keys.problems.append(
            f"--max-position-embeddings {max_positions}: can only shorten the context of a model "
            f"with rotary positions; {keys.source} has "
            f"{positions if positions else 'a table of positions'}"
        )
    keys.token_heads = _token_heads(keys)
    flags = family.read(keys)
    rows = keys.take("vocab_size")
    flags = {
        "init_method_std": keys.take("initializer_range", 0.02, (float, int)),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    } | flags
    keys.done()
    return family, ModelConfig(**flags), rows


# Keys that say how many heads for later tokens (multi-token prediction) a model has, and others
# that say nothing without these.
_TOKEN_HEADS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
_OF_TOKEN_HEADS = ("mtp_transformer_layers", "mtp_loss_scaling_factor", "use_mtp")


def _token_heads(keys: Keys) -> int:
    for name in _OF_TOKEN_HEADS:
        keys.take(name, None, (bool, int, float))
    return max(keys.take(name, 0, (int,)) for name in _TOKEN_HEADS)


def as_written(config: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """A config.json of the same model in full precision, with so many heads for later tokens."""
    said = {name: heads for name in _TOKEN_HEADS if config.get(name)}
    said |= {_TOKEN_HEADS[0]: heads} if heads else {}
    changed = {**config, **said, **({"use_mtp": False} if config.get("use_mtp") else {})}
    return {key: value for key, value in changed.items() if key != "quantization_config"}


def _quantized(keys: Keys) -> None:
    """Of quantized weights those of block_scales.py are read."""
    how = keys.table.get("quantization_config")
    if block_of(keys.table):
        keys.take("quantization_config", None, dict)
        return
    why = "give the model in full precision"
    if isinstance(how, dict) and how.get("quant_method") == "mxfp4":
        why = (
            "the experts are 4-bit numbers (MXFP4); write them as bf16 with transformers first: "
            "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='bfloat16', "
            "quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(NEW_FOLDER)"
        )
    keys.must_be("quantization_config", why=why)


def config_for(
    family: Family, model: ModelConfig, vocab_size: int, base: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of our model as a member of `family`; keys that say nothing about the
    architecture come from `base`.

    Raises ConversionError naming everything about the model that this family cannot express.
    """
    if base and _says(base, family, model):
        return {**base, "vocab_size": vocab_size}
    config = {
        **base,
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **family.write(model),
        "vocab_size": vocab_size,
    }
    _, back, _ = read_config(Keys(dict(config), "config.json", ignored=base))
    differ = architecture.differences(model, back)
    if differ:
        differences = "; ".join(
            f"{difference.name} is {difference.saved}, there it is {difference.now}"
            for difference in differ
        )
        raise CannotExpress(f"a {family.model_type} model cannot express this one: {differences}")
    return config


def _says(base: Mapping[str, Any], family: Family, model: ModelConfig) -> bool:
    """Is `base` this very model already, with this length of context?"""
    try:
        read_family, back, _ = read_config(Keys(dict(base), "config.json", ignored=base))
    except ConversionError:
        return False
    same_length = (back.max_position_embeddings or back.seq_length) == (
        model.max_position_embeddings or model.seq_length
    )
    same_dropout = not _other_dropout(model, back)
    return (
        read_family is family
        and same_length
        and same_dropout
        and not architecture.differences(model, back)
    )


def _other_dropout(model: ModelConfig, back: ModelConfig) -> list[str]:
    """Names of the dropouts in which they differ."""
    return [
        name
        for name in ("attention_dropout", "hidden_dropout")
        if getattr(model, name) != getattr(back, name)
    ]


def notes_on(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """What a written config.json cannot say of our model, though its weights compute the same."""
    _, back, _ = read_config(Keys(dict(config), "config.json", ignored=config))
    notes = [
        f"--{name.replace('_', '-')} {getattr(model, name)} is not in config.json: "
        f"{config['model_type']} models have no such dropout (it changes training alone)"
        for name in _other_dropout(model, back)
    ]
    if capacity := model.moe_expert_capacity_factor:
        notes.append(
            f"--moe-expert-capacity-factor {capacity} is not in config.json: the exported model "
            "drops no token"
        )
    return notes


def base_folder(run_directory: Path, d: TokenizerConfig) -> Path | None:
    """The folder with config.json and tokenizer files of the model that a run began with, if it is
    known."""
    files = [Path(file) for file in (d.tokenizer_model, d.vocab_file) if file]
    folders = [run_directory / ORIGIN, *files, *(file.parent for file in files)]
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def family_of(model: ModelConfig, base: Mapping[str, Any], name: str | None = None) -> Family:
    """The family that is named, else that of the `base`, else the first that can express the model.
    Raises ConversionError where none can."""
    if name or base.get("model_type") in FAMILIES:
        return FAMILIES[name or base["model_type"]]
    return fitting(model)


def fitting(model: ModelConfig) -> Family:
    """The first family that can express the model. Raises ConversionError, saying why for the
    closest ones."""
    reasons: list[ConversionError] = []
    for family in FAMILIES.values():
        try:
            config_for(family, model, 1, {})
            return family
        except NeedsExperts:
            pass  # says nothing of what would fit
        except ConversionError as error:
            reasons.append(error)
    reasons.sort(key=lambda error: (not isinstance(error, CannotExpress), len(str(error))))
    raise ConversionError(
        "no family of Hugging Face models fits; " + "\n".join(map(str, reasons[:SHOWN]))
    )


def why_not(config: Config, run_directory: Path) -> list[str]:
    """What keeps a run from being written as a Hugging Face directory: no family of models can
    express it, or the tests compared no such export with transformers."""
    folder = base_folder(run_directory, config.data)
    base = read_json(folder / CONFIG) if folder else {}
    try:
        family = family_of(config.model, base)
        config_for(
            family, config.model, 1, base if base.get("model_type") == family.model_type else {}
        )
        links_of(config.model, 1, family.names)  # its heads for later tokens may have no place
    except ConversionError as error:
        closest, *_ = str(error).splitlines()
        return [f"{closest}; omit the flag [not-converted]"]
    gaps = unverified(family.model_type, config.model)
    if not gaps:
        return []
    return [
        f"the tests compared no {family.model_type} export with {'; '.join(gaps[:SHOWN])} with "
        "transformers; omit the flag, and export checkpoints with tools/convert_checkpoint.py "
        "hf-export, which compares each [export-not-verified]"
    ]


# --- what the tests compared with transformers


# What verified_exports.json calls what several flags say together.
_IN_TABLE = {
    "biases": "add_bias_linear",
    "ffn": "ffn_hidden_size",
    "positions": "position_embedding_type",
    "query_groups": "num_query_groups",
    "rope_scaling": "rope_scaling_factor",
    "yarn": "rope_type",
    "longrope": "longrope_short_factor, longrope_long_factor",
    "router_function": "moe_router_score_function, moe_router_pre_softmax, "
    "moe_router_load_balancing_type, moe_router_normalization",
}


def features(model: ModelConfig) -> dict[str, Any]:
    """What may be other code of transformers, or other keys of config.json: each thing that
    determines the function of a model, numbers as `number` where none is special."""
    heads = model.num_attention_heads
    usual = model.head_dim * heads == model.hidden_size
    topk: Any = None
    if model.num_experts:
        topk = 1 if model.moe_router_topk == 1 else "number"
    kinds = {
        _IN_TABLE.get(name, name): _kind(value)
        for name, value in architecture.values(model).items()
    }
    return kinds | {
        "kv_channels": "hidden size / heads" if usual else "number",
        "max_position_embeddings": "number",
        "moe_router_topk": topk,
        "num_query_groups": {1: 1, heads: "heads"}.get(model.query_groups, "number"),
        "rotary_percent": 1 if model.rotary_percent == 1 else "number",
    }


def _kind(value: Any) -> Any:
    match value:
        case bool() | str() | None:
            return value
        case tuple():
            return [_kind(item) for item in value]
        case list():  # of layers
            if not value:
                return []
            return "all" if all(item is True for item in value) else "some"
    return "number"


PLAIN = features(ModelConfig(num_layers=1, hidden_size=2, num_attention_heads=2))


def unverified(model_type: str, model: ModelConfig) -> list[str]:
    """The features, or pairs of them, that no export to this family had which was compared with
    transformers."""
    table = read_json(VERIFIED)["families"].get(model_type)
    if table is None:
        return [f"model_type {model_type}"]
    values = features(model)
    unseen = [
        f"{name} {value}"
        for name, value in values.items()
        if value not in table["features"].get(name, [PLAIN[name]])
    ]
    return unseen or [
        f"{a} {values[a]} with {b} {values[b]}"
        for a, x, b, y in table["apart"]
        if values[a] == x and values[b] == y
    ]
