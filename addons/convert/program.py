"""Import checkpoints from other formats and export them: Hugging Face, Megatron-LM,
Megatron-DeepSpeed and others. See docs/convert.md.

Nothing is overwritten, and nothing is downloaded but a model that is named ORG/NAME; one tensor is
in memory at a time, and each is used exactly once.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron import threads
from megatron.arguments import arg
from megatron.config.checkpoint import is_url
from megatron.config.tokenizer import TOKENIZER_FILES
from tools.shared.program import Command, run_command

from . import hub
from .options import (
    SHARD_BYTES,
    Answer,
    families,
    finish,
    ignored_keys,
    of_features,
    path_of,
    path_or_url,
    step_option,
    unverified_option,
)

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def size(word: str) -> int:
    """Bytes of 5GB, 200MB or 1000. Raises ValueError."""
    match = re.fullmatch(r"(\d+)(KB|MB|GB)?", word)
    if not match or not int(match[1]):
        raise ValueError("not a size; write 5GB, 200MB or a number of bytes [value-malformed]")
    return int(match[1]) * _UNITS[match[2] or ""]


@dataclass(frozen=True, kw_only=True)
class HFImport:
    """hf-import."""

    source: Path | str = path_of(
        "HF_FOLDER",
        "directory with config.json and .safetensors files, its s3:// URL, or ORG/NAME of the "
        "Hugging Face hub",
        path_or_url,
    )
    target: Path = path_of("DIR", "run directory to create")
    ignore_config_key: tuple[str, ...] = ignored_keys("keys of config.json")
    max_position_embeddings: int | None = arg(None)
    """use a shorter context than config.json's"""

    no_tokenizer: bool = arg(False)
    """do not copy the tokenizer's files (the run then uses NullTokenizer)"""

    drop_token_heads: bool = arg(False)
    """leave out heads for later tokens (multi-token prediction)"""

    extend_vocabulary: Literal["pieces", "mean", "drawn"] | None = arg(None)
    """then do what extend-vocabulary does with --new-rows of this value"""

    tokenizer_model: Path | None = arg(None, parse=Path, metavar="FOLDER")
    """with --extend-vocabulary: folder with the tokenizer.json of the model's tokenizer and the
    tokens added to it"""

    unverified: bool = unverified_option()

    def run(self) -> Answer:
        """Do it."""
        from .hf_files import new_folder, work_folder
        from .vocabulary import extend_vocabulary

        new_folder(self.target)
        if not (self.extend_vocabulary and self.tokenizer_model):
            return self._import(self.target)
        with work_folder(self.target, "import") as work:
            imported = work / self.target.name
            text = self._import(imported)
            way, folder = self.extend_vocabulary, self.tokenizer_model
            more = extend_vocabulary(imported, self.target, folder, way=way)
        return f"{text}\n{more}".replace(str(imported), str(self.target))

    def _import(self, target: Path) -> str:
        """Make the run directory `target`."""
        from .hf_files import WANTED, opened_folder
        from .huggingface import hf_import
        from .verification import verified

        folder = hub.fetched(str(self.source), WANTED) if hub.is_name(self.source) else self.source
        with opened_folder(folder) as source:
            report = hf_import(
                source,
                target,
                ignored=self.ignore_config_key,
                tokenizer=not self.no_tokenizer,
                max_positions=self.max_position_embeddings,
                drop_token_heads=self.drop_token_heads,
            )
            return report if self.unverified else verified(report, target, source, target)


