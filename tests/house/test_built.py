"""Where there is a C++ compiler, every extension of setup.py is built. A test of an extension that
is missing is skipped."""

from __future__ import annotations

import importlib.util
import runpy

import pytest
import setuptools

from tests.data.native import compiler
from tests.forkrun import ROOT


def test_every_extension_is_built(monkeypatch):
    if compiler() is None:
        pytest.skip("needs a C++ compiler")
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    names = [extension.name for extension in given["ext_modules"]]
    assert "megatron.data.helpers_cpp" in names
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    assert not missing, "python setup.py build_ext --inplace builds them"
