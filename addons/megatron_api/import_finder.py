"""Names of Megatron-LM's modules for scripts that were written for it: an import finder, which is
asked before Python looks into folders.

It answers in a process whose main file imports `pretrain` from megatron.training, and this suite's
comes first on Python's path. For any other program `megatron.core` is PyPI's, where it is
installed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import time
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from megatron.small_files import read_text

MAX_BYTES = 1 << 20  # of a script
FOLDER = Path(sys.modules["megatron.addons"].__file__ or "").parents[1]  # megatron/
# The modules of Megatron-LM from 2021 to 2026 that scripts import from. Each has all names that
# `megatron.training` has, where they come from in any release.
MODULES = frozenset(
    """
    megatron megatron.arguments megatron.checkpointing megatron.data megatron.data.gpt_dataset
    megatron.enums megatron.global_vars megatron.initialize megatron.legacy megatron.legacy.data
    megatron.legacy.model megatron.legacy.model.gpt_model megatron.model megatron.model.gpt_model
    megatron.mpu megatron.utils megatron.core
    megatron.core.context_parallel_layout megatron.core.datasets
    megatron.core.datasets.data_schedule
    megatron.core.datasets.blended_megatron_dataset_builder
    megatron.core.datasets.blended_megatron_dataset_config megatron.core.datasets.gpt_dataset
    megatron.core.datasets.utils megatron.core.enums megatron.core.models megatron.core.models.gpt
    megatron.core.models.gpt.experimental_attention_variant_module_specs
    megatron.core.models.gpt.gpt_layer_specs megatron.core.models.gpt.gpt_model
    megatron.core.models.gpt.heterogeneous
    megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs megatron.core.models.hybrid
    megatron.core.models.hybrid.hybrid_model megatron.core.models.mamba
    megatron.core.models.mamba.mamba_model megatron.core.mpu
    megatron.core.num_microbatches_calculator megatron.core.package_info
    megatron.core.packed_seq_params megatron.core.parallel_state megatron.core.rerun_state_machine
    megatron.core.tensor_parallel megatron.core.tensor_parallel.data megatron.core.tokenizers
    megatron.core.tokenizers.text megatron.core.tokenizers.text.utils
    megatron.core.tokenizers.text.utils.build_tokenizer megatron.core.tokenizers.utils
    megatron.core.tokenizers.utils.build_tokenizer megatron.core.transformer
    megatron.core.transformer.experimental_attention_variant
    megatron.core.transformer.experimental_attention_variant.cp_balanced_indexer
    megatron.core.transformer.multi_token_prediction megatron.core.transformer.spec_utils
    megatron.core.transformer.transformer_config megatron.core.utils megatron.training
    megatron.training.argument_utils megatron.training.arguments megatron.training.checkpointing
    megatron.training.datasets megatron.training.datasets.fim_dataset
    megatron.training.datasets.sft_dataset megatron.training.datasets.varlen_dataset
    megatron.training.global_vars
    megatron.training.initialize megatron.training.training megatron.training.utils
    megatron.training.yaml_arguments
    """.split()
)
# Files of NVIDIA's examples beside its script: the names here where they are not beside it.
NEIGHBOURS = frozenset(("gpt_builders", "model_provider"))


class _Alias(ModuleType):
    """A module of Megatron-LM: its names are those of `megatron.training`."""

    def __getattr__(self, name: str) -> Any:
        return attribute(self.__name__, name)


def attribute(module: str, name: str) -> Any:
    """What a module of Megatron-LM has of this name. Raises AttributeError, or ImportError for a
    script that imports what is not here."""
    if f"{module}.{name}" in MODULES and not name.startswith("_"):
        try:
            return importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            pass
    if name == "__version__":
        return importlib.import_module(f"{__package__}.script_names").__version__
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megatron.training"), name)


class _Loader(Loader):
    """Makes an alias; of a file of the suite with such a name, that file with more names."""

    def __init__(self, own: ModuleSpec | None):
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if self._own and self._own.loader and self._own.origin:
            self._own.loader.exec_module(module)


class Finder:
    """See above; for `sys.meta_path`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an alias; None for what Python finds by itself."""
        top = name.partition(".")[0]
        if not (top == "megatron" or top in NEIGHBOURS) or name == "megatron.training":
            return None
        if top in NEIGHBOURS:
            if PathFinder.find_spec(name) or not is_of_a_script():
                return None
            return ModuleSpec(name, _Loader(None))
        if name not in MODULES or not is_of_a_script():
            return None
        _, *folders, _ = name.split(".")
        own = None  # where both projects are in one folder, megatron/core is there
        if not name.startswith("megatron.core"):
            own = PathFinder.find_spec(name, [str(FOLDER.joinpath(*folders))])
        spec = ModuleSpec(name, _Loader(own), is_package=not own)
        if own:
            spec.origin, spec.has_location = own.origin, own.has_location
            if own.submodule_search_locations is not None:
                spec.submodule_search_locations = list(own.submodule_search_locations)
        return spec


class Missing:
    """What no other finder knows, of a file that is a script: for the end of `sys.meta_path`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Raise ImportError with all that the script imports and is not here."""
        file = importing_frame().f_code.co_filename
        if file.startswith("<") or not (name.startswith("megatron.") or "." not in name):
            return
        main = getattr(sys.modules.get("__main__"), "__file__", None) or file
        if is_of_a_script() and Path(file).parent == Path(main).parent:
            importlib.import_module(f"{__package__}.script_imports").refuse(name)


def is_of_a_script() -> bool:
    """Whether the main file, or the one that imports just now, is a script of the suite."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    files = (main, importing_frame().f_code.co_filename)
    return any(_is_script(file) for file in files if file) and _is_ours()


