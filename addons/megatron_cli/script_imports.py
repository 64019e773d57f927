"""Names that scripts import from Megatron and that are not here, with what to use instead: one
error for all of a script's, and the lines to write."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron.small_files import read_text

MAX_BYTES = 1 << 20  # of a script
_SUITE = "megatron.training"

# What cannot be here, and what to use. A name of UNUSABLE can be imported, since scripts name it
# for runs that our flags refuse; using it is an error.
_ONLY_GPT = "none: only a GPT is trained"
_LAYERS = "None: the layers of the flags; others in model_provider"
_LOOP = "pretrain, which has the loop"
ABSENT = {
    "build_train_valid_test_datasets": "the data of the flags, or a datasets provider",
    "build_train_valid_datasets": _ONLY_GPT,
    "load_checkpoint": "--load",
    "save_checkpoint": "--save",
    "evaluate_and_print_results": "--eval-iters",
    "train_step": _LOOP,
    "training_log": "what loss_func reports is in the log",
    "check_adlr_autoresume_termination": "--exit-signal-handler",
    "setup_model_and_optimizer": _LOOP,
    "get_forward_backward_func": _LOOP,
    "initialize_megatron": _LOOP,
    "get_model": _LOOP,
    "DistributedDataParallel": _LOOP,
    "parse_args": "parse_and_validate_args",
    "TransformerConfig": "core_transformer_config_from_args",
    "BertModel": _ONLY_GPT,
    "T5Model": _ONLY_GPT,
    "MambaModel": _ONLY_GPT,
    "HybridModel": _ONLY_GPT,
    "gpt_builder": "None as model_provider: the GPT of the flags",
    "model_provider": "None as model_provider: the GPT of the flags",
}
UNUSABLE = {
    "GPTFIMDataset": "a datasets provider of your own",
    "GPTFIMDatasetConfig": "a datasets provider of your own",
    "SFTDataset": "--packed-samples, or tools/preprocess_data.py --chat",
    "PackedSeqParams": "--packed-samples or --reset-attention-mask: attention inside documents",
    "core_transformer_config_from_yaml": "flags, or @FILE with flags",
    "get_gpt_decoder_layer_specs": _LAYERS,
    "get_gpt_heterogeneous_layer_spec": _LAYERS,
    "get_gpt_layer_with_inference_spec": _LAYERS,
    "get_gpt_mtp_block_spec": _LAYERS,
    "get_hybrid_data_context_parallel_groups": "--context-parallel-size",
    "get_transformer_block_with_experimental_attention_variant_spec": _LAYERS,
    "get_transformer_layer_with_experimental_attention_variant_spec": _LAYERS,
    "import_module": _LAYERS,
    "update_seqlen_stats_from_cu_seqlens": "nothing: log lines count the work that was done",
}
_UNKNOWN = "not in this suite: docs/own_scripts.md"


def unusable(name: str) -> Callable[..., NoReturn]:
    """What stands for one of `UNUSABLE`: calling it raises ValueError."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ValueError(f"{name}: cannot be used here; use {UNUSABLE[name]} [no-such-argument]")

    refuse.__name__ = name
    return refuse


class Import(NamedTuple):
    """A name that a script imports, and what to do: nothing, write another import line, or (not
    `available`) use something else."""

    module: str
    name: str
    available: bool
    advice: str


def imports_of(text: str, path: Path, has: Callable[[str], bool]) -> list[Import]:
    """What the Python text of the file `path` imports from Megatron when it is loaded, outside of
    `try:`, in order; `has` says what megatron.training has. Raises SyntaxError."""
    imports = []
    for node in _unconditional(ast.parse(text)):
        module = node.module or ""
        if node.level or not _is_megatron_s(module, path):
            continue
        for alias in node.names:
            imports.append(_judged(module, alias.name, has))
    return list(dict.fromkeys(imports))


def _unconditional(node: ast.AST) -> Iterator[ast.ImportFrom]:
    if isinstance(node, ast.ImportFrom):
        yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    if isinstance(node, ast.Try) and node.handlers:
        return
    for child in ast.iter_child_nodes(node):
        yield from _unconditional(child)


def _is_megatron_s(module: str, path: Path) -> bool:
    """A module of Megatron, or one of the two files beside its script that are not beside this."""
    if module in ("gpt_builders", "model_provider"):
        return not (path.parent / f"{module}.py").exists()
    return module.partition(".")[0] == "megatron"


def _judged(module: str, name: str, has: Callable[[str], bool]) -> Import:
    if has(name):
        advice = "" if module == _SUITE else f"from {_SUITE} import {name}"
        return Import(module, name, True, advice)
    is_core = module.startswith("megatron.core")
    if module != _SUITE and (is_core or name not in ABSENT) and _is_installed(module):
        return Import(module, name, True, "")
    return Import(module, name, False, ABSENT.get(name, _UNKNOWN))


def _is_installed(module: str) -> bool:
    """Is a module of that name installed? Of PyPI's megatron-core nothing is loaded."""
    packages = module.split(".")
    try:
        return importlib.util.find_spec(".".join(packages[:2])) is not None and (
            packages[1] == "core" or importlib.util.find_spec(module) is not None
        )
    except (ImportError, IndexError):
        return False


def rows(imports: Sequence[Import]) -> list[str]:
    """Names, each with its advice."""
    width = max((len(each.name) for each in imports), default=0)
    return [f"{each.name:{width}}  {each.advice}" for each in imports]


def refuse(name: str, has: Callable[[str], bool]) -> None:
    """Raise ImportError with all that is not here, if the file that asks for `name` imports it."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith("<frozen"):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    try:
        imports = imports_of(read_text(path, limit=MAX_BYTES), path, has)
    except (OSError, ValueError, SyntaxError):
        return
    absent = [each for each in imports if not each.available]
    if not any(each.name == name for each in absent):
        return
    lines = [
        f"{path} imports what {_SUITE} does not have; use instead what follows [names-not-here]"
    ]
    lines += rows(absent)
    if moved := [each for each in imports if each.available and each.advice]:
        lines += ["and write:", *rows(moved)]
    raise ImportError("\n  ".join(lines), name=_SUITE)
