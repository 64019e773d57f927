"""Declares how a family's config.json differs from Llama's.

Both directions, config.json -> flags and flags -> config.json, follow from the declaration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.rope import LLAMA3_CONTEXT, LLAMA3_HIGH, LLAMA3_LOW

from .config_keys import FULL_CONTEXT, MAX_INTEGER, Keys

Flags = dict[str, Any]
# Llama 3.1's numbers of rope_scaling.
LLAMA3 = {
    "low_freq_factor": LLAMA3_LOW,
    "high_freq_factor": LLAMA3_HIGH,
    "original_max_position_embeddings": LLAMA3_CONTEXT,
}
# Of rope_scaling and rope_parameters.
_YARN_KEYS = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
_ROTARY_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", *LLAMA3}
# What ModelConfig.activation says -> the flags for that.
_ACTIVATION_FLAGS: dict[str, Flags] = {
    "swiglu": {"swiglu": True},
    "quick_geglu": {"quick_geglu": True},
    "geglu": {"geglu": True},
    "squared_relu": {"squared_relu": True},
    "xielu": {"xielu": True},
    "gelu (tanh)": {"openai_gelu": True},
    "gelu (erf)": {"bias_gelu_fusion": False},
}
# hidden_act -> ModelConfig.activation, the default first.
SILU = {"silu": "swiglu"}
GEGLU = {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}
TANH_GEGLU = {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
QUICK_GEGLU = {"silu": "quick_geglu"}
RELU2 = {"relu2": "squared_relu"}
GELU_TANH = {"gelu_pytorch_tanh": "gelu (tanh)", "gelu_new": "gelu (tanh)"}
GELU_ERF = {"gelu": "gelu (erf)"}
# Flags that a property of ModelConfig combines with others.
_PROPERTIES = {
    "add_qkv_bias": "qkv_bias",
    "add_attention_output_bias": "attention_output_bias",
    "add_mlp_bias": "mlp_bias",
    "moe_ffn_hidden_size": "expert_ffn",
    "softmax_scale": "attention_scale",
    "embedding_multiplier": "word_factor",
    "logits_scaling": "logits_divisor",
}


@dataclass(frozen=True)
class Key:
    """A key of config.json that sets one or several flags to its value; missing or null means
    `default`."""

    name: str
    default: Any
    flags: tuple[str, ...]

    def read(self, keys: Keys) -> Flags:
        """The flags."""
        kinds = (int, float) if type(self.default) is float else type(self.default)
        return dict.fromkeys(self.flags, keys.take(self.name, self.default, kinds))

    def write(self, m: ModelConfig) -> Any:
        """The value of the key."""
        return getattr(m, _PROPERTIES.get(self.flags[0], self.flags[0]))


def no_extra_keys(keys: Keys, flags: Flags) -> Flags:
    """The flags as they are."""
    return flags


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A family whose config.json has Llama's keys: what is different.

    flags: what every model of the family has, in addition to rotary positions.
    keys: additional keys, each with the flags it sets.
    fixed: keys that must have this value, or be missing: (value, reason). They are not written.
    written: further keys of an exported config.json.
    activations: values of hidden_act and what they are in ModelConfig.activation; the first is the
        default.
    activation_key: where hidden_act has another name.
    epsilon: key and default of the norms' epsilon.
    kv_heads, head_dim: default where num_key_value_heads or head_dim is missing (None:
        num_attention_heads, hidden_size / num_attention_heads; null means these in every family).
    grouped, own_head_dim: has the family these keys at all?
    theta, partial, tied: defaults of rope_theta, partial_rotary_factor, tie_word_embeddings. With
        partial None the family does not read partial_rotary_factor.
    dropouts: keys that are --hidden-dropout here; the value of the first is used.
    renamed: {key of old files: key that it became}.
    omitted: Llama's keys that are not written.
    first: edits the keys before all others are read. last: reads keys that depend on several flags.
    """

    flags: Flags = field(default_factory=lambda: {"normalization": "RMSNorm"})
    keys: tuple[Key, ...] = ()
    fixed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    written: Callable[[ModelConfig], Mapping[str, Any]] = lambda m: {}
    activations: Mapping[str, str] = field(default_factory=lambda: SILU)
    activation_key: str = "hidden_act"
    epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6)
    kv_heads: int | None = None
    head_dim: int | None = None
    grouped: bool = True
    own_head_dim: bool = True
    theta: int = 10000
    partial: float | None = None
    tied: bool = False
    dropouts: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    omitted: Sequence[str] = ()
    first: Callable[[Keys], None] | None = None
    last: Callable[[Keys, Flags], Flags] = no_extra_keys

    def read(self, keys: Keys) -> Flags:
        """config.json -> flags; problems are collected in `keys`."""
        if self.first:
            self.first(keys)
        for old, new in self.renamed.items():
            value = keys.take(old, None, (int, float))
            if value is not None and keys.table.get(new) not in (None, value):
                keys.refuse(new, keys.table[new], f"{old} is {value}; make both the same")
            elif value is not None:
                keys.table = keys.table | {new: value}
        for name, (value, why) in self.fixed.items():
            keys.must_be(name, value, why=why)
        flags = {"add_bias_linear": False, **self.flags, **self._sizes(keys)}
        flags |= _read_activation(keys, self.activation_key, self.activations)
        flags["norm_epsilon"] = keys.take(*self.epsilon, (float, int))
        flags["untie_embeddings_and_output_weights"] = not keys.take(
            "tie_word_embeddings", self.tied, bool
        )
        flags["attention_dropout"] = keys.take("attention_dropout", 0.0, (float, int))
        if self.dropouts:
            flags["hidden_dropout"] = read_dropout(keys, self.dropouts, 0.0)
        flags |= self._read_rotary(keys)
        for key in self.keys:
            flags |= key.read(keys)
        return self.last(keys, flags)

    def _sizes(self, keys: Keys) -> Flags:
        heads = keys.take("num_attention_heads")
        width = keys.take("hidden_size")
        groups = heads
        if self.grouped:
            groups = keys.take("num_key_value_heads", heads, absent=self.kv_heads or heads)
        if heads and heads % groups:
            keys.problems.append(
                f"{keys.source}: num_attention_heads {heads} is no multiple of its {groups} groups"
            )
        usual = width // heads if heads else 0
        head = usual
        if self.own_head_dim:
            head = keys.take("head_dim", usual, absent=self.head_dim or usual)
        positions = keys.take("max_position_embeddings")
        return {
            "num_layers": keys.take("num_hidden_layers"),
            "hidden_size": width,
            "num_attention_heads": heads,
            "ffn_hidden_size": keys.take("intermediate_size"),
            "kv_channels": None if head * heads == width else head,
            "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else 1,
            "seq_length": positions,
            "max_position_embeddings": positions,
        }

    def _read_rotary(self, keys: Keys) -> Flags:
        """Rotary positions, as transformers 5 (rope_parameters) or older ones (rope_theta,
        rope_scaling) write them.

        Where a file has several of them, rope_scaling replaces rope_parameters, and what stands in
        it counts more than the top-level key of the same name: transformers' own order.
        """
        new = keys.take("rope_parameters", {}, dict)
        old = keys.take("rope_scaling", {}, dict)
        key, scaling = ("rope_scaling", old) if old else ("rope_parameters", new)
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in scaling:
                keys.table = keys.table | {name: scaling[name]}
        flags: Flags = {"position_embedding_type": "rope"}
        partial = keys.take("partial_rotary_factor", self.partial or 1.0, (float, int))
        if self.partial is not None:
            flags["rotary_percent"] = partial
        elif partial != 1:
            keys.refuse(
                "partial_rotary_factor",
                partial,
                f"{keys.table.get('model_type')} models rotate whole heads, and transformers does "
                "not read this key for them; remove it if the model was trained that way",
            )
        if keys.table.get("rope_theta", 0) is None:
            keys.refuse("rope_theta", None, "there is no base then; 10000.0 is the usual one")
        keys.must_be(
            "rope_interleaved", False, why="these families rotate the two halves of a head"
        )
        flags["rotary_base"] = keys.integer("rope_theta", self.theta)
        return flags | _read_scaling(keys, key, scaling)

    def write(self, m: ModelConfig) -> dict[str, Any]:
        """Flags -> config.json. What it cannot express differs when it is read again."""
        acts = [name for name, activation in self.activations.items() if activation == m.activation]
        config = {
            "num_hidden_layers": m.num_layers,
            "hidden_size": m.hidden_size,
            "num_attention_heads": m.num_attention_heads,
            "num_key_value_heads": m.query_groups,
            "head_dim": m.head_dim,
            "intermediate_size": m.ffn,
            "max_position_embeddings": m.max_position_embeddings or m.seq_length,
            self.epsilon[0]: m.norm_epsilon,
            self.activation_key: (acts or list(self.activations))[0],
            "tie_word_embeddings": m.tied,
            **self._rotary_keys(m),
            "initializer_range": m.init_method_std,
            "attention_dropout": m.attention_dropout,
            **dict.fromkeys(self.dropouts, m.hidden_dropout),
            **{key.name: key.write(m) for key in self.keys},
            **self.written(m),
        }
        missing = {*self.omitted}
        if not self.grouped:
            missing.add("num_key_value_heads")
        if not self.own_head_dim:
            missing.add("head_dim")
        return {key: value for key, value in config.items() if key not in missing}

    def _rotary_keys(self, m: ModelConfig) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": float(m.rotary_base), "rope_type": "default"}
        rope |= scaling_keys(m)
        old = {name: value for name, value in rope.items() if name != "rope_theta"}
        partial = {}
        if self.partial is not None:
            partial = {"partial_rotary_factor": m.rotary_percent}
        return {
            "rope_theta": float(m.rotary_base),
            "rope_scaling": None if rope["rope_type"] == "default" else old,
            "rope_parameters": rope | partial,
            **partial,
        }


