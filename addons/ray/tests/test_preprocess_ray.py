"""tools/preprocess_data.py --cluster ray: what Ray's tasks make is what one machine writes, whatever
was killed on the way; and the rest of the tool without Ray."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.faults.ranks import free_port
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.parts import part_set
from tests import problems
from tests.core.data.vocabularies import write_bpe
from tests.load_tool import exit_code, load_tool

PREPROCESS = load_tool("preprocess_data")
PROGRAM = Path(str(PREPROCESS.__file__))
FLAGS = ["--tokenizer-type", "ByteTokenizer"]
PEERS = pytest.mark.peers
WAIT = 400  # seconds for a driver to end, on a busy machine
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
cluster = Cluster(True, head_node_args={**head, "ray_client_server_port": int(sys.argv[1])})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of one machine; tests add others."""
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_raylet_start_wait_time_s"] = "300"  # the machine may be busy
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    yield made
    made.shutdown()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Texts in JSON Lines, parquet and as conversations, in folders of their names."""
    draw = random.Random(1)
    texts = ["".join(draw.choices("ab é", k=draw.randint(0, 150))) for _ in range(120)]
    (tmp_path / "jsonl").mkdir()
    for number in range(2):
        lines = [json.dumps({"text": text, "more": text[::-1]}) for text in texts[number::2]]
        (tmp_path / "jsonl" / f"{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "chat").mkdir()
    turns = [{"role": "user", "content": "q"}]
    with open(tmp_path / "chat" / "a.jsonl", "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps([*turns, {"role": "assistant", "content": f"a{text}"}]) + "\n")
    (tmp_path / "out").mkdir()
    return tmp_path


def words(folder: Path, kind: str, prefix: str, *more: object) -> list[str]:
    divided = "--task" in more or "--cluster" in more
    parts = ["--part-bytes", "3000"] if divided and "--part-bytes" not in more else []
    return [
        *("--input", *map(str, sorted((folder / kind).iterdir()))),
        *("--output-prefix", str(folder / "out" / prefix), *FLAGS, *parts, *map(str, more)),
    ]


def run(folder: Path, kind: str, prefix: str, *more: object) -> int:
    return exit_code(PREPROCESS.main, *words(folder, kind, prefix, *more))


def ray(cluster: Any) -> tuple[str, ...]:
    return ("--cluster", "ray", "--cluster-address", cluster.address)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def assert_same(folder: Path, one: str, other: str, level: str = "text_document") -> None:
    made, expected = (folder / "out" / f"{name}_{level}.parts" for name in (other, one))
    assert files(made) == files(expected)
    assert not list(made.glob("*.making-*"))


def write_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (folder / "parquet").mkdir()
    table = pyarrow.table({"text": [f"{number} " * (number % 50) for number in range(300)]})
    parquet.write_table(table, folder / "parquet" / "a.parquet", row_group_size=11)


@PEERS
@pytest.mark.parametrize(
    ("kind", "level", "flags"),
    [
        ("jsonl", "more_document", ["--json-keys", "more", "--append-eod"]),
        pytest.param(
            *("parquet", "text_document", ["--metadata-keys", "text"]), marks=pytest.mark.campaign
        ),
        pytest.param(
            *("chat", "chat_document", ["--chat", "--chat-template", "zephyr"]),
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_the_parts_are_what_one_machine_writes(
    cluster: Any, corpus: Path, kind: str, level: str, flags: list[str]
) -> None:
    if kind == "parquet":
        write_parquet(corpus)
    assert run(corpus, kind, "once", *flags, "--task", "0/1", "--workers", 1) == 0
    assert run(corpus, kind, "x", *flags, *ray(cluster)) == 0
    assert len(part_set.read_plan(str(corpus / "out" / f"x_{level}"))) > 2
    assert_same(corpus, "once", "x", level)
    assert run(corpus, kind, "one", *flags, "--workers", 1) == 0
    read = IndexedDataset(corpus / "out" / f"x_{level}").identity
    assert read == IndexedDataset(corpus / "out" / f"one_{level}").identity


@PEERS
def test_a_bad_record_fails_its_part_and_the_others_are_made(
    cluster: Any, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = corpus / "jsonl" / "1.jsonl"
    content = file.read_bytes().split(b"\n")
    content[-9] = b"no JSON"
    file.write_bytes(b"\n".join(content))
    assert run(corpus, "jsonl", "x", *ray(cluster)) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    problems.assert_problem(line, "bad-record", file, "after byte")
    plan = part_set.read_plan(str(corpus / "out" / "x_text_document"))
    missing = [number for number in range(len(plan)) if not plan.record(number)]
    assert len(missing) == 1
    # with the flag that skips it, only that part is not whole
    assert run(corpus, "jsonl", "x", "--max-bad-records", 1, *ray(cluster)) == 0
    assert f"1 of {len(plan)} parts" in capsys.readouterr().out
    assert run(corpus, "jsonl", "once", "--max-bad-records", 1, "--task", "0/1") == 0
    assert_same(corpus, "once", "x")


@PEERS
def test_a_cluster_that_does_not_answer_is_one_error(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    started = time.monotonic()
    address = ("--cluster", "ray", "--cluster-address", "ray://127.0.0.1:1")
    assert run(corpus, "jsonl", "x", *address) == 1
    problems.assert_problem(capsys.readouterr().err.strip(), "cluster-not-reached", address[-1])
    assert time.monotonic() - started < 15


def test_without_the_package_and_its_module(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is looked for before anything is written; --task needs neither."""
    monkeypatch.setitem(sys.modules, "ray", None)
    address = ("--cluster-address", "ray://127.0.0.1:1")
    for lacking, more, flag in (("ray", (), "--cluster ray"), ("grpc", address, address[0])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name, lacks=lacking: name != lacks)
            assert run(corpus, "jsonl", "x", "--cluster", "ray", *more) == 2
        problems.assert_problem(capsys.readouterr().err.strip(), "package-missing", flag)
    assert not list((corpus / "out").iterdir())
    monkeypatch.setitem(sys.modules, "megatron.addons.ray.part_engine", None)
    assert run(corpus, "jsonl", "x", "--task", "0/1", "--workers", 1) == 0


