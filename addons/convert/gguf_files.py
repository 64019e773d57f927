"""gguf-import and gguf-export: the files of llama.cpp, read by transformers and written by the gguf
package."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from megatron.checkpoint.safetensors_file import Entry
from megatron.data.tokenizers.gpt2_bpe import GPT2_PATTERN
from megatron.small_files import read_bytes, read_text

from .hf_files import new_folder
from .huggingface import AsHF, as_hf, hf_import
from .links import ConversionError
from .native import NativeCheckpoint
from .verification import verified

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_TYPES = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [cut, _BYTES | {"use_regex": False}]


# llama.cpp's names of how text is cut before BPE, and the steps in tokenizer.json.
_CUTS = {
    "gpt-2": [_BYTES | {"use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES | {"use_regex": True}],
    "llama-bpe": _split(_WORDS.replace("DIGITS", "{1,3}")),
    "qwen2": _split(_WORDS.replace("DIGITS", "")),
}


def gguf_import(source: Path, target: Path, tokenizer: bool, check: bool) -> str:
    """Make a run directory of a GGUF file, with weights in fp32. Returns what to say of it. Raises
    ConversionError for what transformers would read as another model."""
    import transformers

    new_folder(target)
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, OSError, IndexError) as error:
        raise ConversionError(f"{source}: is no GGUF file ({error})") from None
    field = reader.get_field("general.architecture")
    kind = field.contents() if field else None
    if kind not in ARCHITECTURES:
        raise ConversionError(
            f"{source}: architecture {kind} is not read; those of {', '.join(ARCHITECTURES)} are"
        )
    scaling = reader.get_field(f"{kind}.rope.scaling.type")
    if any(each.name.startswith("rope_freqs") for each in reader.tensors) or (
        scaling and scaling.contents() != "none"
    ):
        raise ConversionError(
            f"{source}: scaled rotary positions of GGUF are not read; give the model's own folder "
            "to hf-import"
        )
    types = Counter(each.tensor_type.name for each in reader.tensors)
    quantized = [f"{count} of {name}" for name, count in types.items() if name not in ("F32",)]
    width = reader.get_field(f"{kind}.attention.key_length")
    place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    head = {"head_dim": width.contents()} if width and kind != "qwen2" else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, **head)
    values = sum(int(each.n_elements) for each in reader.tensors)
    taken = sum(each.numel() for each in model.parameters())
    if taken != values:  # it leaves out what it does not know, such as Llama's biases
        raise ConversionError(
            f"{source}: has {values:,} values, of which transformers takes {taken:,}; give the "
            "model's own folder to hf-import"
        )
    if hasattr(model.config, "quantization_config"):  # it says how the file was written
        del model.config.quantization_config
    model.hf_quantizer = None
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        if tokenizer:
            _read_tokenizer(reader, place, Path(folder))
        report = hf_import(Path(folder), target, tokenizer=tokenizer)
        if quantized:
            report += f"\nnote: tensors dequantized to fp32: {', '.join(quantized)}"
        return verified(report, target, Path(folder), target) if check else report


def gguf_export(
    source: Path, target: Path, step: int | None, family: str | None, tokenizer: bool
) -> str:
    """Write a GGUF file of a checkpoint of ours. Returns what to say of it. Raises ConversionError
    where llama.cpp would compute something else."""
    if target.exists():
        raise ConversionError(f"{target}: exists already; nothing is overwritten")
    with NativeCheckpoint(source, step) as native:
        model = as_hf(native, family)
        _refuse(model.config)
        writer = gguf.GGUFWriter(target, model.config["model_type"])
        _write_sizes(writer, model.config)
        if tokenizer:
            _write_tokenizer(writer, model)
        tensors = list(_renamed(model))
        for entry in tensors:
            kind = _TYPES[entry.dtype]
            shape = list(entry.shape)
            writer.add_tensor_info(entry.key, shape, np.dtype("V"), entry.bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in tensors:
            assert callable(entry.data)
            value = entry.data().contiguous()
            writer.write_tensor_data(value.view(torch.uint8).numpy())
        writer.close()
        return f"{target}: {model.config['model_type']}, {len(tensors)} tensors" + (
            "" if tokenizer else "\nnote: without a tokenizer: llama.cpp takes ids alone"
        )


def _refuse(config: Mapping[str, Any]) -> None:
    """Raise ConversionError for what these architectures of llama.cpp do not compute."""
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refused = {
        f"a model of the family {config['model_type']}": config["model_type"] not in ARCHITECTURES,
        "scaled rotary positions": rotary.get("rope_type", "default") != "default",
        "rotary positions of a part of each head": config.get("partial_rotary_factor", 1) != 1,
        "sliding windows": bool(config.get("use_sliding_window")),
        "another activation than SiLU": config.get("hidden_act", "silu") != "silu",
    }
    problems = [name for name, is_so in refused.items() if is_so]
    if problems:
        raise ConversionError(
            f"gguf-export: {', '.join(problems)}: not written to GGUF (--family "
            f"{'|'.join(ARCHITECTURES)}); use hf-export and llama.cpp's own converter"
        )


def _write_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    rotary = config.get("rope_parameters") or config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rotary.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _renamed(model: AsHF) -> Iterator[Entry]:
    """The tensors under llama.cpp's names. Vectors are fp32 there, and Llama's queries and keys
    have the two numbers of each rotation side by side."""
    config = model.config
    kind = config["model_type"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    for entry in model.tensors:
        name = names.get_name(entry.key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ConversionError(f"{entry.key}: has no name in GGUF's {kind}")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        key = heads.get(entry.key.split(".")[-2], "") if kind == "llama" else ""
        dtype = torch.float32 if len(entry.shape) == 1 or entry.dtype not in _TYPES else entry.dtype
        yield Entry(name, dtype, entry.shape, partial(_value, entry, dtype, config.get(key)))


def _value(entry: Entry, dtype: torch.dtype, heads: int | None) -> torch.Tensor:
    value = (entry.data() if callable(entry.data) else entry.data).to(dtype)
    if not heads:
        return value
    return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)


def _write_tokenizer(writer: gguf.GGUFWriter, model: AsHF) -> None:
    """The pieces, merges and special ids of a byte-level BPE. Raises ConversionError for another
    kind, or if text is cut in a way for which llama.cpp's name is not known here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, content in model.files.items():
            data = read_bytes(content) if isinstance(content, Path) else content
            (folder / part).write_bytes(data)
        file = folder / "tokenizer.json"
        table = json.loads(read_text(file)) if file.is_file() else {}
        cut = _cut(table)
        if cut is None:
            raise ConversionError(
                "gguf-export: the tokenizer is no byte-level BPE that cuts text as GPT-2, Llama 3 "
                "or Qwen2 do; --no-tokenizer writes the model alone"
            )
        rows = model.config["vocab_size"]
        pieces = [f"[PAD{index}]" for index in range(rows)]
        types = [gguf.TokenType.UNUSED] * rows
        for piece, index in table["model"]["vocab"].items():
            pieces[index], types[index] = piece, gguf.TokenType.NORMAL
        for added in table.get("added_tokens", ()):
            control = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
            pieces[added["id"]], types[added["id"]] = added["content"], control
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_list(pieces)
        writer.add_token_types(types)
        gguf.SpecialVocab(folder, load_merges=True, n_vocab=rows).add_to_gguf(writer, quiet=True)


