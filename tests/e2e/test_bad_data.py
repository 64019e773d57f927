"""Damaged data meet training: one line that names the file and what to do, exit code 1, no process
left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.preprocess.dataset_writer import IndexedDatasetBuilder
from megatron.training import loop
from tests.data.vocabularies import MERGES, write_bpe
from tests.e2e.programs import fork_program
from tests.forkrun import ROOT, run_ranks
from tests.runs import SMALL, with_flags

DOCUMENTS = 400
LENGTH = 1000


def write(prefix: Path, dtype: type = np.uint16, empty: int = 0) -> str:
    """A corpus of DOCUMENTS documents of LENGTH ids below 200, and `empty` ones without any among
    them."""
    random = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for number in range(DOCUMENTS):
            builder.add_document(random.integers(0, 200, LENGTH), [LENGTH])
            if number < empty:
                builder.add_document([], [0])
                builder.end_document()
    return str(prefix)


def program(
    rank: int, world: int, folder: Path, words: list[str], before: Callable[[], None] | None
) -> tuple:
    running = fork_program(words, folder, before=before)
    return running.end(), running.out, running.err, running.left_behind()


def trained(
    folder: Path, prefix: str, *extra: str, before: Callable[[], None] | None = None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run over the data; nobody is left."""
    words = with_flags(
        [*SMALL, "--data-path", prefix, "--train-iters", "8", "--eval-iters", "0"], *extra
    )
    code, out, err, left = run_ranks(1, program, folder, words, before)[0]
    assert left == [] and "Traceback" not in err
    return code, out, err


def strange_ids(prefix: str) -> None:
    tokens = np.fromfile(prefix + ".bin", "<u2")
    tokens[1 << 18 :] = 65000
    tokens.tofile(prefix + ".bin")


DAMAGE = {
    "cut .bin": (
        lambda prefix: os.truncate(prefix + ".bin", 5000),
        ".bin: has 5000 bytes, its index requires 800000",
    ),
    "ids": (
        strange_ids,
        "is the id 65000, the vocabulary has 211; give the tokenizer it was preprocessed with",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_pairs(tmp_path, kind):
    damage, words = DAMAGE[kind]
    prefix = write(tmp_path / "text")
    damage(prefix)
    code, _, err = trained(tmp_path / "run", prefix)
    assert (
        code == 1
        and err.startswith(f"error: {prefix}.bin: ")
        and err.count("\n") == 1
        and words in err
    )
    assert "tools/preprocess_data.py" in err


def cut_in_iteration_3(path: str) -> None:
    """Cut a file while the run reads it: a .bin to 1000 bytes, an index, which is mapped, to
    none."""
    train_one = loop.Trainer.train_one

    def cutting(self, iteration, samples):
        if iteration == 3:
            os.truncate(path, 1000 if path.endswith(".bin") else 0)
        return train_one(self, iteration, samples)

    loop.Trainer.train_one = cutting


def fail_disk(path: str) -> None:
    """The disk of a .bin fails after 30 reads of this process."""
    read = os.pread
    count = 0

    def failing(file, size, start):
        nonlocal count
        if os.readlink(f"/proc/self/fd/{file}") == path:
            count += 1
            if count > 30:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, size, start)

    os.pread = failing


class Hook:
    """A function and its argument, as one thing that can be sent to another process."""

    def __init__(self, function: Callable[[str], None], path: str):
        self.function = function
        self.path = path

    def __call__(self) -> None:
        self.function(self.path)


@pytest.mark.parametrize("order", ["megatron", "epoch"])
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (cut_in_iteration_3, "was cut short while it is in use: it has 1000 bytes"),
        (fail_disk, "cannot be read (Input/output error); its disk or network fails"),
    ],
)
def test_a_bin_that_fails_while_it_is_read(tmp_path, order, workers, hook, words):
    """In this process and in a data worker: the same line. Memory that is mapped would end either
    with SIGBUS."""
    prefix = write(tmp_path / "text")
    more = ["--num-workers", workers, "--train-iters", "40", "--data-order", order]
    code, out, err = trained(tmp_path / "run", prefix, *more, before=Hook(hook, prefix + ".bin"))
    assert (
        code == 1
        and err.startswith(f"error: {prefix}.bin: ")
        and err.count("\n") == 1
        and words in err
    )
    assert "start again from the last checkpoint" in err and " iteration        1/" in out