def test_flags_that_do_not_go_together(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    for flags, code in (
        (("--cluster", "ray", "--task", "0/2"), "flags-exclude-each-other"),
        (("--cluster", "ray", "--partitions", 2), "flags-exclude-each-other"),
        (("--cluster-address", "auto", "--task", "0/2"), "flag-needs-other-flag"),
    ):
        assert run(corpus, "jsonl", "x", *flags) == 2
        problems.assert_problem(capsys.readouterr().err.strip(), code)


def children(process: int) -> list[int]:
    """The processes that this one has started."""
    started = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            started += map(int, task.read_text().split())
    return started


def descendants(process: int) -> list[int]:
    """The processes below this raylet that make parts, and what they have forked."""
    found = []
    for child in children(process):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ray::_make"):
                found.append(child)
            found += descendants(child)
    return found


def raylet_of(node: Any) -> int:
    """The process of this machine of the cluster that starts all others."""
    (process,) = (info.process.pid for info in node.all_processes["raylet"])
    return process


def driver(
    folder: Path, prefix: str, *more: object, environ: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *words(folder, "jsonl", prefix, *more)],
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def made_once(corpus: Path, copies: int, part_bytes: int) -> tuple[object, ...]:
    """One machine makes `once` of so many copies of the first file; the flags of its parts."""
    file = corpus / "jsonl" / "0.jsonl"
    file.write_text((file.read_text() + "\n") * copies)
    flags = ("--part-bytes", part_bytes)
    assert run(corpus, "jsonl", "once", *flags, "--task", "0/1", "--workers", 1) == 0
    return flags


def kill_one(cluster: Any, nodes: list[Any], draw: random.Random) -> bool:
    """Kill a process at work, or a whole machine, at random; whether there was one."""
    if nodes and draw.random() < 0.3:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        return True
    raylets = map(raylet_of, [cluster.head_node, *nodes])
    found = [process for raylet in raylets for process in descendants(raylet)]
    if not found:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice(found), signal.SIGKILL)
    return True


@PEERS
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.campaign),
        *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 8)),
    ],
)
def test_four_kills_of_processes_and_machines(cluster: Any, corpus: Path, seed: int) -> None:
    """Of 0.1 to 4 seconds of work, and a driver that is killed at last and started again."""
    draw = random.Random(seed)
    flags = made_once(corpus, 80, part_bytes=8000)
    nodes = [cluster.add_node(num_cpus=1)]
    cluster.wait_for_nodes()
    try:
        started = driver(corpus, "x", *flags, *ray(cluster))
        kills = 0
        while kills < 4 and started.poll() is None:
            time.sleep(draw.uniform(0.1, 1))
            kills += kill_one(cluster, nodes, draw)
        if seed % 3 == 0:
            started.kill()
        output, errors = started.communicate(timeout=WAIT)
        assert started.returncode == (0 if seed % 3 else -signal.SIGKILL), output + errors
        assert kills == 4
        again = driver(corpus, "x", *flags, *ray(cluster))
        output, errors = again.communicate(timeout=WAIT)
        assert again.returncode == 0, output + errors
    finally:
        for node in nodes:
            cluster.remove_node(node)
    assert_same(corpus, "once", "x")