@dataclass(frozen=True, kw_only=True)
class HFExport:
    """hf-export."""

    source: Path = path_of("DIR", "run directory, or an iter_XXXXXXX in it")
    target: Path | str = path_of("HF_FOLDER", "directory to create, or its s3:// URL", path_or_url)
    family: str | None = arg(None, choices=tuple(sorted(families())))
    """model family to write (default: the one of the imported model, else the first that fits)"""

    ckpt_step: int | None = step_option()
    vocab_size: int | None = arg(None)
    """vocabulary rows to write (default: the tokenizer's)"""

    max_shard_size: int = arg(SHARD_BYTES, metavar="SIZE", parse=size)
    """largest .safetensors file, such as 5GB or 200MB (default: 5GB)"""

    tokenizer_type: str | None = arg(None, choices=tuple(TOKENIZER_FILES))
    """tokenizer of a model that was trained on ids alone (NullTokenizer)"""

    tokenizer_model: str | None = arg(None, metavar="FILE")
    """with --tokenizer-type: its model file"""

    chat_template: str | None = arg(None, metavar="NAME|FILE")
    """chat template that the model was trained with, as preprocess_data.py takes it (default: the
    one in the tokenizer's folder)"""

    unverified: bool = unverified_option(
        "; without transformers, write also what is not in the table of exports that this suite's "
        "tests compared (addons/convert/verified_exports.json)"
    )

    def run(self) -> Answer:
        """Do it."""
        from .hf_files import opened_folder, target_of
        from .huggingface import hf_export
        from .verification import check_comparable, verified

        target = target_of(self.target)
        tokenizer = {
            name: value
            for name in ("tokenizer_type", "tokenizer_model")
            if (value := getattr(self, name))
        }
        report = hf_export(
            self.source,
            target,
            step=self.ckpt_step,
            family=self.family,
            vocab_size=self.vocab_size,
            chat_template=self.chat_template,
            tokenizer=tokenizer,
            shard_bytes=self.max_shard_size,
            check=None
            if self.unverified
            else partial(check_comparable, remote=is_url(str(self.target))),
        )
        if self.unverified:
            return report
        with opened_folder(self.target) as folder:
            return verified(
                report,
                self.source,
                folder,
                target,
                self.ckpt_step,
                export=True,
                tokenizer=tokenizer,
            )


@dataclass(frozen=True, kw_only=True)
class GGUFImport:
    """gguf-import."""

    source: Path = path_of("FILE", "a .gguf file of Llama, Qwen2 or Qwen3, of any quantization")
    target: Path = path_of("DIR", "run directory to create; its weights are fp32")
    no_tokenizer: bool = arg(False)
    """leave out the tokenizer (the run then uses NullTokenizer)"""

    unverified: bool = unverified_option()

    def run(self) -> Answer:
        """Do it."""
        from .gguf_files import gguf_import

        return gguf_import(self.source, self.target, not self.no_tokenizer, not self.unverified)


@dataclass(frozen=True, kw_only=True)
class GGUFExport:
    """gguf-export."""

    source: Path = path_of("DIR", "run directory, or an iter_XXXXXXX in it")
    target: Path = path_of("FILE", ".gguf file to create, not quantized")
    family: str | None = arg(None, choices=("llama", "qwen2", "qwen3"))
    """architecture to write (default: that of the imported model, else the first that fits)"""

    ckpt_step: int | None = step_option()
    no_tokenizer: bool = arg(False)
    """write the model without a tokenizer"""

    def run(self) -> Answer:
        """Do it."""
        from .gguf_files import gguf_export

        return gguf_export(
            self.source, self.target, self.ckpt_step, self.family, not self.no_tokenizer
        )


def _needs(*packages: str) -> list[str]:
    """A line for packages that are not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return []
    return [
        f"GGUF needs {' and '.join(missing)}; pip install {' '.join(missing)} [package-missing]"
    ]


def _import_problems(options: HFImport) -> list[str]:
    """Before torch is loaded."""
    problems = list(hub.problems(options.source))
    if (options.extend_vocabulary is None) != (options.tokenizer_model is None):
        problems.append(
            "--extend-vocabulary, --tokenizer-model: one needs the other; give both, or none "
            "[flag-missing]"
        )
    if options.extend_vocabulary and options.no_tokenizer:
        problems.append(
            "--extend-vocabulary: the longer tokenizer is compared with the model's; omit "
            "--no-tokenizer [flags-exclude-each-other]"
        )
    return problems


def _gguf_problems(options: GGUFImport) -> list[str]:
    """Before torch is loaded."""
    if not options.source.is_file():
        return [f"FILE {options.source}: no such file; give a .gguf file [file-not-readable]"]
    return _needs("gguf", "transformers")


@dataclass(frozen=True, kw_only=True)
class MegatronImport:
    """megatron-import."""

    source: Path = path_of(
        "SOURCE", "Megatron-LM's run directory or iter_XXXXXXX (mp_rank_XX folders or torch_dist)"
    )
    target: Path = path_of("DIR", "run directory to create")
    args: Path | None = arg(None, parse=Path, metavar="FILE")
    """file of flags that override the checkpoint's arguments"""

    ignore_config_key: tuple[str, ...] = ignored_keys("the checkpoint's arguments")
    no_tokenizer: bool = arg(False)
    """do not keep the tokenizer (the run then uses NullTokenizer)"""

    vocab_size: int | None = arg(None)
    """with --no-tokenizer: number of vocabulary rows that are not padding"""

    no_load_optim: bool = arg(False)
    """convert the weights alone, without the optimizer state (torch_dist has one)"""

    def values(self) -> dict[str, Any]:
        """What `megatron_import` takes besides source and target."""
        return {
            "args_file": self.args,
            "tokenizer": not self.no_tokenizer,
            "vocab_size": self.vocab_size,
            "ignored": self.ignore_config_key,
            "optimizer": not self.no_load_optim,
        }

    def run(self) -> Answer:
        """Do it."""
        from .megatron_layout import megatron_import

        return megatron_import(self.source, self.target, **self.values())


