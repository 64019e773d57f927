"""The commands of README.md, of the pages for a start and of examples/ run as they are printed
(walk.py says how)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.campaigns.documents import walk
from tests.forkrun import ROOT

PAGES = [
    "README.md",
    "docs/getting_started.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/README.md")),
]
START = """
```sh
make quickstart
. .venv/bin/activate
```
```sh
python pretrain_gpt.py @examples/quickstart/gpt.args --mock-data --vocab-size 1000 --dry-run
ls README.md
```
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return walk.clone(tmp_path_factory.mktemp("documents"))


def listed(page: list[walk.Block]) -> list[tuple[str, str]]:
    """Each block's first line and what becomes of it."""
    rows = []
    for block in page:
        said = "run elsewhere" if block.language == "sh" and block.elsewhere else "run"
        if block.note or not block.language:
            said = f"{block.note}: {block.value}" if block.note else "output"
        rows.append((block.text.splitlines()[0], said))
    return rows


@pytest.mark.campaign
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, tree):
    blocks = walk.blocks((ROOT / page).read_text(encoding="utf-8"))
    for first, said in listed(blocks):
        print(f"{page}: {said:20} {first[:70]}")
    shutil.rmtree(tree / ".venv", ignore_errors=True)
    if "/" in page and not page.startswith("docs/getting"):
        walk.make_environment(tree)  # README is read first
    code, printed = walk.run_page(blocks, tree)
    assert code == 0 and len(printed) == len(blocks), (
        f"{blocks[len(printed) - 1].text}\n{printed[-1]}"
    )
    for before, block, said in zip(blocks, blocks[1:], printed, strict=False):
        if (
            before.language == "sh"
            and not block.language
            and not before.elsewhere
            and not block.note
        ):
            assert walk.not_printed(block.text, said) == []


def test_few_blocks_are_not_run_and_each_for_a_reason():
    kept, left_out = 0, []
    for page in PAGES:
        for block in walk.blocks((ROOT / page).read_text(encoding="utf-8")):
            kept += 1
            if block.note == "not run":
                left_out.append((page, block.value))
    assert {reason for _, reason in left_out} <= set(walk.REASONS)
    assert not {"README.md", "docs/getting_started.md"} & {page for page, _ in left_out}
    assert len(left_out) <= 0.15 * kept
    for command, by in walk.ELSEWHERE.items():
        assert Path(command.split()[-1]).name in (ROOT / by).read_text(), f"{by}: {command}"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        (" --dry-run\n", " --dry-run ", "ls"),
        ("--vocab-size", "--vocabulary-size", "--vocabulary-size"),
        (". .venv/bin/activate\n", "", "numpy"),
        ("", "", None),
    ],
    ids=["joined lines", "renamed flag", "no activation", "none"],
)
def test_a_fault_in_a_page_is_noticed(good, bad, said, tree):
    shutil.rmtree(tree / ".venv", ignore_errors=True)
    code, printed = walk.run_page(walk.blocks(START.replace(good, bad)), tree)
    assert (code != 0) == (said is not None), printed
    assert said is None or said in printed[-1]
