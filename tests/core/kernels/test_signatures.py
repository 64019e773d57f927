"""What the stand-ins of libraries that need CUDA take (`fake_libraries.py`, over which
test_libraries.py makes every call of our adapters) is what these libraries take, by their own
sources, which are only read.

The sources are those of the releases pinned in requirements/constraints.txt, fetched by pip as it
is configured here; nothing is built or imported. NVIDIA's apex is on no index (PyPI's package of
that name is another project's): its calls cannot be checked so.
"""

import ast
import contextlib
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FAKES = {node.name: node for node in ast.parse(
    Path(__file__).with_name("fake_libraries.py").read_text(encoding="utf-8")
).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}  # fmt: skip
LAYERS = "transformer_engine/pytorch/__init__.py"
RECIPE = "transformer_engine/common/recipe/__init__.py"
USED = {
    **dict.fromkeys(("Linear", "RMSNorm", "LayerNorm", "DotProductAttention", "autocast"), LAYERS),
    **dict.fromkeys(("DelayedScaling", "Float8CurrentScaling"), RECIPE),
    **dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func"), "flash_attn/__init__.py"),
}
# names that our adapters set or read on what they make
ATTRIBUTES = {
    "Linear": {"weight", "bias"},
    "RMSNorm": {"weight"},
    "LayerNorm": {"weight", "bias"},
    "Format": {"E4M3", "HYBRID"},
}


@dataclass(frozen=True)
class Signature:
    """What a function takes: names that may be positional, in order, all names, those without a
    default."""

    positional: tuple[str, ...]
    names: frozenset[str]
    required: frozenset[str]


class Sources:
    """The Python files of some packages, by path; finds what a name stands for through
    re-exports."""

    def __init__(self, *roots: Path):
        self.roots = roots
        self.tree = lru_cache(maxsize=None)(self._tree)

    def _tree(self, path: str) -> ast.Module:
        for root in self.roots:
            if (root / path).is_file():
                return ast.parse((root / path).read_text(encoding="utf-8"))
        raise FileNotFoundError(path)

    def find(self, path: str, name: str) -> tuple[str, ast.AST]:
        """(file, definition) of `name` as the module in the file `path` has it. Raises
        LookupError."""
        for node in self.tree(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return path, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._file(path, node), alias.name)
                    if alias.name == "*":
                        with contextlib.suppress(LookupError):
                            return self.find(self._file(path, node), name)
        raise LookupError(f"{path} has no {name}")

    def _file(self, path: str, node: ast.ImportFrom) -> str:
        folder = Path(path).parents[node.level - 1].as_posix() + "/" if node.level else ""
        base = folder + (node.module or "").replace(".", "/")
        files = (f"{base}.py", f"{base}/__init__.py")
        for name in files:
            if any((root / name).is_file() for root in self.roots):
                return name
        raise LookupError(f"{path} imports from {base}, which is no file of the package")

    def signature(self, path: str, name: str, method: str) -> Signature:
        """Of a function, of making a class (its fields if it is a dataclass), or of a method of
        it."""
        path, node = self.find(path, name)
        own = signature_of(node, method)
        if own is None or (method == "__init__" and takes_more(node)):
            base = self.signature(path, ast.unparse(node.bases[0]), method)  # ** goes on to it
            own = own or base
            return Signature(own.positional, own.names | base.names, own.required)
        return own

    def words(self, path: str, name: str) -> set[str]:
        """Names, attributes and strings in a class and in those it is made from."""
        try:
            path, node = self.find(path, name)
        except LookupError:  # of another package
            return set()
        inside = {
            getattr(one, field)
            for one in ast.walk(node)
            for field in ("attr", "id", "value")
            if isinstance(getattr(one, field, None), str)
        }
        return inside.union(*(self.words(path, ast.unparse(base)) for base in node.bases))


