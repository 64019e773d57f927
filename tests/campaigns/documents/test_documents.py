"""The commands of README.md, of the pages for users and of examples/ run as they are printed
(walk.py says how)."""

import re
import shutil
from pathlib import Path

import pytest

from tests.campaigns.documents import chat_model, walk
from tests.forkrun import ROOT

START_PAGE = "docs/getting_started.md"
# The pages whose commands use what getting_started.md made: {page: packages that it needs}
AFTER_START = {
    "docs/data.md": ("tokenizers", "jinja2"),
    "docs/trillion_tokens.md": ("tokenizers",),
    "docs/serving.md": ("fastapi", "uvicorn", "openai"),
    "docs/evaluation.md": ("lm_eval",),
    "docs/convert.md": ("transformers",),
}
FINE_TUNING = "addons/finetuning/finetune.md"
AGENT = "examples/internlm/README.md"
PACKAGES = {
    **AFTER_START,
    FINE_TUNING: ("transformers", "fastapi", "uvicorn"),
    AGENT: ("transformers", "fastapi", "uvicorn", "class_registry"),
}
EXAMPLES = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/README.md")}
WALKED = [page for page, each in walk.OTHERS.items() if "" in each]
PAGES = ["README.md", START_PAGE, *PACKAGES, *sorted(EXAMPLES - {AGENT}), *WALKED]
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
        if block.note or block.language not in ("sh", "python"):
            said = f"{block.note}: {block.value}" if block.note else "output"
        rows.append((block.text.splitlines()[0], said))
    return rows


def blocks_of(page: str) -> list[walk.Block]:
    """Those of a page, without those that run elsewhere."""
    found = walk.blocks((ROOT / page).read_text(encoding="utf-8"))
    elsewhere = iter(walk.OTHERS.get(page, ()))
    return [block for block in found if not walk.is_code(block) or not next(elsewhere, "")]


def run(blocks: list[walk.Block], tree: Path) -> list[str]:
    """What each block of a page printed."""
    code, printed = walk.run_page(blocks, tree)
    assert code == 0 and len(printed) == len(blocks), (
        f"{blocks[len(printed) - 1].text}\n{printed[-1]}"
    )
    return printed


@pytest.mark.campaign
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.peers] if page in PACKAGES else []) for page in PAGES],
)
def test_the_blocks_of_a_page_run(page, tree):
    for package in PACKAGES.get(page, ()):
        pytest.importorskip(package)
    blocks = blocks_of(page)
    for first, said in listed(blocks):
        print(f"{page}: {said:20} {first[:70]}")
    if page in AFTER_START and not (tree / "plays/huggingface").exists():
        run(blocks_of(START_PAGE), tree)
    if page == FINE_TUNING:  # SmolLM2 itself: addons/convert/tests/test_pretrained.py
        chat_model.write(tree / "models/smollm2")
    shutil.rmtree(tree / ".venv", ignore_errors=True)
    if page not in ("README.md", START_PAGE):
        # README is read first. What an agent answers is what a trained model says.
        walk.make_environment(tree, scaled=page != AGENT)
    printed = run(blocks, tree)
    for before, block, said in zip(blocks, blocks[1:], printed, strict=False):
        if (
            before.language in ("sh", "python")
            and not block.language
            and not (before.language == "sh" and before.elsewhere)
            and not block.note
        ):
            assert walk.not_printed(block.text, said) == []


def test_few_blocks_are_not_run_and_each_for_a_reason():
    walked, elsewhere, left_out = 0, [], []
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md")]:
        page, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        assert walk.unseen(text) == [], page
        code = [block for block in walk.blocks(text) if walk.is_code(block)]
        others = walk.OTHERS.get(page, ("",) * len(code))
        assert not code or page in PAGES or page in walk.OTHERS, f"{page}: is not walked"
        for block, by in zip(code, others, strict=True):
            if block.note == "not run" or by in walk.REASONS:
                left_out.append((page, by or block.value))
            elif by:
                elsewhere.append((page, by, block))
            else:
                walked += 1
    print(f"{walked} blocks are walked, {len(elsewhere)} run elsewhere, {len(left_out)} nowhere")
    assert {reason for _, reason in left_out} <= set(walk.REASONS)
    assert not {"README.md", "docs/getting_started.md"} & {page for page, _ in left_out}
    assert len(left_out) <= 0.2 * (walked + len(elsewhere))
    for page, by, block in elsewhere:
        programs = re.findall(
            r"(\w+)\.(?:py|fromfile)|def (\w+)|\b(torchrun|srun|mpirun) ", block.text
        )
        names = {page, *(name for pair in programs for name in pair if name)}
        assert any(name in (ROOT / by).read_text() for name in names), f"{by}: {block.text}"
    for command, by in walk.ELSEWHERE.items():
        assert Path(command.split()[-1]).name in (ROOT / by).read_text(), f"{by}: {command}"


@pytest.mark.parametrize(
    "code",
    [
        "    python tools/serve.py runs/gpt",
        "   ```sh\n   make test\n   ```",
        "```json\n{}\n```",
        "```bash\nmake test\n```",
    ],
)
def test_code_that_no_walk_runs_is_noticed(code):
    assert walk.unseen(f"{START}\n{code}\n") and not walk.unseen(START)


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
