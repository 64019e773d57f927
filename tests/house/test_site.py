"""The site's navigation (mkdocs.yml) has every page, and what its pages link to is laid out beside
them; `make docs` checks links and anchors."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def site():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / ".ci/site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    named = re.findall(r": (\S+\.md)$", navigation, re.M)
    assert sorted(named) == sorted([*site().pages(), "docs/codes.md"])


def test_the_site_is_laid_out_as_the_repository(tmp_path, monkeypatch):
    module = site()
    monkeypatch.setattr(module, "SOURCE", tmp_path / "source")
    module.main()
    assert (tmp_path / "source/README.md").read_bytes() == (ROOT / "README.md").read_bytes()
    assert (tmp_path / "source/docs/quickstart.png").is_file()
    codes = (tmp_path / "source/docs/codes.md").read_text("utf-8")
    assert "| `lr-warmup-too-long` |" in codes and "| `crash-loop` |" in codes
