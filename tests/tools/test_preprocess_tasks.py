"""tools/preprocess_data.py --task: the parts of all tasks are, in their order, what one machine
writes, whatever was killed on the way."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.parts import making, part_set
from megatron.data.parts.plan import Unit, task_of, units
from megatron.data.preprocess import readers
from tests import problems
from tests.core.data.vocabularies import write_bpe
from tests.load_tool import exit_code, load_tool
from tests.tools.kills import status_of_killed

PREPROCESS = load_tool("preprocess_data")
MERGE = load_tool("merge_datasets")
BYTES = ["--tokenizer-type", "ByteTokenizer", "--workers", "1"]
PEERS = pytest.mark.peers
PROGRAM = Path(str(PREPROCESS.__file__))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(readers, "BLOCK_BYTES", 700)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def texts(seed: int, count: int = 60) -> list[str]:
    """Some are empty, one is longer than a part."""
    draw = random.Random(seed)
    found = ["".join(draw.choices("ab é", k=draw.randint(0, 150))) for _ in range(count)]
    found[count // 3] = "long" * 1000
    return found


def lines(seed: int) -> bytes:
    """Lines of JSON with blank ones, the last without its end."""
    records = [json.dumps({"text": text, "more": text[::-1]}) for text in texts(seed)]
    return "\n\n".join(records).encode()


def zst(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(content)


def write_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("a", "b"):
        table = pyarrow.table({"text": texts(ord(name))})
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=11)


def write_chats(folder: Path) -> None:
    with open(folder / "a.jsonl", "w", encoding="utf-8") as file:
        for text in texts(3):
            answer = {"role": "assistant", "content": f"a{text}"}
            file.write(json.dumps([{"role": "user", "content": "q"}, answer]) + "\n")


def write_files(suffix: str, pack: Callable[[bytes], bytes] = bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for number in range(3):
            (folder / f"{number}{suffix}").write_bytes(pack(lines(number)))

    return write


INPUTS = {
    "jsonl": (write_files(".jsonl"), ["--json-keys", "text", "more", "--append-eod"]),
    "gz": (write_files(".jsonl.gz", gzip.compress), []),
    "txt": (write_files(".txt"), []),
    "txt-lines": (write_files(".txt"), ["--txt-lines"]),
    "chat": (write_chats, ["--chat", "--chat-template", "zephyr"]),
    "zst": (write_files(".jsonl.zst", zst), []),
    "parquet": (write_parquet, []),
}


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
    INPUTS["jsonl"][0](tmp_path / "in")
    return tmp_path


@pytest.mark.parametrize(
    "kind",
    [
        "jsonl",
        "gz",
        "txt",
        "txt-lines",
        "chat",
        *(pytest.param(k, marks=PEERS) for k in ("zst", "parquet")),
    ],
)
def test_all_parts_are_what_one_machine_writes(tmp_path: Path, kind: str) -> None:
    write, flags = INPUTS[kind]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    assert preprocess(tmp_path, "one", *flags) == 0
    pairs = [path.stem.removeprefix("one") for path in (tmp_path / "out").glob("*.idx")]
    assert len(pairs) == (2 if kind == "jsonl" else 1)
    made = {}
    for tasks in (1, 2, 7):
        for task in reversed(range(tasks)):
            assert (
                preprocess(
                    tmp_path, f"x{tasks}", *flags, "--part-bytes", 6000, "--task", f"{task}/{tasks}"
                )
                == 0
            )
        for pair in pairs:
            folder = tmp_path / "out" / f"x{tasks}{pair}.parts"
            made[tasks, pair] = {
                name: content for name, content in files(folder).items() if name != "parts.json"
            }
            parts = sorted(path for path in folder.glob("*.bin"))
            assert len(parts) > 2 and made[tasks, pair] == made[1, pair]
            joined = b"".join(path.read_bytes() for path in parts)
            assert joined == (tmp_path / "out" / f"one{pair}.bin").read_bytes()
            output = tmp_path / f"merged{tasks}{pair}"
            assert exit_code(MERGE.main, "--input", folder, "--output-prefix", output) == 0
            for end in ("bin", "idx", "json"):
                once = (tmp_path / "out" / f"one{pair}.{end}").read_bytes()
                assert Path(f"{output}.{end}").read_bytes() == once
            read = IndexedDataset(str(folder).removesuffix(".parts")).identity
            assert read == IndexedDataset(tmp_path / "out" / f"one{pair}").identity


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


@pytest.mark.parametrize(
    ("call", "calls"),
    [*(("replace", number) for number in range(1, 9)), ("fsync", 3), ("fsync", 17)],
)
def test_a_kill_at_any_rename_leaves_no_wrong_part(corpus: Path, call: str, calls: int) -> None:
    """The process ends, without any tidying up, at its Nth call: each rename of the first part."""
    flags = ("--part-bytes", 40000, "--task", "0/1")
    assert preprocess(corpus, "once", *flags) == 0
    once = files(corpus / "out" / "once_text_document.parts")
    status = status_of_killed(call, calls, lambda: preprocess(corpus, "x", *flags))
    assert status == -signal.SIGKILL
    folder = corpus / "out" / "x_text_document.parts"
    for number in whole_parts(corpus) if (folder / "parts.json").exists() else []:
        for end in ("bin", "idx", "json"):
            assert (folder / f"{number:06d}.{end}").read_bytes() == once[f"{number:06d}.{end}"]
    assert preprocess(corpus, "x", *flags) == 0
    after = {path.name for path in folder.iterdir() if path.suffix != ".tmp"}
    assert after == once.keys() and once.items() <= files(folder).items()


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(12))
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


def test_two_processes_make_one_part_at_once(corpus: Path) -> None:
    """The second comes, and ends, at each moment of the first."""
    flags = ("--part-bytes", 40000, "--task", "0/1")
    assert preprocess(corpus, "once", *flags) == 0
    once = files(corpus / "out" / "once_text_document.parts")
    replace = os.replace
    for moment in range(1, 9):
        left = moment

        def meanwhile(source: str, target: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.replace = replace
                assert preprocess(corpus, "x", *flags) == 0
            replace(source, target)

        os.replace = meanwhile
        try:
            assert preprocess(corpus, "x", *flags) == 0
        finally:
            os.replace = replace
        folder = corpus / "out" / "x_text_document.parts"
        assert left <= 0 and files(folder) == once
        shutil.rmtree(folder)


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
    flags = ("--part-bytes", 3000, "--task", "0/1")
    assert preprocess(corpus, "x", *flags) == 0
    before = files(corpus / "out")
    capsys.readouterr()
    for other, named in (
        (("--append-eod", *flags), "--append-eod"),
        (("--part-bytes", 9000, "--task", "0/1"), "--part-bytes"),
    ):
        assert preprocess(corpus, "x", *other) == 1
        problems.assert_problem(capsys.readouterr().err.strip(), "output-exists", named)
        assert files(corpus / "out") == before
    assert (
        preprocess(
            corpus, "x", "--append-eod", "--part-bytes", 9000, "--task", "0/1", "--overwrite"
        )
        == 0
    )
    assert preprocess(corpus, "once", "--append-eod", "--part-bytes", 9000, "--task", "0/1") == 0
    assert files(corpus / "out" / "x_text_document.parts") == files(
        corpus / "out" / "once_text_document.parts"
    )
    # an input that has changed is another one
    with open(corpus / "in" / "0.jsonl", "a", encoding="utf-8") as file:
        file.write('\n{"text": "one more"}\n')
    assert preprocess(corpus, "once", "--append-eod", "--part-bytes", 9000, "--task", "0/1") == 1


def test_parts_that_a_process_of_another_command_writes_are_not_replaced(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until it ends; those of the same command, which an array starts at once, are no matter."""
    flags = ("--part-bytes", 3000)
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


