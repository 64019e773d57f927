"""Training from an S3 server whose answers take 20 ms: the losses of a disk, no waiting after the
warm-up, and the same from where a killed run stopped."""

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from megatron.addons.object_storage import block_cache, mirror
from megatron.addons.object_storage.tests.s3_proxy import CUT, FAIL, HANG, SHORT, Proxy, proxy
from megatron.addons.object_storage.tests.s3_server import serving
from tests.core.data.corpora import write_corpus
from tests.forkrun import RanksFailed
from tests.runs import SMALL, allow_workers, train, with_flags

BLOCK = 16 << 10
ITERATIONS = 30
WARM_UP = 6
GIB = 1 << 30
FLAGS = with_flags(
    SMALL,
    *f"--train-iters {ITERATIONS} --seq-length 256 --max-position-embeddings 256".split(),
    *"--hidden-size 64 --split 90,10,0 --eval-interval 5 --num-workers 1".split(),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """2.4 MB of tokens, 145 blocks."""
    lengths = np.random.default_rng(0).integers(50, 1500, 1500).tolist()
    return write_corpus(tmp_path_factory.mktemp("disk") / "c", lengths, seed=1, vocab=210)


@pytest.fixture(scope="module")
def bucket(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Proxy]]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with serving(tmp_path_factory.mktemp("moto")) as url, pytest.MonkeyPatch.context() as patch:
        files = fsspec.core.url_to_fs(url)[0]
        for end in ("bin", "idx"):
            files.put_file(f"{corpus}.{end}", f"bucket/data/c.{end}")
        with proxy(os.environ["AWS_ENDPOINT_URL"]) as server:
            patch.setenv("AWS_ENDPOINT_URL", server.address)
            yield f"{url}/data/c", server


def small_blocks() -> None:
    """A hook."""
    allow_workers()
    block_cache.BLOCK_BYTES = mirror.BLOCK_BYTES = BLOCK


def impatient() -> None:
    """A hook: requests that hang are given up soon, and so are stores."""
    small_blocks()
    block_cache.ATTEMPT = 2.0
    block_cache.DEADLINE = 3.0


def from_store(url: str, folder: Path, blocks: int, ahead: int) -> list[str]:
    """The flags of a cache of so many blocks."""
    bound = blocks * (BLOCK + block_cache.PAGE) / GIB
    return [
        *("--data-path", url, "--object-storage-cache-path", str(folder / "cache")),
        *("--object-storage-cache-gib", str(bound), "--object-storage-prefetch", str(ahead)),
    ]


def filled(folder: Path) -> int:
    sizes = [path.stat().st_size for path in folder.glob("cache/blocks/*/*")]
    return sum(-(-size // block_cache.PAGE) * block_cache.PAGE for size in sizes)


@pytest.mark.campaign
def test_nothing_is_waited_for_after_the_warm_up(
    bucket: tuple[str, Proxy], corpus: str, tmp_path: Path
) -> None:
    url, server = bucket
    disk = train(tmp_path / "disk", [*FLAGS, "--data-path", corpus], hook=allow_workers)
    waits = {}
    for ahead in (0, WARM_UP):
        folder = tmp_path / str(ahead)
        run = train(folder, [*FLAGS, *from_store(url, folder, 120, ahead)], hook=small_blocks)
        assert run.series("lm_loss", "grad_norm") == disk.series("lm_loss", "grad_norm")
        assert run.evaluations == disk.evaluations
        assert 0 < filled(folder) <= 120 * (BLOCK + block_cache.PAGE)
        waits[ahead] = run.series("blocks_missed", "data_wait_seconds")
    assert sum(missed for missed, _ in waits[0][WARM_UP:]) > 20
    assert sum(seconds for _, seconds in waits[0][WARM_UP:]) > 20 * server.latency
    assert waits[WARM_UP][WARM_UP:] == [(0, 0.0)] * (ITERATIONS - WARM_UP)


@pytest.mark.campaign
def test_answers_that_fail_are_asked_for_again(
    bucket: tuple[str, Proxy], corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = bucket
    flags = with_flags(FLAGS, "--train-iters", "8")
    disk = train(tmp_path / "disk", [*flags, "--data-path", corpus], hook=allow_workers)
    spoiled = {3: FAIL, 5: CUT, 7: SHORT, 11: HANG}
    monkeypatch.setattr(server, "ranges", 0)
    monkeypatch.setattr(server, "spoil", lambda n: spoiled.get(n % 13))
    flags += from_store(url, tmp_path, 120, 4)
    run = train(tmp_path / "faults", flags, hook=impatient)
    assert run.series("lm_loss") == disk.series("lm_loss") and server.ranges > 26
    begin = server.ranges
    monkeypatch.setattr(server, "spoil", lambda n: FAIL if n > begin + 30 else None)
    with pytest.raises(RanksFailed) as failed:
        train(tmp_path / "down", [*flags, "--seed", "7"], hook=impatient)
    assert "[object-store-failed]" in str(failed.value) and "s3://bucket/data/c.bin" in str(
        failed.value
    )


@pytest.mark.sweep
def test_a_killed_run_goes_on_with_what_it_fetched(
    bucket: tuple[str, Proxy], corpus: str, tmp_path: Path
) -> None:
    """Two ranks of a host, which share the cache."""
    url, server = bucket
    flags = [*with_flags(FLAGS, "--train-iters", "14"), "--save-interval", "4"]
    disk = train(tmp_path / "disk", [*flags, "--data-path", corpus], 2, hook=allow_workers)
    folder = tmp_path / "store"
    flags += from_store(url, tmp_path, 120, 4)
    flags += ["--save", str(folder / "save"), "--load", str(folder / "save")]
    train(folder, flags, 2, kill_at=10, hook=small_blocks)
    before = server.ranges
    assert list((tmp_path / "cache" / "windows").iterdir())
    run = train(folder, flags, 2, hook=small_blocks)
    assert run.resumes == [8] and run.series("lm_loss") == disk.series("lm_loss")
    assert filled(tmp_path) <= 120 * (BLOCK + block_cache.PAGE)
    assert server.ranges - before < 80
