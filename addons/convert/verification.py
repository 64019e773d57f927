"""Checks that a converted model computes the same: ours and transformers' on random ids, compared
block by block.

`verify` is the command; `verified` is what hf-import and hf-export do by themselves where
transformers is installed. Where it is not, an export must be among those that the tests compared.
"""

from __future__ import annotations

import contextlib
import importlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from megatron import host
from megatron.checkpoint.filesystem import CheckpointError
from megatron.config.model import ModelConfig
from megatron.data.tokenizers.build import NullTokenizer
from megatron.inference.load_model import TrainedModel, open_trained_model
from megatron.model.gpt import GPTModel

from .config_keys import CONFIG
from .families import unverified
from .hf_files import HFFolder, remove_folder
from .hf_tokenizer import ODD_TEXTS
from .links import SHOWN, ConversionError
from .native import NativeCheckpoint
from .stores.remote_folder import RemoteFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..object_storage.run_directories import Remote
    from .huggingface import AsHF

TOLERANCE = 1e-4  # largest difference, as a share of the largest value
LENGTH = 64  # tokens of each of the two samples
MEMORY_SHARE = 0.8  # of the free memory may go to the two models
WORTH_SAYING = 10**9  # bytes of memory that a line announces


def is_hf(path: Path | RemoteFolder) -> bool:
    """Is this a Hugging Face folder (and not one of ours)?"""
    return ((path.path if isinstance(path, RemoteFolder) else path) / CONFIG).is_file()


def verify(
    native: Path,
    hf: Path | RemoteFolder,
    step: int | None = None,
    tolerance: float = TOLERANCE,
    length: int = LENGTH,
) -> tuple[str, bool]:
    """(lines, do they agree): the same random ids through our model and through transformers' of
    the folder, in float32; after the embedding and after every block the largest difference, as a
    share of the largest value there.

    Both models are in memory. Raises ConversionError where transformers is missing or has no such
    model.
    """
    if not is_hf(hf):
        raise ConversionError(
            f"{hf}: no Hugging Face folder (there is no {CONFIG}); give what hf-export wrote, "
            "or what hf-import read"
        )
    return _compare(*_open_both(native, hf, step), tolerance, length)


def _open_both(
    native: Path, hf: Path | RemoteFolder, step: int | None
) -> tuple[TrainedModel, PreTrainedModel]:
    their_model = _transformers_model(hf)
    with contextlib.redirect_stdout(sys.stderr):
        return open_trained_model(str(native), step, device="cpu"), their_model


def _compare(
    trained: TrainedModel, their_model: PreTrainedModel, tolerance: float, length: int
) -> tuple[str, bool]:
    rows = min(trained.tokenizer.vocab_size, their_model.config.vocab_size)
    length = min(length, trained.model.max_positions)
    ids = torch.randint(0, rows, (2, length), generator=torch.Generator().manual_seed(1234))
    our_states = _our_states(trained.model, ids)
    their_states = _their_states(their_model, ids)
    names = [
        "embedding",
        *(f"block {i}" for i in range(len(their_states) - 3)),
        "last block and norm",
        "logits",
    ]
    if len(our_states) != len(their_states):
        return f"{len(our_states) - 3} blocks here, {len(their_states) - 3} there", False
    lines: list[str] = []
    good = True
    for name, x, y in zip(names, our_states, their_states, strict=True):
        rows = min(x.shape[-1], y.shape[-1])
        gap = (x[..., :rows] - y[..., :rows]).abs().max().item()
        scale = y[..., :rows].abs().max().item()
        fine = gap <= tolerance * scale  # NaN is not
        mark = "" if fine else "   TOO LARGE"
        lines.append(
            f"{name:<20} largest value {scale:10.4g}   largest difference {gap:10.4g}{mark}"
        )
        good = good and fine
    verdict = (
        "the models agree"
        if good
        else f"THE MODELS DIFFER (more than {tolerance} of the largest value)"
    )
    return "\n".join([*lines, verdict]), good


