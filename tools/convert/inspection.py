"""inspect, diff and verify: what a checkpoint holds, where two differ, and whether two models compute the same."""
from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path

import torch

from megatron.config.model import ModelConfig
from megatron.training.trained_model import open_trained_model
from tools.convert.hf_files import CONFIG, HFFolder, Outgoing
from tools.convert.huggingface import HFModel, as_hf
from tools.convert.links import ConversionError, is_vocabulary
from tools.convert.ours import Ours

TENSORS_SHOWN = 20


def is_hf(path: Path) -> bool:
    """Is this a Hugging Face folder (and not one of ours)?"""
    return (path / CONFIG).is_file()


def inspect(path: Path, step: int | None = None, tensors: bool = False) -> str:
    """What lies in a folder, as lines."""
    if is_hf(path):
        return "\n".join(_inspect_hf(path, tensors))
    with Ours(path, step) as ours:
        return "\n".join(_inspect_ours(ours, tensors))


def _inspect_ours(ours: Ours, tensors: bool) -> Iterable[str]:
    state, reader = ours.found.state, ours.reader
    yield f"{ours.found.directory}: checkpoint of this suite, iteration {ours.found.iteration}"
    yield f"  consumed samples: {state.consumed_train_samples}; written by: " + (", ".join(
        f"{name} {size}" for name, size in state.layout.items()) or "unknown")
    yield f"  architecture: {_flags(ours.model)}"
    names = reader.names()
    table = {name: (reader.dtype(name), reader.shape(name)) for name in names}
    yield from _sums("weights", [table[name] for name in ours.weights()])
    rest = [table[name] for name in names if name.startswith("optimizer.")]
    yield from _sums("optimizer", rest) if rest else ["  optimizer: none"]
    yield f"  files: {len(ours.found.manifest.files)}, {sum(f.bytes for f in ours.found.manifest.files.values()):,} bytes"
    if tensors:
        yield from (f"  {name} {_format(*table[name])}" for name in names)


def _inspect_hf(path: Path, tensors: bool) -> Iterable[str]:
    with HFFolder(path) as folder:
        headers = folder.headers()
        yield f"{path}: Hugging Face folder, model_type {folder.config.get('model_type')!r}"
        yield from _sums("weights", list(headers.values()))
        yield f"  largest file: {folder.largest_shard:,} bytes"
    try:
        with HFModel(path) as model:
            yield f"  architecture: {_flags(model.model)}"
    except ConversionError as error:
        yield from (f"  cannot be imported: {line}" for line in str(error).splitlines())
    if tensors:
        yield from (f"  {name} {_format(*header)}" for name, header in sorted(headers.items()))


def _flags(model: ModelConfig) -> str:
    """The architecture's fields that are not the default."""
    return ", ".join(f"{f.name}={getattr(model, f.name)}" for f in fields(model) if getattr(model, f.name) != f.default)


def _format(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _sums(what: str, headers: Sequence[tuple[torch.dtype, Sequence[int]]]) -> Iterable[str]:
    count = Counter()
    for dtype, shape in headers:
        count[str(dtype).removeprefix("torch.")] += prod(shape)
    formats = ", ".join(f"{number:,} {name}" for name, number in count.items())
    yield f"  {what}: {len(headers)} tensors, {sum(count.values()):,} values ({formats})"


# --- diff -----------------------------------------------------------------------------------------------------------


def diff(a: Path, b: Path, step: int | None = None) -> tuple[str, bool]:
    """(lines, are they the same). Two checkpoints of ours are compared tensor by tensor, the optimizer's too; with a
    Hugging Face folder on either side, the weights as that folder names them."""
    if is_hf(a) and is_hf(b):
        with HFModel(a) as one, HFModel(b) as other:
            return _compare(one.outgoing(), other.outgoing())
    if is_hf(a) or is_hf(b):
        with HFModel(a if is_hf(a) else b) as model, Ours(b if is_hf(a) else a, step) as ours:
            sides = as_hf(ours, model.family.model_type, model.rows).tensors, model.outgoing()
            return _compare(*(sides[::-1] if is_hf(a) else sides))
    with Ours(a, step) as one, Ours(b, step) as other:
        return _compare(_all_of(one), _all_of(other))


def _all_of(ours: Ours) -> list[Outgoing]:
    """Every tensor of a checkpoint of ours, vocabularies without padding rows."""
    rows = ours.vocab_size()
    found = []
    for name in ours.reader.names():
        shape = ours.reader.shape(name)
        plain = name.split(".", 2)[2] if name.startswith("optimizer.") else name
        shape = (rows, *shape[1:]) if is_vocabulary(plain) else shape
        found.append(Outgoing(name, ours.reader.dtype(name), shape, _Read(ours, name, shape)))
    return found


@dataclass(frozen=True)
class _Read:
    """Reads the first rows of one of our tensors."""

    ours: Ours
    name: str
    shape: tuple[int, ...]

    def __call__(self) -> torch.Tensor:
        return self.ours.read(self.name, self.shape)


def _compare(a: Sequence[Outgoing], b: Sequence[Outgoing]) -> tuple[str, bool]:
    one, other = ({tensor.name: tensor for tensor in side} for side in (a, b))
    lines = [f"only in the first: {name}" for name in one if name not in other]
    lines += [f"only in the second: {name}" for name in other if name not in one]
    both = [name for name in one if name in other]
    for name in both:
        lines += _difference(one[name], other[name])
    total = len(lines)
    if total > TENSORS_SHOWN:
        lines[TENSORS_SHOWN:] = [f"and {total - TENSORS_SHOWN} more"]
    lines.append(f"{total} of {len(one.keys() | other.keys())} tensors differ" if total else f"same: {len(both)} tensors, "
                 "bit for bit")
    return "\n".join(lines), not total


def _difference(a: Outgoing, b: Outgoing) -> list[str]:
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"{a.name}: {_format(a.dtype, a.shape)} and {_format(b.dtype, b.shape)}"]
    x, y = a.make().contiguous(), b.make().contiguous()
    if torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)):
        return []
    unlike = (x != y).sum().item()
    return [f"{a.name}: {unlike:,} of {x.numel():,} values differ, by {(x.double() - y.double()).abs().max():.3g} at most"]


