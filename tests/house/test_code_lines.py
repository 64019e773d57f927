"""What one training process imports is counted as the script says, and stays within its limits."""

from __future__ import annotations

from pathlib import Path

from tests.house import code_lines

ROOT = Path(__file__).resolve().parents[2]
FILES_PER_FOLDER = 20
# code lines that a run with mock data imports; lower it when they become fewer
CODE_LINES = 17_640

SOURCE = '''"""Docstring
of two lines."""

import os  # a comment does not count


# nor does this
def f(a, /, b, *, c):
    """Docstring."""
    text = """a string
    of two lines"""
    return os.path.join(a, b, c, text)
'''


def test_code_lines_and_statements_by_the_definition():
    file = code_lines.count("x/y.py", SOURCE)
    assert (file.code, file.statements, file.raw, file.folder) == (5, 4, 12, "x")
    assert file.functions == ((4, 3, "x/y.py:8 f"),)


def test_the_closure_follows_imports_within_the_repository(tmp_path):
    sources = {
        "pretrain_gpt.py": "import os\nfrom megatron import a\n",
        "megatron/a.py": "def f():\n    from megatron.b.c import d\n"
        "if TYPE_CHECKING:\n    import megatron.unused\n",
        "megatron/b/c.py": "import megatron.a\n",
        "megatron/unused.py": "",
        "megatron/optional.py": "TABLE = {'x': 'megatron.chosen', 'y': 'nothing'}\n",
        "megatron/chosen.py": "from megatron import a, below\n",
        "megatron/below.py": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    always = code_lines.closure(tmp_path, ["pretrain_gpt.py"])
    assert always == ["megatron/a.py", "megatron/b/c.py", "pretrain_gpt.py"]
    chosen = code_lines.optional_modules(tmp_path)
    assert chosen == ["megatron/chosen.py"]
    assert code_lines.closure(tmp_path, chosen, always) == [
        "megatron/below.py",
        "megatron/chosen.py",
    ]


def test_what_is_loaded_by_name_is_not_imported_always():
    always = code_lines.closure(ROOT, ["pretrain_gpt.py"])
    chosen = code_lines.optional_modules(ROOT)
    assert chosen and not set(always) & set(chosen)


def test_the_report_of_this_repository(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["code_lines.py", str(ROOT)])
    code_lines.main()
    printed = capsys.readouterr().out
    files = code_lines.count_files(ROOT, code_lines.closure(ROOT, ["pretrain_gpt.py"]))
    assert f"{sum(file.code for file in files):,}" in printed
    assert f"{sum(file.statements for file in files):,}" in printed


def test_a_plain_run_imports_no_more_code_than_allowed():
    files = code_lines.count_files(ROOT, code_lines.closure(ROOT, ["pretrain_gpt.py"]))
    assert sum(file.code for file in files) <= CODE_LINES


def test_no_folder_is_too_full():
    folders = {
        path.parent: len(list(path.parent.glob("*.py")))
        for place in ("megatron", "tools")
        for path in (ROOT / place).rglob("*.py")
    }
    assert {folder: n for folder, n in folders.items() if n > FILES_PER_FOLDER} == {}
