"""The walls of the house as functions from a tree's root to its violations, by an ast walk; imports
no product code."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import is_peer

FLOOR = {
    "interrupt": 0,
    "args_file": 1,
    "problems": 0,
    "small_files": 0,
    "launcher": 0,
    "version": 0,
    "arguments": 2,
    "command_help": 0,
    "log": 1,
    "device": 1,
    "checksums": 1,
    "console": 1,
    "threads": 1,
    "config": 3,
    "timers": 3,
    "kernels": 4,
    "parallel": 5,
    "data": 5,
    "checkpoint": 6,
    "model": 7,
    "optimizer": 7,
    "training": 8,
    "inference": 9,
    "analysis": 10,
}
# Each optional library has one file or folder (relative to megatron/) that may import it.
OPTIONAL = {
    "transformer_engine": "kernels/transformer_engine.py",
    "apex": "kernels/cuda/apex.py",
    "fused_weight_gradient_mlp_cuda": "kernels/cuda/apex.py",
    "flash_attn": "kernels/flash_attention.py",
    "triton": "kernels/cuda/",
    "regex": "data/tokenizers/gpt2_bpe.py",
    "gigatoken": "data/tokenizers/gigatoken.py",
    "orjson": "data/preprocess/jsonl.py",
    "zstandard": "data/preprocess/unpack.py",
    "pyarrow": "data/preprocess/unpack.py",
    "punkt": "data/preprocess/sentences.py",
    "lm_eval": "analysis/lm_eval_model.py",
    "jinja2": "data/chat/templates.py",
    "tiktoken": "data/tokenizers/bpe.py",
    "tokenizers": "data/tokenizers/bpe.py",
    "transformers": "data/tokenizers/bpe.py",
    "sentencepiece": "data/tokenizers/sentencepiece.py",
    "tensorboard": "training/logging/tensorboard.py",
    "fsspec": "checkpoint/object_store.py",
    "wandb": "training/logging/wandb.py",
    "matplotlib": "analysis/plots.py",
}
DISTRIBUTED = ("parallel/", "checkpoint/", "training/launch/", "device.py")
TORCH_FREE = {
    "interrupt.py": (),
    "launcher.py": (),
    "arguments.py": (),
    "command_help.py": (),
    "log.py": (),
    "threads.py": (),
    "config/": (),
    "data/": ("data/cyclic_sampler.py",),
}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# The one place that reads pickles: a process of its own, with an allow-list, for other suites'
# checkpoints.
UNPICKLER = "tools/convert/unpickle_worker.py"
# They read whole what the kernel, or they themselves, have written, or what is a part of the suite.
READ_WHOLE = {
    "megatron/threads.py",
    "megatron/console.py",
    "megatron/training/launch/hang.py",
    "megatron/training/launch/network.py",
    "tools/convert/families.py",
    "tools/shared/memory.py",
    "tools/shared/ranks.py",
}
# State on purpose: what this process has said once already.
STATE = {("log.py", "_SAID")}
MUTATORS = {
    "append",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "clear",
    "extend",
    "insert",
    "remove",
    "discard",
}
LAUNCHER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|(SLURM|OMPI|PMIX?|PALS|TORCHELASTIC)_\w+"
)
LEFTOVER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


@dataclass(frozen=True)
class Module:
    """One parsed file: `path` in the tree, `inside` below megatron/ or empty, `home` the name its
    floor goes by."""

    path: str
    inside: str
    home: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The dotted name it is imported by."""
        return self.path.removesuffix(".py").replace("/", ".")


@functools.cache
def _parsed(text: str, path: str) -> ast.Module:
    """The tree of a file, which every wall reads and none changes."""
    return ast.parse(text, filename=path)