def limit_files(node: Any, size: int) -> None:
    """Let no process that makes parts on this machine of the cluster write files beyond `size`
    bytes."""
    for process in children(raylet_of(node)):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if command.startswith(b"ray::") or b"default_worker" in command:
                _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
                resource.prlimit(process, resource.RLIMIT_FSIZE, (size, most))


@contextlib.contextmanager
def full_disk(node: Any) -> Iterator[None]:
    """Meanwhile this machine of the cluster has no room for the large parts."""
    ended = threading.Event()

    def limit() -> None:
        while not ended.wait(0.01):
            limit_files(node, 50_000)

    thread = threading.Thread(target=limit)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        limit_files(node, resource.RLIM_INFINITY)


@PEERS
@pytest.mark.campaign
def test_a_full_disk_on_every_machine(cluster: Any, corpus: Path) -> None:
    """One error for each part that was tried, nothing that seems whole, nothing left behind; and
    with room the same command makes them."""
    flags = made_once(corpus, 300, part_bytes=150_000)
    parts = corpus / "out" / "x_text_document.parts"
    with full_disk(cluster.head_node):
        started = driver(corpus, "x", *flags, *ray(cluster))
        output, errors = started.communicate(timeout=WAIT)
    assert started.returncode == 1, output + errors
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) >= 10 and set(problems.codes_of(lines)) == {"file-operation-failed"}
    plan = part_set.read_plan(str(corpus / "out" / "x_text_document"))
    whole = [f"{number:06d}" for number in range(len(plan)) if plan.record(number)]
    assert len(whole) < len(plan) - 9
    expected = {f"{part}.{end}" for part in whole for end in ("bin", "idx", "json")}
    assert {path.name for path in parts.iterdir()} == {"parts.json", *expected}
    assert run(corpus, "jsonl", "x", *flags, *ray(cluster)) == 0
    assert_same(corpus, "once", "x")


@PEERS
@pytest.mark.campaign
def test_a_driver_that_is_stopped_leaves_nothing_unfinished(cluster: Any, corpus: Path) -> None:
    flags = made_once(corpus, 400, part_bytes=4_000_000)
    parts = corpus / "out" / "x_text_document.parts"
    started = driver(corpus, "x", *flags, *ray(cluster))
    while not list(parts.glob("*.making-*")) and started.poll() is None:
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    output, errors = started.communicate(timeout=WAIT)
    assert started.returncode == 130, output + errors
    assert not list(parts.glob("*.making-*"))
    assert run(corpus, "jsonl", "x", *flags, *ray(cluster)) == 0
    assert_same(corpus, "once", "x")


@PEERS
@pytest.mark.campaign
def test_a_cluster_that_asks_for_a_token(corpus: Path) -> None:
    """Reached at its own address and through Ray's client, from processes that do not find this
    package by themselves; another token is one error."""
    pytest.importorskip("ray")
    (corpus / "path" / "megatron").mkdir(parents=True)
    (corpus / "path" / "megatron" / "__init__.py").write_text("")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 32}
    port = free_port()
    started = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(port)],
        env={**os.environ, **token, "PYTHONPATH": str(corpus / "path")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        own = started.stdout.readline().strip()
        assert run(corpus, "jsonl", "once", "--task", "0/1", "--workers", 1) == 0
        for prefix, address in (("own", own), ("client", f"ray://127.0.0.1:{port}")):
            environ = {**token, "RAY_ADDRESS": address}
            done = driver(corpus, prefix, "--cluster", "ray", environ=environ)
            output, errors = done.communicate(timeout=WAIT)
            assert done.returncode == 0, output + errors
            assert_same(corpus, "once", prefix)
        flags = ("--cluster", "ray", "--cluster-address", own)
        done = driver(corpus, "x", *flags, environ={**token, "RAY_AUTH_TOKEN": "b" * 32})
        _, errors = done.communicate(timeout=WAIT)
        assert done.returncode == 1
        problems.assert_problem(errors.splitlines()[-1], "cluster-not-reached", own)
    finally:
        started.communicate("")


@PEERS
@pytest.mark.campaign
def test_the_example_on_one_machine(corpus: Path) -> None:
    """Ray is started for it, and is gone at its end."""
    pytest.importorskip("ray")
    script = PROGRAM.parents[1] / "examples" / "cluster_data" / "ray.sh"
    write_bpe(corpus)
    environ = {"INPUT": f"{corpus}/jsonl/*.jsonl", "PREFIX": f"{corpus}/x"}
    environ |= {"DATA": str(corpus), "PYTHON": sys.executable}
    done = subprocess.run(
        ["sh", script, "--part-bytes", "3000"],
        cwd=PROGRAM.parents[1],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = part_set.read_plan(f"{corpus}/x_text_document")
    assert len(list(found.records())) == len(found) > 2
