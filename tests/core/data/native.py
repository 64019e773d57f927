"""Compiles megatron/data/helpers.cpp for tests, so that they test this source and not an older
build of it."""

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).resolve().parents[3] / "megatron" / "data" / "helpers.cpp"


def compiler() -> str | None:
    """A C++ compiler on this machine, or None; Python's headers and pybind11 must be there too."""
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    return found if headers and importlib.util.find_spec("pybind11") else None


def compile_helpers(folder: Path, *flags: str) -> ModuleType:
    """Build the module into `folder` and import it from there."""
    import pybind11

    target = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    # A third quicker to compile than -O2, and with gcc's pass that fuses multiplications and
    # additions where it may.
    optimize = ["-O1", "-fexpensive-optimizations"]
    words = [
        compiler(),
        *optimize,
        "-Wall",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
    ]
    subprocess.run([*words, *flags, *includes, str(SOURCE), "-o", str(target)], check=True)
    spec = importlib.util.spec_from_file_location("helpers_cpp", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