def method_of(node: ast.AST, method: str) -> ast.FunctionDef | None:
    inside = (one for one in node.body if getattr(one, "name", "") == method)
    return node if isinstance(node, ast.FunctionDef) else next(inside, None)


def takes_more(node: ast.AST) -> bool:
    function = method_of(node, "__init__")
    return function is not None and function.args.kwarg is not None


def signature_of(node: ast.AST, method: str) -> Signature | None:
    """None where a class has not the method itself."""
    function = method_of(node, method)
    if function is not None:
        a = function.args
        names = [one.arg for one in (*a.posonlyargs, *a.args)][function is not node :]
        only = [one.arg for one in a.kwonlyargs]
        pairs = zip(only, a.kw_defaults, strict=True)
        required = [*names[: len(names) - len(a.defaults)], *(n for n, value in pairs if not value)]
        return Signature(tuple(names), frozenset((*names, *only)), frozenset(required))
    if method == "__init__" and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        names = [one.target.id for one in fields]
        required = frozenset(one.target.id for one in fields if one.value is None)
        return Signature(tuple(names), frozenset(names), required)
    return None


def pinned(package: str) -> str:
    """`package==version` of requirements/constraints.txt."""
    lines = (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def download(folder: Path, package: str, *words: str) -> None:
    """pip's own download, which keeps what it unpacks in `folder` (it fails on a source that needs
    CUDA to be described)."""
    folder.mkdir()
    command = [
        sys.executable,
        *"-m pip download -q --no-deps --no-clean".split(),
        "-d",
        str(folder),
    ]
    subprocess.run(
        [*command, *words, pinned(package)],
        capture_output=True,
        env=os.environ | {"TMPDIR": str(folder)},
        timeout=300,
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Sources:
    """The wheel of transformer-engine (all its Python), the sdist of transformer-engine-torch and
    of flash-attn."""
    home = tmp_path_factory.mktemp("sources")
    download(home / "te", "transformer-engine", "--only-binary", ":all:")
    for wheel in (home / "te").glob("transformer_engine-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            python = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(home / "te", python)
    roots = [home / "te"]
    for package, inside in (("transformer-engine-torch", "csrc"), ("flash-attn", "flash_attn")):
        download(home / package, package, "--no-binary", ":all:", "--no-build-isolation")
        roots += [path.parent for path in (home / package).glob(f"*/*/{inside}")][:1]
    if len(roots) < 3 or not (home / "te/transformer_engine").is_dir():
        # offline a laptop does without; CI never
        lacks = "could not import 'transformer_engine': its sources could not be fetched"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(lacks)
    return Sources(*roots)


@pytest.mark.campaign
def test_the_sources_are_of_the_pinned_releases(sources):
    names = ("transformer-engine", "transformer-engine-torch")
    [version] = {pinned(name).partition("==")[2] for name in names}
    text = (sources.roots[1] / "PKG-INFO").read_text(encoding="utf-8")
    assert re.search(rf"^Version: {re.escape(version)}$", text, re.M), text[:300]
    # The Python of Transformer Engine is in the wheel alone: the sdist has what builds its
    # extension.
    assert not (sources.roots[1] / "transformer_engine").exists()


@pytest.mark.campaign
@pytest.mark.parametrize("name", USED)
def test_the_stand_ins_take_what_the_library_takes(sources, name):
    """In the same order, and nothing that they can do without."""
    fake = FAKES[name]
    for method in ("__init__", "forward") if isinstance(fake, ast.ClassDef) else ("__init__",):
        own = signature_of(fake, method)
        if own is None or (method == "forward" and name.endswith("Norm")):
            continue  # a norm is a module of one input, whose forward is its base's
        real = sources.signature(USED[name], name, method)
        assert own.positional == real.positional[: len(own.positional)], method
        assert own.names <= real.names and real.required <= own.required, method


@pytest.mark.campaign
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_the_library_has_the_attributes(sources, name):
    assert ATTRIBUTES[name] <= sources.words(USED.get(name, RECIPE), name)