def scaling_keys(m: ModelConfig) -> dict[str, Any]:
    """rope_parameters of a model with other frequencies than its base has, but for that."""
    factor = m.rotary_seq_len_interpolation_factor
    if m.use_rope_scaling:
        return {"rope_type": "llama3", "factor": m.rope_scaling_factor, **LLAMA3}
    if m.longrope:
        return {
            "rope_type": "longrope",
            "short_factor": list(m.longrope.short),
            "long_factor": list(m.longrope.long),
            "attention_factor": m.longrope.length,
            "original_max_position_embeddings": m.longrope.context,
        }
    if m.yarn is None:
        linear = factor is not None and factor > 1
        return {"rope_type": "linear", "factor": float(factor or 1)} if linear else {}
    return {
        "rope_type": "yarn",
        "factor": m.yarn.factor,
        "original_max_position_embeddings": m.yarn.context,
        "beta_fast": m.yarn.fast,
        "beta_slow": m.yarn.slow,
        "attention_factor": m.yarn.length,
        "truncate": m.yarn.rounded,
    }


def _read_activation(keys: Keys, key: str, allowed: Mapping[str, str]) -> Flags:
    usual = next(iter(allowed))
    name = keys.take(key, usual, str)
    if name not in allowed:
        keys.refuse(key, name, f"one of {', '.join(allowed)} can be")
    return _ACTIVATION_FLAGS[allowed.get(name, allowed[usual])]