@pytest.mark.parametrize(
    ("what", "workers"),
    [
        ("the index", "0"),
        ("the index", "2"),
        ("a cached index array", "0"),
        pytest.param("a cached index array", "2", marks=pytest.mark.campaign),
    ],
)
def test_an_index_cut_short_while_it_is_mapped(tmp_path, what, workers):
    """Touching what a mapped file has lost is SIGBUS: its size is looked at before."""
    prefix = write(tmp_path / "text")
    cut = prefix + ".idx"
    if what != "the index":
        assert trained(tmp_path / "first", prefix, "--train-iters", "40")[0] == 0
        cut = max(map(str, Path(prefix, "cache").rglob("*document_index.npy")), key=os.path.getsize)
    more = ["--num-workers", workers, "--train-iters", "40"]
    code, out, err = trained(tmp_path / "run", prefix, *more, before=Hook(cut_in_iteration_3, cut))
    says = [f"error: {cut}: was cut short while it is in use: it has 0 bytes"]
    # one may be between its look at the size and its reading just when the file is cut
    if workers != "0":
        says.append("error: a data worker died (")
    assert code == 1 and err.startswith(tuple(says)) and "was cut short" in err, (code, out, err)
    assert err.count("\n") == 1 and "start again from the last checkpoint" in err, err


def test_another_vocabulary_is_refused(tmp_path):
    """A pair that preprocess_data.py made: the run with its vocabulary trains, one with another
    merge is refused."""
    said = {}
    for name, merges in (("mine", MERGES), ("other", [*MERGES, "x y"])):
        (tmp_path / name).mkdir()
        vocab, merge = write_bpe(tmp_path / name, merges)
        said[name] = [
            "--tokenizer-type",
            "GPT2BPETokenizer",
            "--vocab-file",
            vocab,
            "--merge-file",
            merge,
        ]
    (tmp_path / "text.jsonl").write_text(
        "".join(f'{{"text": "{number} in the cab"}}\n' for number in range(500))
    )
    words = [
        "--input",
        str(tmp_path / "text.jsonl"),
        "--output-prefix",
        str(tmp_path / "x"),
        "--workers",
        "1",
    ]
    subprocess.run(
        [sys.executable, ROOT / "tools/preprocess_data.py", *words, *said["mine"], "--append-eod"],
        check=True,
    )
    prefix = str(tmp_path / "x_text_document")
    run = [
        word
        for word in SMALL
        if word not in ("--tokenizer-type", "NullTokenizer", "--vocab-size", "211")
    ]
    run += ["--data-path", prefix, "--train-iters", "8", "--eval-iters", "0"]
    ends = [run_ranks(1, program, tmp_path / name, [*run, *said[name]], None)[0] for name in said]
    assert [(code, left) for code, _, _, left in ends] == [(0, []), (2, [])], ends
    err = ends[1][2]
    assert err.startswith(
        f"error: --data-path {prefix}: was made by GPT2BPETokenizer (fingerprint "
    )
    assert err.count("\n") == 1
    assert (
        "give the vocabulary it was made with, or tokenize again" in err
        and " iteration " not in ends[1][1]
    )


def test_empty_documents_train_and_nothing_else_does_not(tmp_path):
    assert trained(tmp_path / "run", write(tmp_path / "text", empty=300))[0] == 0
    prefix = str(tmp_path / "none")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(50):
            builder.add_document([], [0])
    code, _, err = trained(tmp_path / "again", prefix)
    assert (
        code == 1 and err.count("\n") == 1 and f"error: {prefix}" in err and "hold 0 tokens" in err
    )