def _our_states(model: GPTModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """The residual stream after the embedding and each block but the last, the last one's normed,
    and the logits."""
    states: list[torch.Tensor] = []
    layers = list(model.decoder.layers.values())
    modules = [model.embedding, *layers[:-1], model.decoder.final_layernorm]
    hooks = [
        module.register_forward_hook(lambda module, args, out: states.append(out.transpose(0, 1)))
        for module in modules
    ]
    try:
        with torch.no_grad():
            logits = model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return [*states, logits]


def _their_states(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    try:
        with torch.no_grad():
            out = model(ids, output_hidden_states=True, use_cache=False)
    except Exception as error:  # as in _transformers_model
        raise ConversionError(f"transformers cannot run it ({_reason(error)})") from None
    return [*out.hidden_states, out.logits]


def _reason(error: Exception) -> str:
    """Its text in one line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _transformers() -> ModuleType:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConversionError(
            f"needs the package transformers ({error}); run: pip install transformers "
            "[package-missing]"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _transformers_model(folder: Path | RemoteFolder) -> PreTrainedModel:
    transformers = _transformers()
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        if not isinstance(folder, RemoteFolder):
            return transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, **options
            ).eval()
        config = transformers.AutoConfig.from_pretrained(folder.path, **options)
        with torch.device("meta"):
            kind = type(transformers.AutoModelForCausalLM.from_config(config))
        with HFFolder(folder) as opened:
            state = {name: opened.read(name) for name in opened.headers()}
        return kind.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32
        ).eval()
    except Exception as error:  # it has errors of its own, and its validators have others
        raise ConversionError(
            f"{folder}: transformers cannot load it ({_reason(error)}); a family that it does not "
            "know can be written as a related one: hf-export --family llama"
        ) from None


# --- after a conversion


def check_comparable(exported: AsHF, model: ModelConfig, remote: bool) -> None:
    """Raise ConversionError if an export, into an object store if it is `remote`, can neither be
    compared with transformers here nor is one that the tests compared."""
    model_type = exported.config["model_type"]
    try:
        if model_type not in _transformers().CONFIG_MAPPING:
            raise ConversionError(f"transformers has no {model_type} models")
        values = sum(torch.Size(tensor.shape).numel() for tensor in exported.tensors)
        _needs_memory(values, sum(tensor.bytes for tensor in exported.tensors) if remote else 0)
    except ConversionError as error:
        _known(model_type, model, str(error))


def _known(model_type: str, model: ModelConfig, reason: str) -> str:
    """What to say of an export that cannot be compared, for this reason. Raises ConversionError
    unless the tests compared such exports."""
    gaps = unverified(model_type, model)
    if gaps:
        raise ConversionError(
            f"this export cannot be compared with transformers here: {reason}; and the tests "
            f"compared no {model_type} export with {'; '.join(gaps[:SHOWN])}: give --unverified to "
            "write it all the same [export-not-verified]"
        )
    return (
        f"not verified here: {reason}\n{model_type} exports with these features are verified by "
        "the tests of this suite (addons/convert/verified_exports.json)"
    )


def verified(
    report: str,
    native: Path,
    hf: Path | RemoteFolder,
    written: Path | Remote,
    step: int | None = None,
    *,
    export: bool = False,
    tokenizer: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """`report` of a conversion that wrote `written`, with a line on what the comparison found or
    why there was none. `tokenizer`: the flags of it that were given for an export.

    Raises ConversionError if the models differ, and for an `export` that neither is compared nor
    one that the tests compared; `written` is removed then.
    """
    words = ["verify", str(native), str(hf)]
    words += ["--ckpt-step", str(step)] if step is not None else []
    later = f"later: python tools/convert_checkpoint.py {shlex.join(words)}"
    try:
        _transformers()
        needed = _needs_memory(*_sizes(hf))
        if needed > WORTH_SAYING:
            print(
                f"verifying on random ids: takes {needed / 1e9:.1f} GB of memory (--unverified "
                "skips it)",
                file=sys.stderr,
            )
        text, good = _compare(*_open_both(native, hf, step), TOLERANCE, LENGTH)
    except (ConversionError, CheckpointError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        if not export:
            return f"{report}\nnot verified: {reason}; {later}"
        try:
            with HFFolder(hf) as folder, NativeCheckpoint(native, step) as source:
                verdict = _known(folder.config["model_type"], source.model, reason)
        except ConversionError:
            remove_folder(written)
            raise
        return f"{report}\n{verdict}; {later}"
    if good:
        lines = (
            f"{report}\nverified: every block computes what transformers' does, to "
            f"{TOLERANCE} of the largest value"
        )
        if export:
            lines += f"\n{_tokenizers_compared(native, hf, step, tokenizer)}"
        return lines
    remove_folder(written)
    raise ConversionError(
        f"{text}\n{written}: removed, since the two models do not compute the same; --unverified "
        "keeps it"
    )


def _tokenizers_compared(
    native: Path, hf: Path | RemoteFolder, step: int | None, flags: Mapping[str, Any]
) -> str:
    """A line on whether AutoTokenizer of the folder `hf` gives the ids of our tokenizer."""
    folder = hf.path if isinstance(hf, RemoteFolder) else hf
    try:
        with NativeCheckpoint(native, step, flags) as source:
            tokenizer = source.tokenizer()
        loaded = _transformers().AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # it has errors of its own, and its validators have others
        return f"note: the tokenizer is not compared: {_reason(error)}"
    texts = ("0 1 2",) if isinstance(tokenizer, NullTokenizer) else ODD_TEXTS
    different = sum(
        loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
        != [int(index) for index in tokenizer.encode_inside(text)]
        for text in texts
    )
    if different:
        return (
            f"note: AutoTokenizer has other ids than {type(tokenizer).__name__} for {different} of "
            f"{len(texts)} texts of odd characters"
        )
    return f"verified: AutoTokenizer has our ids for {len(texts)} texts of odd characters"


def _sizes(folder: Path | RemoteFolder) -> tuple[int, int]:
    """(number of values, bytes that come to the memory as they are) of a folder's files."""
    with HFFolder(folder) as opened:
        headers = opened.headers().values()
    values = sum(torch.Size(shape).numel() for _, shape in headers)
    if not isinstance(folder, RemoteFolder):
        return values, 0
    return values, sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in headers)


def _needs_memory(values: int, stored: int) -> int:
    """Bytes of two models of so many values in float32, and the `stored` ones. Raises
    ConversionError if they do not fit into the free memory."""
    needed = 2 * torch.float32.itemsize * values + stored
    free = host.available_memory()
    if needed > MEMORY_SHARE * free:
        raise ConversionError(
            f"two models of {values:,} parameters in float32 need {needed / 1e9:.1f} GB of "
            f"memory, and {free / 1e9:.1f} GB are free "
            "[not-enough-memory]"
        )
    return needed