def read_dropout(keys: Keys, names: tuple[str, ...], default: float) -> float:
    """--hidden-dropout: the value of the first of these keys. Others that differ are noted."""
    value, *further = (keys.take(name, default, (float, int)) for name in names)
    for name, further_value in zip(names[1:], further, strict=True):
        if further_value != value:
            keys.notes.append(
                f"{name} {further_value} is not used: --hidden-dropout {value} ({names[0]}) "
                "applies to the embedding too"
            )
    return value


def _read_scaling(keys: Keys, key: str, scaling: dict[str, Any]) -> Flags:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "dynamic", "linear", "llama3", None):
        # nobody reads the other keys, and Keys.done names them
        keys.table = keys.table | {
            f"{key}.{name}": value for name, value in scaling.items() if name not in _ROTARY_KEYS
        }
    factor: Any = scaling.get("factor")
    usable = type(factor) in (int, float) and 0 < factor <= MAX_INTEGER
    # Dynamic NTK changes nothing within max_position_embeddings, and longer sequences are refused
    # here.
    if kind == "linear" and usable and factor == int(factor):
        return {"rotary_seq_len_interpolation_factor": int(factor) if factor > 1 else None}
    if kind == "yarn" and usable:
        return _read_yarn(keys, key, scaling)
    if kind == "longrope" and (usable or factor is None):
        return _read_longrope(keys, key, scaling)
    llama3_numbers = all(scaling.get(name) == value for name, value in LLAMA3.items())
    if kind == "llama3" and usable and llama3_numbers:
        return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
    if kind not in ("default", "dynamic", None):
        keys.refuse(
            key,
            scaling,
            "the types default, dynamic, linear with a whole factor, yarn, longrope, and llama3 "
            "with its own numbers can be",
        )
    return {}


