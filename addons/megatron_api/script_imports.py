"""Names that scripts import and that are not here, with what to use instead: one error for all of a
script's."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron import training
from megatron.small_files import read_text

from .aliases import end
from .import_finder import FOLDER, MAX_BYTES, Finder, Missing, importing_frame
from .module_names import MODULES, NEIGHBOURS

# What cannot be here, and what to use. A name of UNUSABLE can be imported, since scripts name it
# for runs that our flags refuse; using it is an error.
_ONLY_GPT = "none: only a GPT is trained"
_LAYERS = "None: the layers of the flags; others in model_provider"
_DOCUMENTS = "--packed-samples or --reset-attention-mask: attention inside documents"
_CHATS = "--packed-samples, or tools/preprocess_data.py --chat"
_LOOP = "pretrain, which has the loop"
ABSENT = {
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
}
UNUSABLE = {
    "GPTFIMDataset": "a datasets provider of your own",
    "GPTFIMDatasetConfig": "a datasets provider of your own",
    "MockSFTDataset": _CHATS,
    "MockVarlenDataset": _DOCUMENTS,
    "SFTDataset": _CHATS,
    "VarlenDataset": _DOCUMENTS,
    "GPTModelPipe": "GPTModel",
    "HybridModel": _ONLY_GPT,
    "MambaModel": _ONLY_GPT,
    "PackedSeqParams": _DOCUMENTS,
    "get_batch_on_this_hybrid_cp_rank": _DOCUMENTS,
    "get_batch_on_this_rank_for_sequence_packing": _DOCUMENTS,
    "get_thd_batch_on_this_cp_rank": _DOCUMENTS,
    "get_thd_padding_kwargs": _DOCUMENTS,
    "pad_sequence_for_thd": _DOCUMENTS,
    "prebuild_balanced_layouts": _DOCUMENTS,
    "core_transformer_config_from_yaml": "flags, or @FILE with flags",
    "get_gpt_heterogeneous_layer_spec": _LAYERS,
    "get_gpt_layer_with_inference_spec": _LAYERS,
    "get_hybrid_data_context_parallel_groups": "--context-parallel-size",
    "import_module": _LAYERS,
    "update_seqlen_stats_from_cu_seqlens": "nothing: log lines count the work that was done",
}
_OWN_PACKAGE = "a package of the script's own: install it"
_UNKNOWN = "not in this suite: addons/megatron_api/megatron_api.md"


def unusable(name: str) -> Callable[..., NoReturn]:
    """What stands for one of `UNUSABLE`: calling it raises ValueError."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ValueError(f"{name}: cannot be used here; use {UNUSABLE[name]} [no-such-argument]")

    refuse.__name__ = name
    return refuse


class Import(NamedTuple):
    """A name (or, where it is empty, a module) that a file imports at `line`. `remedy`: what to use
    instead; empty where it is here. `certain`: whenever the file is loaded; `tried`: the file says
    what happens where it is not there."""

    module: str
    name: str
    line: int
    remedy: str
    certain: bool
    tried: bool

    def __str__(self) -> str:
        top = self.module.partition(".")[0]
        return self.name or (self.module if _is_megatron_s(top) else top)


def _is_megatron_s(module: str) -> bool:
    top = module.partition(".")[0]
    return top == "megatron" or top in NEIGHBOURS


def imports_of(text: str, path: Path) -> list[Import]:
    """What the Python text of the file `path` imports, in order. Raises SyntaxError."""
    imports = []
    for node, certain, tried in _statements(ast.parse(text), True, False):
        names = [(alias.name, "") for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            if node.level:  # of a package of the user's
                continue
            module = node.module or ""
            names = [(module, alias.name) for alias in node.names]
            if not _is_megatron_s(module):
                names = [(module, "")]
        imports += [
            Import(module, name, node.lineno, _remedy(module, name, path.parent), certain, tried)
            for module, name in names
        ]
    return imports


def _statements(
    node: ast.AST, certain: bool, tried: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Import statements, each with: is it executed whenever the file is loaded, is it in a try."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node, certain and not tried, tried
    is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.If)) and not is_main:
        certain = False
    for field, value in ast.iter_fields(node):
        in_try = isinstance(node, ast.Try) and bool(node.handlers) and field == "body"
        if isinstance(node, ast.Try) and field in ("handlers", "orelse"):
            certain = False
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _statements(child, certain, tried or in_try)


def _remedy(module: str, name: str, beside: Path) -> str:
    """Empty where a script in the folder `beside` can import it."""
    top = module.partition(".")[0]
    if (beside / f"{top}.py").exists() or (beside / top).is_dir():
        if top != "megatron":
            return ""
    if not _is_megatron_s(module):
        return "" if _is_installed(top) else _OWN_PACKAGE
    if _is_here(module, name):
        return ""
    return ABSENT.get(name, _UNKNOWN)


def _is_installed(package: str) -> bool:
    finders = (each for each in sys.meta_path if each not in (Finder, Missing))
    return any(each.find_spec(package, None) for each in finders)


def _is_here(module: str, name: str) -> bool:
    """Whether Megatron's module has the name here, or (no name) is here itself."""
    is_alias = module in MODULES or module in NEIGHBOURS
    own = FOLDER.joinpath(*module.split(".")[1:])
    if name in ("", "*"):
        return is_alias or own.is_dir() or own.with_suffix(".py").is_file()
    if f"{module}.{name}" in MODULES:
        return True
    if is_alias and (training.has(name) or name == "__version__"):
        return True
    if module.startswith("megatron.core"):
        return False
    files = [own.with_suffix(".py"), own / "__init__.py"]
    defined = re.compile(rf"^(def|class) {name}\b|^{name}\b.*=", re.M)
    return (
        any(file.is_file() and defined.search(read_text(file)) for file in files)
        or (own / name).is_dir()
        or (own / f"{name}.py").is_file()
    )


def rows(imports: Sequence[Import]) -> list[str]:
    """Names, each with what to use instead."""
    width = max((len(str(each)) for each in imports), default=0)
    return [f"{each!s:{width}}  {each.remedy}" for each in imports]


def refuse(name: str) -> None:
    """End with all that is not here, if the file that imports just now imports the name
    (or module) `name`, and does not say what else to do."""
    frame = importing_frame()
    path = Path(frame.f_code.co_filename)
    try:
        imports = imports_of(read_text(path, limit=MAX_BYTES), path)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    last = name.rpartition(".")[2]
    asked = [
        each
        for each in imports
        if each.remedy
        and (each.name in (name, last) or f"{each.module}.".startswith(f"{name}."))
        and not each.tried
    ]
    if not asked:
        return
    lacking = dict.fromkeys(each for each in imports if each.remedy and each.certain)
    absent = {str(each): each for each in [*lacking, *asked]}.values()
    lines = [f"{path} imports what is not here; use instead what follows [names-not-here]"]
    end("\n  ".join([*lines, *rows(list(absent))]))
