#!/usr/bin/env python
"""Lay out what `make docs` builds, in build/site_source: the pages and the files that they link to,
with the paths of the repository, so that links hold; and a page of all codes.

    python .ci/site.py        # then mkdocs build (mkdocs.yml)
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site_source"
LINK = re.compile(r"\]\(([^)#\s]+)")
CODES = """# Messages by code

`pretrain_gpt.py --explain CODE` prints the same.
"""


def pages() -> list[str]:
    """The repository's pages, by path."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    found += ROOT.glob("addons/*/*.md")
    found.append(ROOT / "tests" / "README.md")
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def linked(page: str) -> list[str]:
    """The files that a page links to or shows, other pages left out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = [
        ((ROOT / page).parent / link).resolve() for link in LINK.findall(text) if "://" not in link
    ]
    return [
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.is_file() and path.suffix != ".md"
    ]


def codes_page() -> str:
    """A table for each section of the codes."""
    sys.path.insert(0, str(ROOT))
    from megatron.explain import codes

    lines = [CODES]
    section = ""
    for code, found in codes().items():
        if found.section != section:
            section = found.section
            lines += ["", f"## {section}", "", "| code | meaning | what to do |", "|---|---|---|"]
        lines.append(f"| `{code}` | {found.meaning} | {found.remedy} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the folder anew."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in {file for page in pages() for file in [page, *linked(page)]}:
        target = SOURCE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    (SOURCE / "docs" / "codes.md").write_text(codes_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
