"""The C++ extensions, the programs of tools/ and the add-ons; pyproject.toml has the rest. Without
a C++ compiler, or without pybind11, numpy and torch answer instead, slower."""

import os
import platform
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:  # --no-build-isolation without it
    Pybind11Extension = None

HERE = Path(__file__).resolve().parent


class BuildWithTools(build_py):
    """Also puts the programs of tools/ into a wheel, below a name of this project's own;
    megatron/console.py runs them; and the add-ons, as megatron.addons.NAME.

    An editable installation needs no copy: it has the clone's.
    """

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "megatron_gpt_tools" / "tools"
            ignored = shutil.ignore_patterns("__pycache__", "write_flags_page.py")
            shutil.copytree(HERE / "tools", target, ignore=ignored, dirs_exist_ok=True)
            target = Path(self.build_lib) / "megatron" / "addons"
            ignored = shutil.ignore_patterns("__pycache__", "tests", "*.md")
            shutil.copytree(HERE / "addons", target, ignore=ignored, dirs_exist_ok=True)


def usable_cores() -> int:
    """Extensions that are compiled at the same time: each takes one core and half a GB."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def builds_cpu_kernels() -> bool:
    """MEGATRON_CPU_KERNELS (1 or 0), else whether this is no machine with NVIDIA GPUs, which use
    none of them: compiling takes 100 seconds of one core. Not torch's CUDA decides: PyPI's torch
    has it on any x86-64 Linux."""
    if asked := os.environ.get("MEGATRON_CPU_KERNELS"):
        return asked != "0"
    return not any(Path("/dev").glob("nvidia[0-9]*"))


on_x86 = platform.machine() in ("x86_64", "AMD64")
extensions = []
if Pybind11Extension is not None:
    extensions.append(
        Pybind11Extension(
            "megatron.data.helpers_cpp",
            ["megatron/data/helpers.cpp"],
            cxx_std=17,
            extra_compile_args=["-O3"],
        )
    )
    # AVX2, AVX512; native.py takes one
    for level in ("v3", "v4") if on_x86 and builds_cpu_kernels() else ():
        for name in ("rows", "fp32_attention", "few_rows", "experts"):
            extensions.append(
                Pybind11Extension(
                    f"megatron.kernels.cpu.{name}_{level}",
                    [f"megatron/kernels/cpu/{name}.cpp"],
                    cxx_std=17,
                    depends=["megatron/kernels/cpu/vectors.h"],
                    define_macros=[("MODULE", f"{name}_{level}")],
                    extra_compile_args=[
                        "-O3",
                        f"-march=x86-64-{level}",
                        "-fno-math-errno",
                        "-fno-trapping-math",
                        "-Wno-psabi",
                    ],
                )
            )
    if on_x86 and builds_cpu_kernels():  # bf16_attention.py asks the processor
        extensions.append(
            Pybind11Extension(
                "megatron.kernels.cpu.bf16_attention_cpp",
                ["megatron/kernels/cpu/bf16_attention.cpp"],
                cxx_std=17,
                depends=["megatron/kernels/cpu/vectors.h"],
                extra_compile_args=[
                    "-O3",
                    "-march=x86-64-v4",
                    "-mavx512bf16",
                    "-mamx-tile",
                    "-mamx-bf16",
                    "-fno-math-errno",
                    "-fno-trapping-math",
                    "-Wno-psabi",
                ],
            )
        )
for extension in extensions:
    extension.optional = True

setup(
    cmdclass={"build_py": BuildWithTools},
    ext_modules=extensions,
    options={"build_ext": {"parallel": usable_cores()}},
)