def _read_yarn(keys: Keys, key: str, scaling: dict[str, Any]) -> Flags:
    """As transformers: a length that is not said follows from the factor, or from mscale where both
    it and mscale_all_dim are numbers other than 0."""
    known = _ROTARY_KEYS | _YARN_KEYS
    keys.table = keys.table | {
        f"{key}.{name}": value for name, value in scaling.items() if name not in known
    }
    read = Keys(scaling, keys.source)
    factor = float(scaling["factor"])
    number = (int, float)
    flags: Flags = {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": read.take("original_max_position_embeddings"),
        "beta_fast": float(read.take("beta_fast", 32.0, number) or 32.0),
        "beta_slow": float(read.take("beta_slow", 1.0, number) or 1.0),
        "yarn_correction_range_round_to_int": read.take("truncate", True, bool),
    }
    scales = [float(read.take(name, 0.0, number)) for name in ("mscale", "mscale_all_dim")]
    length = read.take("attention_factor", None, number)
    logarithm = 0.1 * math.log(max(1.0, factor))
    if length is not None and logarithm and length > 0.0:
        long, short = max(length, 1.0), min(length, 1.0)
        flags["mscale"] = (long - 1.0) / logarithm
        flags["mscale_all_dim"] = (1.0 / short - 1.0) / logarithm
    elif length is not None and length != 1.0:
        keys.refuse(key, scaling, "attention_factor must be positive, and 1 without a factor")
    elif length is None and all(scales):
        flags |= {"mscale": scales[0], "mscale_all_dim": scales[1]}
    keys.problems += read.problems
    if not (flags["beta_fast"] > 0 and flags["beta_slow"] > 0 and min(scales) >= 0):
        keys.refuse(key, scaling, "turns and scales must be positive numbers")
    return flags


def _read_longrope(keys: Keys, key: str, scaling: dict[str, Any]) -> Flags:
    """As transformers: a length that is not said follows from the factor, and that from the two
    contexts; an old context outside counts more."""
    known = _ROTARY_KEYS | {"short_factor", "long_factor", "attention_factor"}
    keys.table = keys.table | {
        f"{key}.{name}": value for name, value in scaling.items() if name not in known
    }
    read = Keys(scaling, keys.source)
    positions = keys.table.get(FULL_CONTEXT) or keys.table.get("max_position_embeddings")
    inside = read.take("original_max_position_embeddings", positions)
    context = keys.take("original_max_position_embeddings", inside)
    factor = scaling.get("factor") or (positions or 1) / context
    length = read.take("attention_factor", None, (int, float))
    if length is None:
        length = 1.0
        if factor > 1 and context > 1:
            length = math.sqrt(1 + math.log(factor) / math.log(context))
    flags: Flags = {
        "rope_type": "longrope",
        "original_max_position_embeddings": context,
        "longrope_attention_factor": float(length),
    }
    for name in ("short_factor", "long_factor"):
        numbers = read.take(name, [], list)
        if not all(type(number) in (int, float) and number > 0 for number in numbers):
            keys.refuse(f"{key}.{name}", numbers, "frequencies are divided by numbers above 0")
            numbers = []
        flags[f"longrope_{name}"] = tuple(map(float, numbers))
    keys.problems += read.problems
    return flags