def test_a_bad_record_is_one_error_and_the_other_parts_are_made(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = corpus / "in" / "1.jsonl"
    content = file.read_bytes().split(b"\n")
    bad = len(content) - 9
    content[bad] = b"no JSON"
    file.write_bytes(b"\n".join(content))
    flags = ("--part-bytes", 3000)
    codes = [preprocess(corpus, "x", *flags, "--task", f"{task}/4") for task in range(4)]
    assert sorted(codes) == [0, 0, 0, 1]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    problems.assert_problem(line, "bad-record", file, "after byte")
    total = len(part_set.read_plan(str(corpus / "out" / "x_text_document")))
    assert 0 < len(whole_parts(corpus)) < total
    assert not list((corpus / "out").glob("*/*.making-*"))
    skip = ("--max-bad-records", 1)
    assert preprocess(corpus, "one", *skip) == 0
    for task in range(4):
        assert preprocess(corpus, "x", *flags, *skip, "--task", f"{task}/4") == 0
    assert len(whole_parts(corpus)) == total
    joined = b"".join(path.read_bytes() for path in sorted((corpus / "out").glob("x_*/*.bin")))
    assert joined == (corpus / "out" / "one_text_document.bin").read_bytes()
    (noted,) = (corpus / "out").glob("*/*.bad_records.jsonl")
    note = json.loads(noted.read_text())
    # line N after a byte of the file
    start = file.read_bytes()[: note["after_byte"]].count(b"\n")
    assert note["file"] == str(file) and start + note["line"] == bad + 1


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