def importing_frame() -> FrameType:
    """That of the import statement that is executed."""
    frame = sys._getframe(1)
    while frame.f_back and (
        frame.f_code.co_filename.startswith("<frozen importlib._bootstrap")
        or frame.f_globals.get("__name__") == "megatron.training"
        or frame.f_globals.get("__package__") == __package__
    ):
        frame = frame.f_back
    return frame


@functools.cache
def _is_script(file: str) -> bool:
    """Whether a Python file imports `pretrain` from megatron.training."""
    try:
        text = read_text(Path(file), limit=MAX_BYTES)
        tree = ast.parse(text) if "pretrain" in text and "megatron" in text else ast.parse("")
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return any(
        (node.module or "").startswith("megatron.training")
        and any(alias.name == "pretrain" for alias in node.names)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
    )


def _is_ours() -> bool:
    """Whether megatron.training is this suite's."""
    spec = importlib.util.find_spec("megatron.training")
    return bool(spec and spec.origin and Path(spec.origin).parents[1] == FOLDER)


class NotHere(ImportError):
    """A script cannot start."""


def end(text: str) -> NoReturn:
    """Raise `NotHere`, of which the text alone is printed, once for all ranks."""
    sys.excepthook = _say_briefly
    raise NotHere(text)


def _say_briefly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not isinstance(error, NotHere):
        sys.__excepthook__(kind, error, trace)
        return
    from megatron import launcher, log

    if launcher.rank() == 0:
        log.last_words(f"error: {error}\n")
    else:
        time.sleep(log.PEERS_WAIT)  # in which a launcher ends this process


def install() -> None:
    """Ask `Finder` first from now on, and give `megatron` itself the names of Megatron-LM."""
    if Finder in sys.meta_path:
        return
    sys.meta_path.insert(0, Finder)
    sys.meta_path.append(Missing)

    def of_package(name: str) -> Any:
        is_ours = any((FOLDER / f"{name}{end}").exists() for end in ("", ".py"))
        if not (is_ours or name.startswith("__")) and is_of_a_script():
            return attribute("megatron", name)
        raise AttributeError(f"module 'megatron' has no attribute {name!r}")

    vars(sys.modules["megatron"])["__getattr__"] = of_package
    other = getattr(sys.modules.get("megatron.core"), "__file__", None)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if other and main and Path(other) != FOLDER / "core.py" and _is_script(main):
        end(
            f"{main} has imported {other}, which comes before this suite on Python's path; put the "
            f"suite first: PYTHONPATH={FOLDER.parent} [other-megatron]"
        )


install()