def read(root: Path, *places: str) -> Iterator[Module]:
    """Every Python file under the given folders (or the file itself), parsed; megatron/core is not
    ours."""
    for place in places:
        start = root / place
        for file in sorted(start.rglob("*.py")) if start.is_dir() else [start] * start.is_file():
            path = file.relative_to(root).as_posix()
            if path.startswith("megatron/core/"):
                continue
            text = file.read_text(encoding="utf-8")
            inside = path.removeprefix("megatron/") if path.startswith("megatron/") else ""
            home = inside.partition("/")[0].removesuffix(".py")
            yield Module(path, inside, home, text, _parsed(text, path))


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """(node, dotted name) of every import; `from a import b` is a.b, and relative ones keep their
    dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in (
            "import_module",
            "__import__",
        ):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node, str(node.args[0].value)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain on a name, or an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def say(module: Module, node: ast.AST | None, text: str) -> str:
    """One violation in the form path:line: text."""
    return f"{module.path}:{getattr(node, 'lineno', 1)}: {text}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    """Every function of a tree, nested ones too."""
    yield from (
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    )


def floors(root: Path) -> Iterator[str]:
    """Imports of megatron modules go down; the same floor is not down."""
    for module in read(root, "megatron"):
        if module.home not in FLOOR:
            yield say(module, None, f"{module.home} stands on no floor")
            continue
        for node, name in imports(module.tree):
            if name.startswith("."):
                yield say(module, node, "relative import; write the full name")
            parts = name.split(".")
            if parts[0] != "megatron" or len(parts) < 2 or parts[1] == module.home:
                continue
            there = FLOOR.get(parts[1])
            if there is None:
                yield say(module, node, f"imports {name}, which stands on no floor")
            elif there >= FLOOR[module.home]:
                yield say(
                    module,
                    node,
                    f"imports {name}: floor {there} is not below floor {FLOOR[module.home]}",
                )


def cycles(root: Path) -> Iterator[str]:
    """No module reaches itself by imports, late ones counted."""
    modules = {module.name: module for module in read(root, "megatron")}
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        wanted = {
            target
            for _, imported in imports(module.tree)
            for target in (imported, imported.rpartition(".")[0])
        }
        graph[name] = {target for target in wanted if target in modules and target != name}
    for start in graph:
        seen = set()
        stack = list(graph[start])
        while stack:
            current = stack.pop()
            if current == start:
                yield say(modules[start], None, "is in an import cycle")
                break
            if current not in seen:
                seen.add(current)
                stack.extend(graph[current])


def cuda_in_one_file(root: Path) -> Iterator[str]:
    """Only device.py says torch.cuda, torch.backends.cuda / cudnn, or calls .cuda()."""
    words = ("torch.cuda", "torch.backends.cuda", "torch.backends.cudnn")
    for module in read(root, "megatron", "tools", "pretrain_gpt.py"):
        if module.inside == "device.py":
            continue
        for node, name in imports(module.tree):
            if any(name == word or name.startswith(word + ".") for word in words):
                yield say(module, node, f"imports {name}; only megatron/device.py may")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and dotted(node) in words:
                yield say(module, node, f"uses {dotted(node)}; only megatron/device.py may")
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "cuda"
            ):
                yield say(
                    module, node, "calls .cuda(); move tensors to a device that device.py named"
                )


def distributed_where_allowed(root: Path) -> Iterator[str]:
    """torch.distributed only in parallel/, checkpoint/, training/launch/, device.py, and where
    another suite runs or (the classes of its checkpoints' metadata) another's files are written."""
    for module in read(root, "megatron", "tools", "pretrain_gpt.py"):
        if module.path == UNPICKLER:
            continue
        if module.inside.startswith(DISTRIBUTED) or module.name == "tools.benchmarks.step.peer":
            continue
        named = [(node, name) for node, name in imports(module.tree)]
        named += [
            (node, dotted(node))
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute)
        ]
        for node, name in named:
            if (
                name == "torch.distributed"
                or name.startswith("torch.distributed.")
                and isinstance(node, ast.stmt)
            ):
                yield say(module, node, "uses torch.distributed outside the places that may")


def launcher_in_one_file(root: Path) -> Iterator[str]:
    """launcher.py is the only file of megatron/ that names a launcher's variable."""
    for module in read(root, "megatron", "pretrain_gpt.py"):
        for node in ast.walk(module.tree) if module.inside != "launcher.py" else ():
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and LAUNCHER.fullmatch(node.value)
            ):
                yield say(module, node, f"names {node.value}; only megatron/launcher.py may")


def libraries_in_one_file(root: Path) -> Iterator[str]:
    """megatron/ imports the standard library, torch, numpy, itself, and each optional library in
    its one file or folder."""
    for module in read(root, "megatron"):
        for node, name in imports(module.tree):
            library = (
                "tensorboard" if name.startswith("torch.utils.tensorboard") else name.split(".")[0]
            )
            if library in sys.stdlib_module_names or library in (
                "torch",
                "numpy",
                "megatron",
                "",
                "__future__",
            ):
                continue
            if library not in OPTIONAL:
                yield say(
                    module, node, f"imports {library}, which has no file of its own in OPTIONAL"
                )
            elif not module.inside.startswith(OPTIONAL[library]):
                yield say(module, node, f"imports {library}; only megatron/{OPTIONAL[library]} may")


