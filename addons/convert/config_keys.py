"""Reads a config.json key by key, so that no key that changes the model goes unread."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron import small_files

from .links import ConversionError

CONFIG = "config.json"

# Keys that change neither shapes nor numbers of a forward pass without dropout: for training,
# generation or book-keeping.
HARMLESS = frozenset(
    """
architectures model_type auto_map torch_dtype dtype transformers_version _name_or_path
_attn_implementation use_cache attn_implementation _attn_implementation_autoset _commit_hash
return_dict output_attentions output_hidden_states torchscript bos_token_id eos_token_id
pad_token_id eod_token_id unk_token_id sep_token_id decoder_start_token_id forced_bos_token_id
suppress_tokens forced_eos_token_id begin_suppress_tokens initializer_range initializer_factor
chunk_size_feed_forward id2label label2id num_labels problem_type finetuning_task
task_specific_params tokenizer_class prefix bad_words_ids is_encoder_decoder is_decoder
gradient_checkpointing pretraining_tp summary_activation summary_first_dropout
summary_proj_to_labels summary_type summary_use_proj n_ctx max_length min_length temperature top_k
top_p typical_p do_sample num_beams num_beam_groups num_return_sequences repetition_penalty
length_penalty diversity_penalty early_stopping no_repeat_ngram_size encoder_no_repeat_ngram_size
output_scores return_dict_in_generate remove_invalid_values exponential_decay_length_penalty
tie_encoder_decoder use_bfloat16 tf_legacy_loss pruned_heads unsloth_version unsloth_fixed
max_window_layers seq_length reorder_and_upcast_attn is_llama_config
""".split()
)
# Dropouts of all families. One that the family does not have changes training alone, and is noted.
DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "classifier_dropout",
    "resid_pdrop",
    "residual_dropout",
)
FULL_CONTEXT = "_max_position_embeddings"  # in the table: of a model whose context is shortened
_MISSING = object()
MAX_INTEGER = 1 << 53  # float64 has every whole number up to this


class Keys:
    """The keys of one config.json. What is wrong is collected and raised at the end, all of it at
    once; `notes` are what the reader should know of a model that is converted; `token_heads`: how
    many heads for later tokens it names."""

    def __init__(self, table: dict[str, Any], source: Path | str, ignored: Iterable[str] = ()):
        self.table = table
        self.source = source
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.token_heads = 0
        self._read: set[str] = set(ignored)

    def take(
        self,
        key: str,
        default: Any = _MISSING,
        kind: type | tuple[type, ...] = int,
        *,
        absent: Any = _MISSING,
    ) -> Any:
        """The value of a key. null and a missing key are the default, unless a missing one is
        something else: `absent`. Of another kind, or missing without a default: a problem."""
        self._read.add(key)
        if absent is not _MISSING and key not in self.table:
            return absent
        value = self.table.get(key)
        if value is None and default is not _MISSING:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if (
            not isinstance(value, kinds)
            or (isinstance(value, bool) and bool not in kinds)
            or (kind is int and isinstance(value, int) and value < 1)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            state = "is missing" if value is None else f"is {value!r}"
            self.problems.append(
                f"{self.source}: {key} {state}; should be {' or '.join(k.__name__ for k in kinds)}"
            )
            return default if default is not _MISSING else kinds[0]()
        return value

    def integer(self, key: str, default: int) -> int:
        """A number that must be whole, also where it is written 10000.0."""
        value = self.take(key, default, (int, float))
        if value != int(value) or abs(value) > MAX_INTEGER:
            self.refuse(key, value, "a whole number is all that --rotary-base takes")
            return default
        return int(value)

    def must_be(self, key: str, *allowed: Any, why: str) -> None:
        """A key that must be absent, null or one of `allowed`."""
        self._read.add(key)
        value = self.table.get(key)
        if value is not None and not any(
            value == choice and type(value) is type(choice) for choice in allowed
        ):
            self.refuse(key, value, why)

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Note that this value cannot be represented."""
        self.problems.append(
            f"{self.source}: {key} {json.dumps(value)} cannot be represented here: {why}"
        )

    def done(self) -> None:
        """Raise ConversionError with all problems, and with the keys that nobody has read. Dropouts
        that nobody has read are noted."""
        for key in DROPOUTS:
            if key in self.table and key not in self._read and self.table[key] not in (0, None):
                self.notes.append(
                    f"{key} {json.dumps(self.table[key])} is not used: "
                    f"{self.table.get('model_type')} models have no such dropout"
                )
        unread = sorted(
            key
            for key in self.table.keys() - self._read - HARMLESS - {*DROPOUTS}
            if not key.startswith("_")
        )
        if unread:
            self.problems.append(not_known(self.source, {key: self.table[key] for key in unread}))
        if self.problems:
            raise ConversionError("\n".join(dict.fromkeys(self.problems)))


def not_known(source: Path | str, keys: Mapping[str, Any]) -> str:
    """The error about keys that nobody has read."""
    shown = ", ".join(f"{key} {str(json.dumps(value))[:80]}" for key, value in keys.items())
    return (
        f"{source}: {shown}: not known here, so perhaps another model than the one that would be "
        f"made; if it changes nothing, give --ignore-config-key {' '.join(keys)} "
        "[config-key-unknown]"
    )


def is_unset(value: Any) -> bool:
    """Is it what an argument parser says of a flag that nobody gave? (0 is a number that may
    count.)"""
    return value is None or value is False or value in ("", [], {})


def names_of(words: str) -> re.Pattern[str]:
    """What matches any of these names; * is any ending."""
    return re.compile("|".join(words.split()).replace("*", ".*"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConversionError."""
    try:
        table = small_files.read_json(path, "utf-8-sig")
    except OSError as error:
        raise ConversionError(
            f"{path}: {error.strerror or error}; give a folder that save_pretrained wrote"
        ) from None
    except ValueError as error:
        raise ConversionError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(table, dict):
        raise ConversionError(f"{path}: not a JSON object")
    return table