@dataclass(frozen=True, kw_only=True)
class DeepSpeedImport(MegatronImport):
    """deepspeed-import."""

    source: Path = path_of("SOURCE", "Megatron-DeepSpeed's run directory or global_stepN")
    no_load_optim: bool = arg(False)
    """convert the weights alone, without the optimizer state in zero_pp_rank_* files"""

    def run(self) -> Answer:
        """Do it."""
        from .deepspeed_files.checkpoint import deepspeed_import

        return deepspeed_import(self.source, self.target, **self.values())


@dataclass(frozen=True, kw_only=True)
class MegatronExport:
    """megatron-export."""

    source: Path = path_of("DIR", "run directory, or an iter_XXXXXXX in it")
    target: Path = path_of("TARGET", "directory to create")
    tensor_model_parallel_size: int = arg(1)
    """tensor-parallel ranks to write files for"""

    pipeline_model_parallel_size: int = arg(1)
    """pipeline stages to write files for"""

    ckpt_format: Literal["torch", "torch_dist"] = arg("torch")
    """torch: mp_rank_XX folders for these sizes; torch_dist: tensors that Megatron loads at any
    size"""

    model: Literal["core", "legacy"] = arg("core")
    """names of megatron-core's GPTModel, or of the older model"""

    transformer_impl: Literal["transformer_engine", "local"] = arg("transformer_engine")
    """layers of Megatron that will load a torch_dist checkpoint with experts (its own
    --transformer-impl; without experts the names are the same)"""

    ckpt_step: int | None = step_option()

    def run(self) -> Answer:
        """Do it."""
        from .megatron_layout import megatron_export

        return megatron_export(
            self.source,
            self.target,
            tp=self.tensor_model_parallel_size,
            kind=self.model,
            pp=self.pipeline_model_parallel_size,
            sharded=self.ckpt_format == "torch_dist",
            layers=self.transformer_impl,
            step=self.ckpt_step,
        )


@dataclass(frozen=True, kw_only=True)
class Upcycle:
    """upcycle."""

    source: Path = path_of("DIR", "run directory of a dense model, or an iter_XXXXXXX in it")
    target: Path = path_of("TARGET", "run directory to create")
    num_experts: int = arg()
    """number of experts of each MoE layer"""

    moe_router_topk: int = arg(2)
    """number of experts that compute each token"""

    moe_layer_freq: str = arg("1")
    """which layers become MoE layers: N for layers 0, N, 2N ..., or a pattern of 0 (dense) and 1
    (MoE) such as [0]*1+[1]*26"""

    moe_upcycling_granularity: int = arg(1)
    """divide each copy of an MLP into so many experts, each a part of its width"""

    ckpt_step: int | None = step_option()

    def run(self) -> Answer:
        """Do it."""
        from .upcycle import upcycle

        return upcycle(
            self.source,
            self.target,
            step=self.ckpt_step,
            parts=self.moe_upcycling_granularity,
            num_experts=self.num_experts,
            moe_router_topk=self.moe_router_topk,
            moe_layer_freq=self.moe_layer_freq,
        )


@dataclass(frozen=True, kw_only=True)
class ExtendVocabulary:
    """extend-vocabulary."""

    source: Path = path_of("DIR", "run directory, or an iter_XXXXXXX in it")
    target: Path = path_of("TARGET", "run directory to create")
    tokenizer_model: Path = arg(parse=Path, metavar="FOLDER")
    """folder with the tokenizer.json of the model's tokenizer and the tokens added to it"""

    new_rows: Literal["pieces", "mean", "drawn"] = arg("pieces")
    """what embedding and output layer begin with for a new token: pieces: the mean of the old
    tokens that spell it; mean: that of all old tokens; drawn: at random with mean and covariance of
    the old tokens"""

    ckpt_step: int | None = step_option()

    def run(self) -> Answer:
        """Do it."""
        from .vocabulary import extend_vocabulary

        return extend_vocabulary(
            self.source, self.target, self.tokenizer_model, way=self.new_rows, step=self.ckpt_step
        )


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """inspect."""

    path: Path | str = path_of(
        "PATH", "run directory, iter_XXXXXXX, or Hugging Face folder or its s3:// URL", path_or_url
    )
    ckpt_step: int | None = step_option()
    tensors: bool = arg(False)
    """list every tensor"""

    def run(self) -> Answer:
        """Do it."""
        from .hf_files import opened_folder
        from .inspect_checkpoint import inspect

        with opened_folder(self.path) as path:
            return inspect(path, self.ckpt_step, self.tensors)