def torch_free(root: Path) -> Iterator[str]:
    """No torch in TORCH_FREE (but in the named exceptions); no numpy either, except in data/."""
    for module in read(root, "megatron"):
        place = next((place for place in TORCH_FREE if module.inside.startswith(place)), None)
        if place is None or module.inside in TORCH_FREE[place]:
            continue
        banned = {"torch"} if place == "data/" else {"torch", "numpy"}
        for node, name in imports(module.tree):
            if name.split(".")[0] in banned:
                yield say(module, node, f"imports {name}; {place} does without")


def _module_level_names(tree: ast.Module) -> set[str]:
    """Names that statements at the top of a module assign."""
    targets = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets.append(node.target)
    return {
        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
    }


def _stores(node: ast.AST) -> Iterator[ast.AST]:
    """The places one statement or call writes to: assignment targets, deletions, and the owner of a
    mutating method."""
    if isinstance(node, ast.Assign | ast.Delete):
        yield from node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MUTATORS
    ):
        yield ast.Subscript(value=node.func.value, slice=ast.Constant(0))


def no_global_state(root: Path) -> Iterator[str]:
    """No module global is assigned or changed after import, from inside its module or through
    another one."""
    names = {module.name for module in read(root, "megatron")}
    for module in read(root, "megatron"):
        imported = {
            alias.asname or alias.name
            for node in module.tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{node.module}.{alias.name}" in names
        }
        own = _module_level_names(module.tree)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Global):
                yield say(module, node, f"global {', '.join(node.names)}")
            for target in _stores(node):
                if (
                    isinstance(target, ast.Attribute)
                    and dotted(target).rpartition(".")[0] in imported | names
                ):
                    yield say(module, node, f"assigns {dotted(target)} from outside its module")
        for function in functions(module.tree):
            names_inside = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            local = {name.id for name in names_inside if isinstance(name.ctx, ast.Store)}
            local |= {
                argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)
            }
            for node in ast.walk(function):
                for target in _stores(node):
                    name = dotted(target.value) if isinstance(target, ast.Subscript) else ""
                    if name in own - local and (module.inside, name) not in STATE:
                        yield say(module, node, f"changes the module global {name}")


def docstring_first(root: Path) -> Iterator[str]:
    """Every module opens with a sentence: what it is for and what it must not know."""
    for module in read(
        root, "megatron", "tools", "tests", "examples", "pretrain_gpt.py", "setup.py"
    ):
        if not ast.get_docstring(module.tree):
            yield say(module, None, "does not open with a docstring")


def no_code_from_data(root: Path) -> Iterator[str]:
    """No pickle, torch.load or torch.save, weights_only=False, allow_pickle=True, eval or exec in
    what we ship. One file, which runs in a process of its own, may import pickle, and save."""
    for module in read(root, "megatron", "tools", "pretrain_gpt.py"):
        worker = module.path == UNPICKLER
        for node, name in imports(module.tree):
            if worker and name == "pickle":
                continue
            if name.split(".")[0] in PICKLES or name in ("torch.load", "torch.save"):
                yield say(module, node, f"imports {name}; nothing we load may run code")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            if worker and dotted(node.func) == "torch.save":
                continue
            if worker and dotted(node.func) in ("pickle.load", "pickle.loads", "pickle.Unpickler"):
                yield say(
                    module,
                    node,
                    f"calls {dotted(node.func)}; only the Unpickler that knows its names may load",
                )
            if dotted(node.func) in ("torch.load", "torch.save", "eval", "exec"):
                yield say(module, node, f"calls {dotted(node.func)}; nothing we load may run code")
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if (keyword.arg, value) in (("weights_only", False), ("allow_pickle", True)):
                    yield say(module, node, f"{keyword.arg}={value}; nothing we load may run code")


def files_read_whole_by_one_door(root: Path) -> Iterator[str]:
    """A file that is read whole has a limit on its size, which megatron/small_files.py knows."""
    for module in read(root, "megatron", "tools"):
        if module.path in READ_WHOLE or module.path.startswith("tools/benchmarks/"):
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            whole = (
                node.func.attr in ("read_text", "read_bytes") or dotted(node.func) == "json.load"
            )
            source = ast.unparse(node.func.value)
            kernels = re.search(r"/(proc|sys)/", source)
            if whole and not kernels and source not in ("small_files", "log_reader"):
                yield say(module, node, f"{source}: read it by megatron.small_files")


