"""The Makefile, the requirement lists and the installation: what the two commands of the README
stand on."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "sed", "test", "expand", "make", "rm", "touch", "env")


def make(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    return subprocess.run(
        ["make", *words], cwd=ROOT, env=clean | environ, capture_output=True, text=True
    )


def requirement_lines(name: str) -> dict[str, str]:
    """{package: the rest} of one list."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    found = [re.match(r"([\w.-]+)(\S*)", line.partition("#")[0].strip()) for line in lines]
    return {match[1]: match[2] for match in found if match}


def test_an_old_python_is_refused_with_a_way_out(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make("install", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert (
        done.returncode != 0
        and "is not Python 3.11 or newer; say which: make PYTHON=" in done.stdout
    )
    assert not (tmp_path / "venv").exists()


def test_every_direct_requirement_is_pinned_once_and_torch_within_the_supported_range():
    pins = requirement_lines("constraints")
    assert pins["torch"] == "==2.13.0" and requirement_lines("runtime")["torch"] == ">=2.11,<2.15"
    ends = {name: requirement_lines(f"torch_{name}")["torch"] for name in ("oldest", "newest")}
    assert ends["oldest"].startswith("==2.11.") and ends["newest"].startswith("==2.14.")
    assert "triton" not in pins, "torch's builds for CUDA name the one that they need"
    for name in ("runtime", "build", "dev", "docs", "peers"):
        for package, version in requirement_lines(name).items():
            assert package in pins or version.startswith("=="), (
                f"{package} in {name}.txt has no tested version"
            )
    assert all(version.startswith("==") for version in requirement_lines("files").values())


def run_python(python: str, *words: str, cwd: Path, path: str) -> None:
    done = subprocess.run(
        [python, *words],
        cwd=cwd,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def built_wheel(folder: Path, path: str, python: str = sys.executable) -> Path:
    """A wheel that pip builds, with `path` as PATH, from the source distribution of a copy of the
    tree, which has a megatron/core that is not ours."""
    tree = folder / "tree"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("megatron", "addons", "tools", "requirements", "docs"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for file in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy(file, tree)
    (tree / "megatron" / "core").mkdir()
    (tree / "megatron" / "core" / "__init__.py").write_text('"""Another project\'s."""\n')
    code = "from setuptools import build_meta; build_meta.build_sdist('../out')"
    run_python(python, "-c", code, cwd=tree, path=path)
    archive = next((folder / "out").glob("*.tar.gz"))
    words = "-m pip wheel -qq --no-deps --no-build-isolation -w".split()
    run_python(python, *words, str(folder / "out"), str(archive), cwd=folder, path=path)
    return next((folder / "out").glob("*.whl"))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


EXTENSIONS = (
    "helpers_cpp",
    "rows_v3",
    "rows_v4",
    "fp32_attention_v3",
    "fp32_attention_v4",
    "few_rows_v3",
    "few_rows_v4",
    "experts_v3",
    "experts_v4",
    "bf16_attention_cpp",
)


def extensions_in(wheel: Path) -> list[str]:
    """The C++ extensions that a wheel has, after a look at what every wheel has and has not."""
    names = names_in(wheel)
    modules = ("arguments", "config/tree", "data/index_helpers")
    assert {f"megatron/{name}.py" for name in modules} <= names
    assert not [
        name
        for name in names
        if name.startswith("megatron/core/") or name.endswith("megatron/__init__.py")
    ]
    return [each for each in EXTENSIONS if any(each in name for name in names)]


@pytest.mark.sweep
def test_a_wheel_has_every_extension(tmp_path):
    wheel = built_wheel(tmp_path, os.environ["PATH"])
    assert extensions_in(wheel) == list(EXTENSIONS)


def without_compiler(folder: Path) -> str:
    """A PATH with the tools that an installation needs, and no compiler."""
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)


SHORT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --lr 1e-2 --micro-batch-size 2 --train-iters 2 --eval-iters 0 "
    "--mock-data --vocab-size 50 --device cpu --num-workers 0 --save run --save-interval 2"
).split()


# Another one, which has torch and requirements/build.txt: OTHER_PYTHON=/opt/python3.13/bin/python pytest ...
PYTHONS = [sys.executable, *filter(None, [os.environ.get("OTHER_PYTHON")])]


@pytest.mark.campaign
@pytest.mark.parametrize("python", PYTHONS)
def test_the_commands_of_an_installation_work_from_any_directory(python, tmp_path):
    """A wheel, here of a machine without a compiler, in a virtual environment of its own, which has
    the dependencies of this interpreter."""
    wheel = built_wheel(tmp_path / "wheel", without_compiler(tmp_path / "bin"), python)
    assert extensions_in(wheel) == []
    names = names_in(wheel)
    assert not [
        name
        for name in names
        if {"tests", "docs", "examples"} & set(name.split("/")) or name[:6] in ("tools/", "addons")
    ]
    codes = ("megatron", "megatron/features/spikes", "megatron/addons/convert")
    assert {f"{folder}/codes.txt" for folder in codes} <= names
    assert "megatron/py.typed" in names and any(name.endswith("licenses/LICENSE") for name in names)
    words = "-m venv --without-pip --system-site-packages".split()
    subprocess.run([python, *words, str(tmp_path / "venv")], check=True)
    scripts = tmp_path / "venv" / "bin"
    here = tmp_path / "here"
    here.mkdir()
    pip = [
        "-m",
        "pip",
        "--python",
        str(scripts / "python"),
        *"install -qq --no-deps --no-index".split(),
    ]
    subprocess.run([sys.executable, *pip, str(wheel)], check=True, timeout=300)
    code = "import importlib.util as i; print(i.find_spec('torch').submodule_search_locations[0])"
    torch = subprocess.check_output([python, "-c", code], text=True).strip()
    packages = str(Path(torch).parent)
    environ = {**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [scripts / words[0], *words[1:]],
            cwd=here,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )

    for words in (
        ["megatron-pretrain", "--version"],
        ["megatron-tools", "--version"],
        ["megatron-tools", "merge-datasets", "--version"],
    ):
        done = call(*words)
        assert done.returncode == 0 and VERSION in done.stdout, done.stderr
    code = (
        "import megatron.arguments, pretrain_gpt; print(megatron.arguments.__file__, "
        "pretrain_gpt.__file__)"
    )
    assert call("python", "-c", code).stdout.count(str(tmp_path / "venv")) == 2
    # NVIDIA's containers have a torch of such a version, and this is installed with --no-deps.
    faked = "import torch, pretrain_gpt; torch.__version__ = '2.11.0a0+b4e4ee8'; "
    done = call("python", "-c", f"{faked}pretrain_gpt.main({SHORT[:-4]})")
    assert done.returncode == 0 and "2.11.0a0" in done.stdout, done.stderr
    assert call("megatron-pretrain", "--lerning-rate", "1").returncode == 2
    done = call("megatron-pretrain", *SHORT)
    assert done.returncode == 0 and (here / "run" / "iter_0000002").is_dir(), done.stderr
    done = call(
        "megatron-tools", "generate", "run", "1 2 3", "--max-new-tokens", "3", "--device", "cpu"
    )
    assert done.returncode == 0 and done.stdout.startswith("1 2 3 "), done.stderr
    listed = call("megatron-tools", "--help").stdout
    for tool in (ROOT / "tools").glob("*.py"):
        assert (f"\n  {tool.stem} " in listed) == (tool.stem != "write_flags_page")
        if f"\n  {tool.stem} " in listed:
            assert call("megatron-tools", tool.stem, "--help").stdout.startswith(
                f"usage: {tool.name}"
            )
