"""What README.md says of the repository is so: its tree, its figures, the families."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def families(text: str) -> set[str]:
    """Their names without case and signs, as ernie45."""
    return set(re.sub(r"[^\w,]|_", "", text.lower()).split(","))


def test_the_tree_has_every_folder():
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    folders = {path.partition("/")[0] + "/" for path in listed if "/" in path}
    named = re.findall(r"^(?:  )?([\w/]+/|\w+\.py) ", section("Read the code"), re.M)
    assert folders - {name for name in folders if name.startswith(".")} <= set(named)
    assert all((ROOT / name).exists() or (ROOT / "megatron" / name).exists() for name in named)


def test_the_files_to_read_first_have_about_the_lines_that_it_says():
    said = re.findall(r"`([\w/]+\.py)` \((\d+)", section("Read the code"))
    assert len(said) == 5
    for name, lines in said:
        counted = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert counted == pytest.approx(int(lines), rel=0.1), name


def test_the_families_are_converted():
    table = json.loads((ROOT / "addons/convert/verified_exports.json").read_text("utf-8"))
    known = {name.replace("_", "") for name in table["families"]}
    first = "\n".join(README.splitlines()[:30])
    named = re.search(r"^\| families \| [^:]+: ([^|]+) \.\.\. \| \[all\]", first, re.M)
    assert named and families(named[1]) <= known
