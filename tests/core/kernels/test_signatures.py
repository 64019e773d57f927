"""Every call we make into a library that needs CUDA, held against that library's own sources, which
are only read.

The sources are those of the releases pinned in requirements/constraints.txt, fetched by pip as it
is configured here; nothing is built or imported. NVIDIA's apex is on no index (PyPI's package of
that name is another project's): its calls cannot be checked so.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ADAPTERS = {
    "transformer_engine": ROOT / "megatron/kernels/transformer_engine.py",
    "flash_attn": ROOT / "megatron/kernels/flash_attention.py",
}
# The modules our adapters import, by the name they have there, and the file each is.
IMPORTED = {
    "te": "transformer_engine/pytorch/__init__.py",
    "recipe": "transformer_engine/common/recipe/__init__.py",
    "flash_attn": "flash_attn/__init__.py",
}


@dataclass(frozen=True)
class Signature:
    """What a function takes: names that may be positional, in order, those by keyword only, whether
    anything more."""

    positional: tuple[str, ...]
    keywords: frozenset[str]
    required: frozenset[str]
    open: bool = False

    def problem(self, call: ast.Call) -> str | None:
        """Why `call` does not fit; None if it does."""
        given = [keyword.arg for keyword in call.keywords]
        if any(isinstance(one, ast.Starred) for one in call.args) or None in given:
            return "is made with * or **, which cannot be checked"
        if len(call.args) > len(self.positional):
            return (
                f"has {len(call.args)} positional arguments, and {len(self.positional)} are taken"
            )
        named = set(self.positional[: len(call.args)])
        for name in given:
            if name in named:
                return f"gives {name} twice"
            if name not in {*self.positional, *self.keywords} and not self.open:
                return f"gives {name}, which is not taken"
        missing = self.required - named - set(given)
        return f"lacks {', '.join(sorted(missing))}" if missing else None


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
        """(file, definition) of `name` as the module in the file `path` has it."""
        for node in self.tree(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return path, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._file(path, node), alias.name)
                    if alias.name == "*" and self.has(self._file(path, node), name):
                        return self.find(self._file(path, node), name)
        raise LookupError(f"{path} has no {name}")

    def has(self, path: str, name: str) -> bool:
        """Does `find` find it?"""
        try:
            return bool(self.find(path, name))
        except LookupError:
            return False

    def _file(self, path: str, node: ast.ImportFrom) -> str:
        folder = Path(path).parents[node.level - 1].as_posix() + "/" if node.level else ""
        base = folder + (node.module or "").replace(".", "/")
        files = (f"{base}.py", f"{base}/__init__.py")
        found = [name for name in files if any((root / name).is_file() for root in self.roots)]
        if not found:
            raise LookupError(f"{path} imports from {base}, which is no file of the package")
        return found[0]

    def signature(self, path: str, name: str, method: str | None = None) -> Signature:
        """Of a function, of making a class (its fields if it is a dataclass), or of a method of
        it."""
        path, node = self.find(path, name)
        if isinstance(node, ast.FunctionDef):
            return of_function(node.args, 0)
        for function in node.body:
            if isinstance(function, ast.FunctionDef) and function.name == (method or "__init__"):
                own = of_function(function.args, 1)
                if not own.open or method:
                    return own
                # ** goes on to the class it is made from
                base = self.signature(path, ast.unparse(node.bases[0]))
                return Signature(
                    own.positional,
                    own.keywords | base.keywords | set(base.positional),
                    own.required,
                )
        if method is None and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            return Signature(
                tuple(one.target.id for one in fields),
                frozenset(),
                frozenset(one.target.id for one in fields if one.value is None),
            )
        return self.signature(path, ast.unparse(node.bases[0]), method)

    def attributes(self, path: str, name: str) -> set[str]:
        """Names that making the class sets on its objects, and names in strings there (of
        parameters)."""
        path, node = self.find(path, name)
        inside = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
        inside |= {
            target.id
            for one in node.body
            if isinstance(one, ast.Assign)
            for target in one.targets
            if isinstance(target, ast.Name)
        }  # the members of an Enum
        inside |= {
            one.value
            for one in ast.walk(node)
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        }
        for base in map(ast.unparse, node.bases):
            if self.has(path, base):
                inside |= self.attributes(path, base)
        return inside


def of_function(arguments: ast.arguments, skip: int) -> Signature:
    """From a definition; `skip`: 1 leaves self out."""
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)][skip:]
    must = names[: len(names) - len(arguments.defaults)]
    must += [
        one.arg
        for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value is None
    ]
    return Signature(
        tuple(names),
        frozenset(one.arg for one in arguments.kwonlyargs),
        frozenset(must),
        arguments.kwarg is not None,
    )


@dataclass(frozen=True)
class Use:
    """One use of a library: the file and name of what is used, and the call (of a method, if one is
    named) or attribute."""

    path: str
    name: str
    node: ast.AST
    method: str | None = None
    attribute: str | None = None


def uses(text: str) -> Iterator[Use]:
    """Every use of a library in an adapter's source: te.X(...), recipe.X.Y, functions imported by
    name, and of objects that were made so (self.a = te.X(...), or a name) their calls and
    attributes."""
    tree = ast.parse(text)
    made = {}
    direct = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in IMPORTED:
            direct |= {alias.name: (IMPORTED[node.module], alias.name) for alias in node.names}
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and (of := library_name(node.value.func))
        ):
            made[ast.unparse(node.targets[0])] = of
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            of = library_name(node.func) or direct.get(ast.unparse(node.func))
            if of:
                yield Use(*of, node)
            elif ast.unparse(node.func) in made:
                yield Use(*made[ast.unparse(node.func)], node, method="forward")
        elif isinstance(node, ast.Attribute):
            of = made.get(ast.unparse(node.value)) or library_name(node.value)
            if of:
                yield Use(*of, node, attribute=node.attr)


def library_name(node: ast.AST) -> tuple[str, str] | None:
    """(file, name) of `te.X` or `recipe.X`."""
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in IMPORTED
    ):
        return IMPORTED[node.value.id], node.attr
    return None


def problems(text: str, sources: Sources) -> list[str]:
    """A line for every use that the sources do not allow."""
    found = []
    for use in uses(text):
        try:
            if use.attribute:
                known = sources.attributes(use.path, use.name)
                why = None if use.attribute in known else f"has no {use.attribute}"
            else:
                why = sources.signature(use.path, use.name, use.method).problem(use.node)
        except LookupError as error:
            why = str(error)
        if why:
            found.append(f"line {use.node.lineno}: {ast.unparse(use.node)}: {use.name} {why}")
    return found


def pinned(package: str) -> str:
    """`package==version` of requirements/constraints.txt."""
    lines = (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def pip_download(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """pip's own download, which keeps what it unpacks in `folder` (it fails on a source that needs
    CUDA to be described)."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-clean",
        "-d",
        str(folder),
        *words,
    ]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
        timeout=300,
    )


