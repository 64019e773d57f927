"""File systems as clusters have them (cluster_fs.cpp): preprocessing, index cache, save, retention
and resume give the same files as on a local disk, or one true message."""

import hashlib
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkrun import ROOT
from tests.load_tool import exit_code, load_tool
from tests.runs import allow_workers, train

FAULTS = ("nolocks", "nofallocate", "ebusy", "silly", "late", "estale")
ALL_BUT_ESTALE = "+".join(FAULTS[:-1])
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 210 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 8 --lr 0.003 "
    "--lr-decay-iters 4 --log-interval 1 --eval-interval 3 --eval-iters 1 --num-workers 1 --device "
    "cpu --split 90,10,0 --save-interval 1 --keep-last 2 --use-distributed-optimizer"
).split()
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py".split()


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = str(tmp_path_factory.mktemp("shim") / "cluster_fs.so")
    source = str(Path(__file__).with_name("cluster_fs.cpp"))
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-std=c++17", "-o", library, source, "-ldl"], check=True
    )
    return library


class Host:
    """A folder whose file system has a fault, and programs that run on it."""

    def __init__(self, folder: Path, shim: str, fault: str):
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._log = folder / "emulated"
        faulty = {"FAULTY": fault, "FAULTY_ROOT": str(self.disk), "FAULTY_LOG": str(self._log)}
        self._environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._environment |= faulty | {"LD_PRELOAD": shim} if fault else {}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    @property
    def emulated(self) -> int:
        """4-KiB writes by which glibc would have emulated fallocate."""
        return self._log.stat().st_size if self._log.exists() else 0

    def sums(self, pattern: str) -> dict[str, str]:
        return {
            str(path.relative_to(self.disk)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.disk.glob(pattern))
        }


def write_input(path: Path) -> None:
    numbers = random.Random(1)
    lines = [
        '{"text": "%s"}' % " ".join(str(numbers.randrange(40)) for _ in range(30))  # noqa: UP031
        for _ in range(300)
    ]
    path.write_text("\n".join(lines) + "\n")


def preprocessing(host: Host) -> list[str]:
    write_input(host.disk / "text.jsonl")
    flags = "--tokenizer-type NullTokenizer --vocab-size 210 --append-eod --workers 2".split()
    return [
        *("--input", str(host.disk / "text.jsonl"), "--output-prefix", str(host.disk / "d")),
        *flags,
    ]


def training(host: Host, data: str, until: int) -> list[str]:
    run = str(host.disk / "run")
    paths = ["--save", run, "--load", run, "--data-cache-path", str(host.disk / "cache")]
    more = ["--data-path", data, "--train-iters", "4", "--exit-interval", str(until)]
    return [*MODEL, *paths, *more]


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Host:
    """The same on a local disk."""
    host = Host(tmp_path_factory.mktemp("local"), "", "")
    assert exit_code(load_tool("preprocess_data").main, *preprocessing(host)) == 0
    words = training(host, str(host.disk / "d_text_document"), 4)
    train(host.disk / "log", words, 2, hook=allow_workers)
    return host


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(ALL_BUT_ESTALE, marks=pytest.mark.campaign),
        *(pytest.param(fault, marks=pytest.mark.sweep) for fault in FAULTS),
    ],
)
def test_same_files_or_one_message(tmp_path, shim, local, fault):
    host = Host(tmp_path, shim, fault)
    answer = host.run("tools/preprocess_data.py", *preprocessing(host))
    said = answer.stdout + answer.stderr
    if fault == "estale":  # of a file that is being read: nobody knows what is in it now
        assert answer.returncode == 1 and "Traceback" not in said
        assert said.count("[file-not-readable]") == 1
    else:
        assert answer.returncode == 0, said
        assert host.sums("d_*") == local.sums("d_*")
        assert ("[no-file-locks]" in said) == ("nolocks" in fault)
        assert not (host.disk / "d.unfinished").exists()
    data = str(local.disk / "d_text_document")
    for until in (2, 4):
        answer = host.run(*TORCHRUN, *training(host, data, until))
        assert answer.returncode == 0, answer.stdout + answer.stderr
    kept = host.sums("run/iter_*/*.safetensors")
    assert kept == local.sums("run/iter_*/*.safetensors") and len(kept) == 4
    assert host.sums("cache/*.npy") == local.sums("cache/*.npy")
    assert host.emulated == 0
