"""tools/preprocess_data.py --task: the parts of all tasks are, in their order, what one machine
writes, whatever was killed on the way."""

import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.data.parts import making, part_set
from megatron.data.parts.plan import Unit, task_of, units
from megatron.data.preprocess import readers
from tests import problems
from tests.core.data.vocabularies import write_bpe
from tests.load_tool import exit_code, load_tool

PREPROCESS = load_tool("preprocess_data")
BYTES = ["--tokenizer-type", "ByteTokenizer", "--workers", "1"]
PROGRAM = Path(str(PREPROCESS.__file__))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 700)


def texts(seed: int, count: int = 30) -> list[str]:
    """Some are empty, one is longer than a part."""
    draw = random.Random(seed)
    found = ["".join(draw.choices("ab é", k=draw.randint(0, 150))) for _ in range(count)]
    found[2 * count // 3] = "long" * 1000
    return found


def lines(seed: int) -> bytes:
    """Lines of JSON with blank ones, the last without its end."""
    records = [json.dumps({"text": text, "more": text[::-1]}) for text in texts(seed)]
    return "\n\n".join(records).encode()


def preprocess(folder: Path, prefix: str, *more: object) -> int:
    (folder / "out").mkdir(exist_ok=True)
    words = ["--input", folder / "in" / "*", "--output-prefix", folder / "out" / prefix]
    return exit_code(PREPROCESS.main, *words, *BYTES, *more)


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def whole_parts(folder: Path, prefix: str = "x_text_document") -> list[int]:
    found = part_set.read_plan(str(folder / "out" / prefix))
    return [number for number in range(len(found)) if found.record(number)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / f"in/{number}.jsonl").write_bytes(lines(number))
    return tmp_path


def test_units_do_not_depend_on_tasks_and_small_files_are_together(tmp_path: Path) -> None:
    sizes = {"a.jsonl": 10, "b.jsonl": 20, "c.jsonl": 100, "d.txt": 90, "e.jsonl": 5}
    names = [str(tmp_path / name) for name in sizes]
    for name, size in zip(names, sizes.values(), strict=True):
        Path(name).write_bytes(b"x" * size)
    a, b, c, d, e = names
    assert units(names, 40) == [
        Unit((a, b)),
        Unit((c,), (0, 33)),
        Unit((c,), (33, 66)),
        Unit((c,), (66, 100)),
        Unit((d,)),
        Unit((e,)),
    ]


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(2))
def test_processes_on_the_same_parts_some_of_them_killed(corpus: Path, seed: int) -> None:
    """As if an array was submitted twice, and its hosts went away now and then."""
    flags = ("--part-bytes", 3000)
    assert preprocess(corpus, "once", *flags, "--task", "0/2") == 0
    assert preprocess(corpus, "once", *flags, "--task", "1/2") == 0
    words = [sys.executable, PROGRAM, "--input", *(corpus / "in").iterdir()]
    words[3:] = sorted(words[3:])
    words += ["--output-prefix", corpus / "out" / "x", *BYTES, *flags, "--task"]
    draw = random.Random(seed)
    for _ in range(2):
        started = [
            subprocess.Popen(
                [*map(str, words), task], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            for task in ("0/2", "0/2", "1/2")
        ]
        try:
            started[draw.randrange(3)].wait(draw.random())
        except subprocess.TimeoutExpired:
            pass
        started[draw.randrange(3)].kill()
        codes = [(process.wait(), process.communicate()[1]) for process in started]
        assert all(code in (0, -signal.SIGKILL) for code, _ in codes), codes
    for task in ("0/2", "1/2"):
        assert (
            subprocess.run([*map(str, words), task], check=False, capture_output=True).returncode
            == 0
        )
    assert files(corpus / "out" / "x_text_document.parts") == files(
        corpus / "out" / "once_text_document.parts"
    )


def test_a_whole_part_is_not_made_again_and_a_damaged_one_is(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--part-bytes", 3000)
    for task in range(3):
        assert preprocess(corpus, "x", *flags, "--task", f"{task}/3") == 0
    folder = corpus / "out" / "x_text_document.parts"
    before = files(folder)
    made: list[int] = []
    publish = making._publish
    monkeypatch.setattr(making, "_publish", lambda *words: (made.append(words[1]), publish(*words)))
    os.truncate(folder / "000004.bin", 3)
    (folder / "000002.json").write_bytes(before["000002.json"].replace(b"1", b"2", 1))
    (folder / "000001.idx").unlink()
    assert preprocess(corpus, "x", *flags, "--task", "0/2") == 0 and made == [2, 4]
    assert preprocess(corpus, "x", *flags, "--task", "1/2") == 0 and made == [2, 4, 1]
    after = files(folder)
    assert {**after, "parts.json": b""} == {**before, "parts.json": b""}


def test_the_parts_of_another_command_are_refused(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--part-bytes", 9000, "--task", "0/1")
    assert preprocess(corpus, "x", *flags) == 0
    before = files(corpus / "out")
    capsys.readouterr()
    for other, named in (
        (("--append-eod", *flags), "--append-eod"),
        (("--part-bytes", 90000, "--task", "0/1"), "--part-bytes"),
    ):
        assert preprocess(corpus, "x", *other) == 1
        problems.assert_problem(capsys.readouterr().err.strip(), "output-exists", named)
        assert files(corpus / "out") == before
    assert (
        preprocess(
            corpus, "x", "--append-eod", "--part-bytes", 30000, "--task", "0/1", "--overwrite"
        )
        == 0
    )
    assert preprocess(corpus, "once", "--append-eod", "--part-bytes", 30000, "--task", "0/1") == 0
    assert files(corpus / "out" / "x_text_document.parts") == files(
        corpus / "out" / "once_text_document.parts"
    )
    # an input that has changed is another one
    with open(corpus / "in" / "0.jsonl", "a", encoding="utf-8") as file:
        file.write('\n{"text": "one more"}\n')
    assert preprocess(corpus, "once", "--append-eod", "--part-bytes", 30000, "--task", "0/1") == 1


def test_parts_that_a_process_of_another_command_writes_are_not_replaced(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until it ends; those of the same command, which an array starts at once, are no matter."""
    flags = ("--part-bytes", 9000)
    inputs = sorted((corpus / "in").iterdir())
    words = [sys.executable, PROGRAM, "--input", *inputs, "--output-prefix", corpus / "out" / "x"]
    words += [*BYTES, *flags, "--task", "0/2"]
    folder = corpus / "out" / "x_text_document.parts"
    (corpus / "out").mkdir()
    with subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL) as old:
        try:
            while not list(folder.glob("*.making-*")) and old.poll() is None:
                time.sleep(0.001)
            old.send_signal(signal.SIGSTOP)
            assert old.poll() is None, "it makes a part"
            other = ("--append-eod", *flags, "--task", "0/1", "--overwrite")
            assert preprocess(corpus, "x", *other) == 1
            said = capsys.readouterr().err.strip()
            problems.assert_problem(
                said, "output-in-use", "--overwrite", old.pid, socket.gethostname()
            )
            for overwrite in ((), ("--overwrite",)):
                assert preprocess(corpus, "x", *flags, "--task", "1/2", *overwrite) == 0
        finally:
            old.kill()
    assert preprocess(corpus, "x", *other) == 0
    assert preprocess(corpus, "once", *other) == 0
    once = files(corpus / "out" / "once_text_document.parts")
    assert {**files(folder), **once} == files(folder) and not list(folder.glob("writer-*"))


def test_a_full_disk(corpus: Path) -> None:
    words = [sys.executable, PROGRAM, "--input", corpus / "in" / "0.jsonl", *BYTES]
    words += ["--output-prefix", corpus / "out" / "x", "--part-bytes", 3000, "--task", "0/1"]
    (corpus / "out").mkdir()
    run = subprocess.run(
        [*map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3500, 3500)),
    )
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and "out/x: cannot" in run.stderr
    found = whole_parts(corpus)  # those before the long line
    assert 0 < len(found) < len(part_set.read_plan(str(corpus / "out" / "x_text_document")))
    assert not list((corpus / "out").glob("*/*.making-*"))
    assert subprocess.run([*map(str, words)], check=False, capture_output=True).returncode == 0
    assert whole_parts(corpus)[: len(found)] == found


def test_flags_that_do_not_go_together(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, code in (
        (("--part-bytes", 3000), "flag-needs-other-flag"),
        (("--task", "4/4"), "task-malformed"),
        (("--task", "-1/4"), "task-malformed"),
        (("--task", "2"), "task-malformed"),
        (("--task", "slurm"), "launcher-variables-incomplete"),
        (("--task", "0/2", "--partitions", 2), "flags-exclude-each-other"),
    ):
        assert preprocess(corpus, "x", *flags) == 2
        problems.assert_problem(capsys.readouterr().err.strip(), code)
    assert preprocess(corpus, "x") == 0
    capsys.readouterr()
    assert preprocess(corpus, "x", "--task", "0/2", "--overwrite") == 2
    problems.assert_problem(capsys.readouterr().err.strip(), "output-exists", "x_text_document")


def test_the_task_of_a_slurm_array(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(*values: int) -> tuple[int, int]:
        for name, value in zip(("ID", "MIN", "MAX", "STEP", "COUNT"), values, strict=False):
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
        found = task_of("slurm")
        return found.number, found.count

    assert task(0, 0, 63) == (0, 64)
    assert task(7, 1, 7, 2, 4) == (3, 4)
    assert task(12, 10, 13, 1, 4) == (2, 4)
    for values in ((3, 0, 9, 1, 3), (4, 1, 7, 2, 4), (9, 0, 7, 1, 8)):
        with problems.raises(ValueError, "launcher-variables-contradict", "SLURM_ARRAY_TASK_ID"):
            task(*values)


def test_the_example_of_an_array(corpus: Path) -> None:
    """Its jobs are started one after the other, as if by SLURM."""
    script = PROGRAM.parents[1] / "examples" / "cluster_data" / "tokenize.sbatch"
    (size,) = re.findall(r"^#SBATCH --array 0-(\d+)$", script.read_text(), re.MULTILINE)
    (tasks,) = re.findall(r"TASKS:-(\d+)", script.read_text())
    assert int(tasks) == int(size) + 1
    write_bpe(corpus)
    environ = {"INPUT": f"{corpus}/in/*.jsonl", "PREFIX": f"{corpus}/x", "TASKS": "2"}
    environ |= {"DATA": str(corpus), "PYTHON": sys.executable}
    for task in ("0", "1"):
        run = subprocess.run(
            ["sh", script, "--part-bytes", "9000", "--workers", "1"],
            cwd=PROGRAM.parents[1],
            env={**os.environ, **environ, "SLURM_ARRAY_TASK_ID": task},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
    found = part_set.read_plan(f"{corpus}/x_text_document")
    assert found.tasks == 2 and len(list(found.records())) == len(found) > 2