def _cut(table: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of how this tokenizer.json cuts text; None where it is not known."""
    if table.get("model", {}).get("type") != "BPE":
        return None
    if table.get("normalizer") not in (None, {"type": "NFC"}):  # llama.cpp has none for Qwen2
        return None
    first = table.get("pre_tokenizer") or {}
    steps = [_essence(step) for step in first.get("pretokenizers", [first])]
    known = {**_CUTS, "GPT-2's here": _split(GPT2_PATTERN)}
    names = [name for name, cut in known.items() if [_essence(step) for step in cut] == steps]
    return {"GPT-2's here": "gpt-2"}.get(names[0], names[0]) if names else None


def _essence(step: Mapping[str, Any]) -> dict[str, Any]:
    """What of a step decides where it cuts."""
    return {key: value for key, value in step.items() if key != "trim_offsets"}


def _read_tokenizer(reader: gguf.GGUFReader, place: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and its companions. transformers reads pieces and merges, but cuts the
    text of most models as GPT-2 does. Raises ConversionError for a cut that is not known."""
    import transformers

    names = [reader.get_field(f"tokenizer.ggml.{key}") for key in ("model", "pre")]
    kind, cut = (field.contents() if field else None for field in names)
    if kind != "gpt2" or cut not in _CUTS:
        raise ConversionError(
            f"the tokenizer (kind {kind}, cut {cut}) is not read, only byte-level BPE cut as "
            f"{', '.join(_CUTS)}; --no-tokenizer imports the model alone"
        )
    transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    file = folder / "tokenizer.json"
    table = json.loads(read_text(file))
    table["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": _CUTS[cut]}
    table["model"]["ignore_merges"] = cut == "llama-bpe"
    file.write_text(json.dumps(table), encoding="utf-8")
