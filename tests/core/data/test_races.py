"""Several processes build the same indices at once, in two cache directories, and one is killed:
nobody notices."""

import hashlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data.index_cache import IndexCache
from tests.core.data.corpora import build_datasets, data_flags, write_corpus

FORK = multiprocessing.get_context("fork")
# writes, renames and locks of the entries that one start makes: killed before each of them in turn
STEPS = 14


def samples(prefixes: list[str], cache: str | None) -> str:
    """One hash of all training and validation samples of a weighted blend."""
    flags = data_flags(
        data_path=["1", prefixes[0], "2", prefixes[1]], split="90,10,0", data_cache_path=cache
    )
    train, valid, _ = build_datasets(
        flags, sequence_length=32, seed=3, vocab_size=1000, eod=999, sizes=(400, 40, 0)
    )
    digest = hashlib.sha256()
    for dataset in (train, valid):
        for k in range(len(dataset)):
            digest.update(dataset[k].tobytes())
    return digest.hexdigest()


def start(
    prefixes: list[str], cache: str, results, die_at: int | None = None
) -> multiprocessing.Process:
    process = FORK.Process(target=_run, args=(prefixes, cache, results, die_at))
    process.start()
    return process


def _run(prefixes, cache, results, die_at) -> None:
    count = 0

    def counting(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    if die_at is not None:  # in this process alone: it is a fork
        os.replace = counting(os.replace)
        np.save = counting(np.save)
        os.open = counting(os.open)
    results.put(samples(prefixes, cache))
    results.close()
    results.join_thread()


def one_round(folder: Path, number: int) -> None:
    """New data at the same paths, caches kept from the round before; four processes, one is killed
    and started again."""
    random = np.random.default_rng(number)
    lengths = [random.integers(1, 60, 300), random.integers(1, 60, 200)]
    prefixes = [
        write_corpus(folder / name, some, seed=number)
        for name, some in zip("ab", lengths, strict=True)
    ]
    expected = samples(prefixes, None)
    caches = [str(folder / name) for name in ("node0", "node1")]
    results = FORK.Queue()
    victim_results = FORK.Queue()
    by_step = number % 2 == 0
    victim = start(
        prefixes, caches[0], victim_results, number // 2 % STEPS + 1 if by_step else None
    )
    others = [start(prefixes, caches[n % 2], results) for n in (1, 2, 3)]
    if not by_step:
        time.sleep(random.uniform(0, 0.05))
        victim.kill()
    victim.join(60)
    assert [results.get(timeout=60) for _ in others] == [expected] * 3
    again = start(prefixes, caches[0], results)
    assert results.get(timeout=60) == expected
    for process in (*others, again):
        process.join(60)
        assert process.exitcode == 0
    assert all(samples(prefixes, cache) == expected for cache in caches)


@pytest.mark.parametrize(
    "first, rounds",
    [
        (0, 1),
        pytest.param(1, 4, marks=pytest.mark.campaign),
        pytest.param(5, 45, marks=pytest.mark.sweep),
    ],
)
def test_one_of_four_is_killed_while_they_build(tmp_path, capfd, first, rounds):
    for number in range(first, first + rounds):
        one_round(tmp_path, number)
    assert "rebuilt" not in capfd.readouterr().out


def test_one_builds_and_the_others_wait(tmp_path):
    """Of four processes with one cache directory, one writes; the lock file is gone when they are
    done."""
    prefixes = [write_corpus(tmp_path / name, [9] * 200, seed=1) for name in "ab"]
    written = FORK.Value("i", 0)

    def build() -> None:
        store = IndexCache.store

        def counting(*args):
            with written.get_lock():
                written.value += 1
            time.sleep(0.05)
            return store(*args)

        IndexCache.store = counting
        samples(prefixes, str(tmp_path / "cache"))

    processes = [FORK.Process(target=build) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert written.value == 6  # two corpora and a blend, each for train and valid
    assert not list((tmp_path / "cache").glob("*.lock")) and not list(
        (tmp_path / "cache").glob("*.tmp")
    )


def test_without_locks_all_build(tmp_path, monkeypatch):
    """Some network filesystems have none."""

    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    prefixes = [write_corpus(tmp_path / name, [9] * 200, seed=1) for name in "ab"]
    assert samples(prefixes, str(tmp_path / "cache")) == samples(prefixes, None)