def namespace_package(root: Path) -> Iterator[str]:
    """No __init__.py anywhere in megatron/: the name is shared with PyPI's megatron-core."""
    for file in sorted((root / "megatron").rglob("__init__.py")):
        if "core" not in file.relative_to(root / "megatron").parts:
            yield f"{file.relative_to(root).as_posix()}:1: __init__.py in a namespace package"


def names_and_leftovers(root: Path) -> Iterator[str]:
    """No utils.py and its like, and no note to self that nobody reads again."""
    for module in read(root, "megatron", "tools", "pretrain_gpt.py"):
        if module.path.rpartition("/")[2] in VAGUE_NAMES:
            yield say(module, None, "a file is named after what it holds")
        for number, line in enumerate(module.text.splitlines(), 1):
            if found := LEFTOVER.search(line):
                yield f"{module.path}:{number}: {found[0]}"


def _is_test_module(name: str) -> bool:
    """Whether this dotted name is that of a test module, or of something in one."""
    return any(part.startswith("test_") for part in name.split("."))


def tests_share_by_modules(root: Path) -> Iterator[str]:
    """Nothing imports a test module: what tests share has a module of its own, named after what it
    holds."""
    for module in read(root, "tests"):
        for node, name in imports(module.tree):
            if name.partition(".")[0] in ("tests", "") and _is_test_module(name):
                yield say(
                    module,
                    node,
                    f"imports {name}; move what both need into a module that holds no tests",
                )


def _skips_for_a_peer(node: ast.AST) -> bool:
    """Is this pytest.importorskip of a package that only comparisons need?"""
    return (
        isinstance(node, ast.Call)
        and dotted(node.func) == "pytest.importorskip"
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        and is_peer(str(node.args[0].value))
    )


def _marked(nodes: list[ast.expr]) -> bool:
    """Is pytest.mark.peers among these decorators or values?"""
    return any(dotted(part) == "pytest.mark.peers" for node in nodes for part in ast.walk(node))


def _pytestmark(body: list[ast.stmt]) -> list[ast.expr]:
    """The values of `pytestmark` in a module or class."""
    return [
        node.value
        for node in body
        if isinstance(node, ast.Assign)
        and any(
            isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
        )
    ]


def _unmarked(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that need a peer and do not carry its mark; of a class those of its body."""
    if _marked(_pytestmark(body)):
        return
    for node in body:
        if isinstance(node, ast.ClassDef) and not _marked(node.decorator_list):
            yield from _unmarked(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("test") and not _marked(node.decorator_list):
                yield from [node] * any(map(_skips_for_a_peer, ast.walk(node)))
        elif not isinstance(node, ast.ClassDef):
            yield from [node] * any(map(_skips_for_a_peer, ast.walk(node)))


def peers_where_marked(root: Path) -> Iterator[str]:
    """A test that needs a package of requirements/peers.txt carries the mark `peers` and skips
    where it is missing; so no module of tests/ imports such a package when it is imported itself,
    unless its first word is pytest.importorskip."""
    for module in read(root, "tests"):
        late = {id(node) for function in functions(module.tree) for node in ast.walk(function)}
        skips = [
            node.lineno for node in module.tree.body if any(map(_skips_for_a_peer, ast.walk(node)))
        ]
        for node, name in imports(module.tree):
            if is_peer(name) and id(node) not in late and not (skips and skips[0] < node.lineno):
                yield say(module, node, f"imports {name}; use pytest.importorskip in the test")
        for node in _unmarked(module.tree.body):
            yield say(module, node, "skips for a missing package without the mark peers")


WALLS: dict[str, Callable[[Path], Iterator[str]]] = {
    wall.__name__: wall
    for wall in (
        floors,
        cycles,
        cuda_in_one_file,
        distributed_where_allowed,
        launcher_in_one_file,
        libraries_in_one_file,
        torch_free,
        no_global_state,
        docstring_first,
        no_code_from_data,
        files_read_whole_by_one_door,
        namespace_package,
        names_and_leftovers,
        tests_share_by_modules,
        peers_where_marked,
    )
}