def no_sources(done: subprocess.CompletedProcess[str], package: str) -> None:
    """Offline a laptop does without; CI never."""
    text = (
        f"could not import '{package}': its sources could not be fetched: "
        f"{done.stderr.strip()[-300:]}"
    )
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Sources:
    """The wheel of transformer-engine (all its Python), the sdist of transformer-engine-torch and
    of flash-attn."""
    home = tmp_path_factory.mktemp("sources")
    (home / "te").mkdir()
    done = pip_download(home / "te", "--only-binary", ":all:", pinned("transformer-engine"))
    for wheel in (home / "te").glob("transformer_engine-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                home / "te", [name for name in archive.namelist() if name.endswith(".py")]
            )
    if not (home / "te/transformer_engine").is_dir():
        no_sources(done, "transformer_engine")
    roots = [home / "te"]
    for package, inside in (("transformer-engine-torch", "csrc"), ("flash-attn", "flash_attn")):
        folder = home / package
        folder.mkdir()
        done = pip_download(folder, "--no-binary", ":all:", "--no-build-isolation", pinned(package))
        here = next((path.parent for path in folder.glob(f"*/*/{inside}")), None)
        if here is None:
            no_sources(done, package.replace("-", "_"))
        roots.append(here)
    yield Sources(*roots)
    shutil.rmtree(home, ignore_errors=True)  # flash-attn brings 100 MB of CUDA


@pytest.mark.campaign
def test_the_sources_are_of_the_pinned_releases(sources):
    versions = {
        pinned(name).partition("==")[2]
        for name in ("transformer-engine", "transformer-engine-torch")
    }
    assert len(versions) == 1, versions
    text = (sources.roots[1] / "PKG-INFO").read_text(encoding="utf-8")
    assert re.search(rf"^Version: {re.escape(versions.pop())}$", text, re.M), text[:300]
    # The Python of Transformer Engine is in the wheel alone: the sdist has what builds its
    # extension.
    assert not (sources.roots[1] / "transformer_engine").exists()