@dataclass(frozen=True, kw_only=True)
class Diff:
    """diff."""

    a: Path | str = path_of(
        "A", "run directory, iter_XXXXXXX, or Hugging Face folder or its s3:// URL", path_or_url
    )
    b: Path | str = path_of("B", "what to compare it with", path_or_url)
    ckpt_step: int | None = step_option()
    weights_only: bool = arg(False)
    """compare the model's weights, not the optimizer state"""

    def run(self) -> Answer:
        """Do it."""
        from .hf_files import opened_folder
        from .inspect_checkpoint import diff

        with opened_folder(self.a) as a, opened_folder(self.b) as b:
            return diff(a, b, self.ckpt_step, self.weights_only)


@dataclass(frozen=True, kw_only=True)
class Verify:
    """verify."""

    checkpoint: Path = path_of("DIR", "run directory, or an iter_XXXXXXX in it")
    hf_folder: Path | str = path_of(
        "HF_FOLDER", "Hugging Face folder that transformers can load, or its s3:// URL", path_or_url
    )
    ckpt_step: int | None = step_option()
    tolerance: float = arg(1e-4)
    """largest difference allowed, relative to the largest value"""

    length: int = arg(64)
    """tokens of each of two random samples"""

    def run(self) -> Answer:
        """Do it."""
        from .hf_files import opened_folder
        from .verification import verify

        with opened_folder(self.hf_folder) as folder:
            return verify(self.checkpoint, folder, self.ckpt_step, self.tolerance, self.length)


COMMANDS = {
    "hf-import": Command(
        "make a run directory of a Hugging Face folder",
        HFImport,
        finish,
        _import_problems,
    ),
    "hf-export": Command(
        "write a Hugging Face folder of a checkpoint of any layout", HFExport, finish
    ),
    "gguf-import": Command(
        "make a run directory of a GGUF file (llama.cpp, Ollama), dequantized",
        GGUFImport,
        finish,
        _gguf_problems,
    ),
    "gguf-export": Command(
        "write a GGUF file of a checkpoint of any layout",
        GGUFExport,
        finish,
        lambda options: _needs("gguf"),
    ),
    "megatron-import": Command(
        "make a run directory of a Megatron-LM checkpoint (mp_rank_XX or torch_dist, any TP x PP)",
        MegatronImport,
        finish,
    ),
    "deepspeed-import": Command(
        "make a run directory of a Megatron-DeepSpeed checkpoint, with the optimizer of ZeRO 1, 2",
        DeepSpeedImport,
        finish,
    ),
    "megatron-export": Command(
        "write a Megatron-LM checkpoint (mp_rank_XX or torch_dist)", MegatronExport, finish
    ),
    "extend-vocabulary": Command(
        "make a run directory with the tokens that a tokenizer adds to the model's own",
        ExtendVocabulary,
        finish,
    ),
    "upcycle": Command(
        "make a mixture of experts of a dense checkpoint: each expert is a copy of the MLP or a "
        "part of one",
        Upcycle,
        finish,
    ),
    "inspect": Command("print what a checkpoint or a Hugging Face folder holds", Inspect, finish),
    "diff": Command(
        "compare two of them tensor by tensor; exit code 1 if they differ", Diff, finish
    ),
    "verify": Command(
        "compare what a checkpoint and a Hugging Face model compute, block by block (needs "
        "transformers); exit code 1 if they differ",
        Verify,
        finish,
    ),
}


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 it could not be done (diff, verify: they differ), 2 a wrong command
    line, 130 Ctrl-C."""
    threads.set_waiting()
    # glibc returns each block of 1 MB or more when it is freed; else tensors of the past stay
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 1 << 20)
    commands = dict(COMMANDS)
    for formats in of_features():
        commands |= formats.commands()
    return run_command(commands, argv, prog="convert_checkpoint.py", description=__doc__ or "")
