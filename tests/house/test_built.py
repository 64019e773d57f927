"""Where there is a C++ compiler, every extension of setup.py is built, of which a GPU needs those of
data alone. A test of an extension that is missing is skipped."""

import importlib.util
import platform
import runpy
from pathlib import Path

import pytest
import setuptools

from tests.core.data.native import compiler
from tests.forkrun import ROOT


def extensions(monkeypatch) -> list[str]:
    """The names of what setup.py builds here."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    return [extension.name for extension in given["ext_modules"]]


def test_every_extension_is_built(monkeypatch):
    if compiler() is None:
        pytest.skip("needs a C++ compiler")
    names = extensions(monkeypatch)
    assert "megatron.data.helpers_cpp" in names
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    assert not missing, "python setup.py build_ext --inplace builds them"


@pytest.mark.parametrize(
    "asked, devices, built",
    [("", [], True), ("", ["nvidia0"], False), ("1", ["nvidia0"], True), ("0", [], False)],
)
def test_a_gpu_needs_no_kernels_of_the_cpu(monkeypatch, asked, devices, built):
    monkeypatch.setenv("MEGATRON_CPU_KERNELS", asked)
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter(devices))
    names = extensions(monkeypatch)
    x86 = platform.machine() in ("x86_64", "AMD64")
    assert "megatron.data.helpers_cpp" in names and (len(names) > 1) == (built and x86)