@pytest.mark.campaign
@pytest.mark.parametrize("library", ADAPTERS)
def test_every_call_fits_the_library(sources, library):
    text = ADAPTERS[library].read_text(encoding="utf-8")
    assert len(list(uses(text))) >= {"transformer_engine": 15, "flash_attn": 2}[library]
    assert problems(text, sources) == []


ALTERED = [
    (
        "transformer_engine",
        "fuse_wgrad_accumulation=",
        "fused_wgrad_accumulation=",
        "which is not taken",
    ),
    (
        "transformer_engine",
        "in_features=columns * (size if mode == 'row' else 1), ",
        "",
        "lacks in_features",
    ),
    ("transformer_engine", "te.RMSNorm(", "te.RmsNorm(", "has no RmsNorm"),
    (
        "transformer_engine",
        "zero_centered_gamma=",
        "zero_centered=",
        "gives zero_centered, which is not taken",
    ),
    (
        "transformer_engine",
        "cu_seqlens_kv=ends",
        "cu_seqlens_k=ends",
        "gives cu_seqlens_k, which is not taken",
    ),
    (
        "transformer_engine",
        "amax_reduction_group=group",
        "fp8_group=group",
        "gives fp8_group, which is not taken",
    ),
    (
        "transformer_engine",
        "amax_history_len=self",
        "history=self",
        "gives history, which is not taken",
    ),
    ("transformer_engine", "recipe.Format.HYBRID", "recipe.Format.HYBRYD", "has no HYBRYD"),
    (
        "transformer_engine",
        "recipe.Float8CurrentScaling",
        "recipe.CurrentScaling",
        "has no CurrentScaling",
    ),
    (
        "transformer_engine",
        "self.linear(x)",
        "self.linear(x, None, False, False, True)",
        "5 positional arguments",
    ),
    ("transformer_engine", "self.linear.bias = ", "self.linear.offset = ", "has no offset"),
    (
        "flash_attn",
        "softmax_scale=spec.scale, causal",
        "scale=spec.scale, causal",
        "gives scale, which is not taken",
    ),
    ("flash_attn", "ends, ends, s, s,", "ends, ends, s,", "lacks max_seqlen_k"),
    (
        "flash_attn",
        "deterministic=same",
        "determinism=same",
        "gives determinism, which is not taken",
    ),
]


def unformatted(library: str) -> str:
    """The source of an adapter as Python writes its syntax tree, whatever its layout and quotes."""
    return ast.unparse(ast.parse(ADAPTERS[library].read_text(encoding="utf-8")))


def test_every_call_that_is_altered_is_there():
    assert [before for library, before, *_ in ALTERED if before not in unformatted(library)] == []


@pytest.mark.campaign
@pytest.mark.parametrize(("library", "before", "after", "word"), ALTERED)
def test_an_altered_call_is_found(sources, library, before, after, word):
    text = unformatted(library)
    found = problems(text.replace(before, after), sources)
    assert found and word in "\n".join(found), found


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("te", ["Linear", "RMSNorm", "LayerNorm", "DotProductAttention", "autocast"]),
        ("flash_attn", ["flash_attn_func", "flash_attn_varlen_func"]),
    ],
)
def test_the_stand_ins_take_what_the_library_takes(sources, file, names):
    """What tests/core/kernels/fake_libraries.py takes is taken by the library, in the same order."""
    tree = ast.parse(Path(__file__).with_name("fake_libraries.py").read_text(encoding="utf-8"))
    for name in names:
        fake = next(node for node in tree.body if getattr(node, "name", "") == name)
        methods = [
            node
            for node in getattr(fake, "body", ())
            if getattr(node, "name", "") in ("__init__", "forward")
        ]
        pairs = (
            [(fake, None)]
            if isinstance(fake, ast.FunctionDef)
            else [(node, node.name) for node in methods]
        )
        for node, method in pairs:
            if name.endswith("Norm") and method == "forward":
                # a module of one input, whose forward is its base's
                continue
            real = sources.signature(IMPORTED[file], name, None if method == "__init__" else method)
            own = of_function(node.args, 0 if method is None else 1)
            assert own.positional == real.positional[: len(own.positional)], (name, method)
            assert own.keywords <= real.keywords | set(real.positional), (name, method)
