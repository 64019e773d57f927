"""The file of --export-kd-cfg, which Megatron-LM's distillation reads, too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron.small_files import read_text

LIMIT = 1 << 20  # bytes
OUTPUT = "output_layer"
LOSSES = ("cosine", "mse")


class Pair(NamedTuple):
    """Modules of student and teacher whose outputs, hidden states, are to be alike."""

    student: str
    teacher: str
    loss: Literal["cosine", "mse"] = "cosine"


@dataclass(frozen=True)
class Settings:
    """What is trained: with `skip_lm_loss` the divergence of the logits alone, else the loss of the
    labels and `kd_loss_scale` times a divergence that is scaled to that loss."""

    pairs: tuple[Pair, ...] = ()
    skip_lm_loss: bool = True
    kd_loss_scale: float = 1.0
    logit_kl_temperature: float = 1.0


def read(path: str) -> Settings:
    """The settings in a file. Raises ValueError with file, line, key and remedy."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(
            f"--export-kd-cfg {path}: needs the package PyYAML: pip install pyyaml, or omit the "
            "flag [package-missing]"
        ) from None
    try:
        text = read_text(path, "utf-8-sig", limit=LIMIT)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        table = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"--export-kd-cfg {path}: cannot be read: {reason} [kd-settings]"
        ) from None
    if table is None:
        return Settings()
    if not isinstance(table, dict):
        raise _wrong(path, "is no table of keys and values; write one key: value a line")
    lines: dict[Any, int] = {}
    for key, _ in node.value:
        if key.value in lines:
            raise _wrong(f"{path}:{key.start_mark.line + 1}", f"{key.value} stands twice; keep one")
        lines[key.value] = key.start_mark.line + 1
    values: dict[str, Any] = {}
    for key, value in table.items():
        place = f"{path}:{lines.get(str(key), 1)}"
        shown = f"{key}: {str(value)[:60]}"
        if key not in _KEYS:
            raise _wrong(place, f"{shown}: no such key; omit it (there are {', '.join(_KEYS)})")
        try:
            values |= _KEYS[key](value)
        except ValueError as problem:
            raise _wrong(place, f"{shown}: {problem}") from None
    return Settings(**values)


def _wrong(place: str, what: str) -> ValueError:
    return ValueError(f"--export-kd-cfg {place}: {what} [kd-settings]")


def _logit_layers(value: Any) -> dict[str, Any]:
    if value != [OUTPUT, OUTPUT]:
        raise ValueError(f"logits are those of the output layers; write [{OUTPUT}, {OUTPUT}]")
    return {}


def _pairs(value: Any) -> dict[str, Any]:
    pairs = []
    for entry in value if isinstance(value, list) else [value]:
        names = entry if isinstance(entry, list) else [entry]
        if len(names) not in (2, 3) or not all(isinstance(name, str) for name in names):
            raise ValueError("write a list of [layer of the student, layer of the teacher]")
        pair = Pair(*names)
        if pair.loss not in LOSSES:
            raise ValueError(f"the loss of a pair is {' or '.join(LOSSES)}, not {pair.loss}")
        pairs.append(pair)
    return {"pairs": tuple(pairs)}


def _switch(value: Any) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise ValueError("write true or false")
    return {"skip_lm_loss": value}


def _positive(name: str, value: Any) -> dict[str, Any]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError("must be a number greater than 0")
    return {name: float(value)}


_KEYS: dict[str, Any] = {
    "logit_layers": _logit_layers,
    "intermediate_layer_pairs": _pairs,
    "skip_lm_loss": _switch,
    "kd_loss_scale": lambda value: _positive("kd_loss_scale", value),
    "logit_kl_temperature": lambda value: _positive("logit_kl_temperature", value),
}