# --- verify ---------------------------------------------------------------------------------------------------------


def verify(ours: Path, theirs: Path, step: int | None = None, tolerance: float = 1e-4, length: int = 64) -> tuple[str, bool]:
    """(lines, do they agree): the same random ids through our model and through transformers' of the folder, in float32;
    after the embedding and after every block the largest difference, as a share of the largest value there.

    Both models are in memory. Raises ConversionError where transformers is missing or has no such model.
    """
    if not is_hf(theirs):
        raise ConversionError(f"{theirs}: no Hugging Face folder (there is no {CONFIG}); give what hf-export wrote, or what "
                              "hf-import read")
    their_model = _transformers_model(theirs)
    with contextlib.redirect_stdout(sys.stderr):
        trained = open_trained_model(str(ours), step, device="cpu")
    rows = min(trained.tokenizer.vocab_size, their_model.config.vocab_size)
    length = min(length, trained.model.max_positions)
    ids = torch.randint(0, rows, (2, length), generator=torch.Generator().manual_seed(1234))
    here, there = _our_states(trained.model, ids), _their_states(their_model, ids)
    names = ["embedding", *(f"block {i}" for i in range(len(there) - 3)), "last block and norm", "logits"]
    if len(here) != len(there):
        return f"{len(here) - 3} blocks here, {len(there) - 3} there", False
    lines, good = [], True
    for name, x, y in zip(names, here, there, strict=True):
        rows = min(x.shape[-1], y.shape[-1])
        gap, scale = (x[..., :rows] - y[..., :rows]).abs().max().item(), y[..., :rows].abs().max().item()
        fine = gap <= tolerance * scale             # NaN is not
        mark = "" if fine else "   TOO LARGE"
        lines.append(f"{name:<20} largest value {scale:10.4g}   largest difference {gap:10.4g}{mark}")
        good = good and fine
    verdict = "the models agree" if good else f"THE MODELS DIFFER (more than {tolerance} of the largest value)"
    return "\n".join([*lines, verdict]), good


def _our_states(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """The residual stream after the embedding and each block but the last, the last one's normed, and the logits."""
    found: list[torch.Tensor] = []
    layers = list(model.decoder.layers.values())
    modules = [model.embedding, *layers[:-1], model.decoder.final_layernorm]
    hooks = [one.register_forward_hook(lambda module, args, out: found.append(out.transpose(0, 1))) for one in modules]
    try:
        with torch.no_grad():
            logits = model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return [*found, logits]


def _their_states(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    return [*out.hidden_states, out.logits]


def _transformers_model(folder: Path) -> torch.nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConversionError(f"verify: needs the package transformers ({error}); run: pip install transformers") from None
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True,
                                                                 trust_remote_code=False).eval()
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConversionError(f"{folder}: transformers cannot load it ({reason[:300]}); a family that it does not know can "
                              "be written as its kin: hf-export --family llama") from None
