#!/usr/bin/env python
"""How soon data sets are ready and how fast samples are read, compared with megatron-core's.

    data_startup.py start     a set of many files with 2e12 tokens in sparse .bin files, in epoch
                              order: with --documents, then with a tenth of them; and one pair of 10
                              million documents in Megatron's order, without and with a cache, ours
                              and megatron-core's. Every figure is a process of its own; before it
                              the files are dropped from the page cache (posix_fadvise), unless it
                              says "cached". "checksums": with a PREFIX.json that has the checksums
                              of the files, in turns with the same files without.
    data_startup.py resume    the first micro-batch of iteration 10^6, as a resumed run reads it:
                              data sets, sampler and DataLoader are built again (no optimizer, no
                              checkpoint), without and with data workers.
    data_startup.py getitem   samples per second of one process at --seq-length, in turns; best of
                              --rounds.

Seconds are from after the imports to the first sample read, and of the whole process; memory is the
peak resident size. Needs 2.3 GB of disk for 1e8 documents, in --folder, where the set is kept for
the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
from megatron.data import index_helpers  # noqa: E402
from megatron.data.build import Splits  # noqa: E402
from megatron.data.gpt_dataset import GPTDataset  # noqa: E402
from megatron.data.indexed_dataset import HEADER, MAGIC, IndexedDataset, bin_path, idx_path  # noqa: E402
from megatron.data.pair_checksums import write_sums  # noqa: E402
from megatron.data.request import DataRequest  # noqa: E402
from megatron.data.sources import source_of  # noqa: E402

VOCAB = 50257
BATCH = 256  # samples of an iteration


def write_pair(prefix: str, lengths: np.ndarray, tokens: np.ndarray | None = None) -> None:
    """A pair of uint16, one sequence a document; without `tokens` the .bin is a hole."""
    pointers = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    total = int(pointers[-1]) + int(lengths[-1])
    with open(idx_path(prefix), "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, len(lengths), len(lengths) + 1))
        for array in (
            lengths.astype("<i4"),
            pointers * 2,
            np.arange(len(lengths) + 1, dtype="<i8"),
        ):
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())  # what is not on the disk cannot be put out of the cache
    with open(bin_path(prefix), "wb") as file:
        if tokens is not None:
            file.write(tokens.astype("<u2").data)
        file.truncate(2 * total)


def make_set(folder: Path, files: int, documents: int, tokens: int) -> Path:
    """A directory of pairs whose lengths are even random numbers around their mean; kept if it is
    there."""
    target = folder / f"set-{files}-{documents}-{tokens}"
    if not target.exists():
        partial = target.with_suffix(".making")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        random = np.random.default_rng(1)
        mean = tokens // documents
        for number in range(files):
            count = documents * (number + 1) // files - documents * number // files
            lengths = random.integers(1, 2 * mean, count, dtype=np.int32)
            write_pair(str(partial / f"part-{number:05d}"), lengths)
        partial.rename(target)
    return target


def with_checksums(folder: Path) -> Path:
    """The same files, linked, with a PREFIX.json each that has their checksums; kept if they are
    there."""
    target = folder.with_name(f"{folder.name}-checksums")
    if not target.exists():
        partial = target.with_suffix(".making")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for path in folder.iterdir():
            os.link(path, partial / path.name)
        for path in sorted(partial.glob("*.idx")):
            write_sums(str(path.with_suffix("")))
        partial.rename(target)
    return target


def forget(folder: Path) -> None:
    """Put all files below `folder` out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def our_flags(**given: object) -> SimpleNamespace:
    """The data flags with their defaults, changed by `given`."""
    names = (
        "data_path train_data_path valid_data_path test_data_path data_args_path "
        "per_split_data_args_path split data_cache_path"
    ).split()
    fixed = {
        "mock_data": False,
        "mid_level_dataset_surplus": 0.005,
        "data_order": "megatron",
        "multiple_validation_sets": False,
        "packed_samples": False,
    }
    return SimpleNamespace(**{**dict.fromkeys(names), **fixed, **given})


def build(flags: SimpleNamespace, samples: Sequence[int], seq_length: int) -> Splits:
    """This suite's data sets of train, valid and test."""
    request = DataRequest(
        sizes=samples, sequence_length=seq_length, seed=1, vocab_size=VOCAB, eod=VOCAB - 1
    )
    return source_of(flags).build(flags, request, [])


def megatron_core_dataset(prefix: str, seq_length: int, samples: int, cache: str | None) -> object:
    """megatron-core's GPTDataset of a whole pair."""
    from megatron.core.datasets import gpt_dataset, indexed_dataset, utils

    tokenizer = SimpleNamespace(
        vocab_size=VOCAB, eod=VOCAB - 1, pad=-1, unique_identifiers={"class": "none"}
    )
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_length,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        split="1,0,0",
        blend=([prefix], None),
        path_to_cache=cache,
        create_attention_mask=False,
    )
    corpus = indexed_dataset.IndexedDataset(prefix)
    sequences = np.arange(len(corpus.sequence_lengths), dtype=np.int32)
    return gpt_dataset.GPTDataset(corpus, prefix, sequences, samples, utils.Split.train, config)


def peak_kb() -> int:
    """Peak resident KB of this process since it was started (getrusage would count its parent's
    too)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def first_of(dataset: object, iteration: int, workers: int) -> None:
    """Read the first micro-batch of an iteration of 256 samples, as training does after a
    resume."""

    from megatron.config.plan.batch_size import build_batch_size_schedule
    from megatron.config.skip_ranges import SkipRanges
    from megatron.data.sampler import SequentialSampler
    from megatron.data.samples import Samples
    from megatron.training.batch import load_samples, training_samples

    batch = build_batch_size_schedule(micro_batch_size=4, global_batch_size=BATCH)
    sampler = SequentialSampler(len(dataset), 4, 0, 1)
    numbers = training_samples(sampler, batch, SkipRanges(), iteration, iteration + 10)
    samples = Samples(dataset, 1 << 32)
    next(load_samples(samples, numbers, workers))


def child(
    what: str,
    path: str,
    seq_length: int,
    samples: int,
    cache: str | None,
    iteration: int = 0,
    workers: int = 0,
) -> dict[str, float]:
    """Make the dataset in this process, read one sample, or an iteration's first; seconds since the
    imports and peak resident bytes."""
    if iteration:
        import megatron.training.batch  # noqa: F401
    if what == "megatron-core":
        import torch  # noqa: F401
        from megatron.core.datasets import gpt_dataset  # noqa: F401
    start = time.perf_counter()
    busy = time.process_time()
    base = peak_kb()
    if what == "megatron-core":
        megatron_core_dataset(path, seq_length, samples, cache)[0]
    else:
        flags = our_flags(
            data_path=[path],
            split="100,0,0" if what == "megatron" else "98,1,1",
            data_order=what,
            data_cache_path=cache,
        )
        datasets = build(flags, (samples, 0 if what == "megatron" else 1000, 0), seq_length)
        first_of(datasets[0], iteration, workers) if iteration else datasets[0][0]
    return {
        "seconds": time.perf_counter() - start,
        "busy": time.process_time() - busy,
        "peak_mb": peak_kb() / 1024,
        "own_mb": (peak_kb() - base) / 1024,
    }


def measured(
    what: str, path: Path, seq_length: int, samples: int, cache: Path | None = None, *more: int
) -> dict[str, float]:
    """`child` in a process of its own, with the seconds of the whole process."""
    words = [what, path, seq_length, samples, cache or "-", *more]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "child", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    whole = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{what}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]) | {"whole": whole}


def show(name: str, found: dict[str, float]) -> None:
    print(
        f"{name:69s} {found['seconds']:7.3f} s   processor {found['busy']:6.3f} s   whole process "
        f"{found['whole']:6.2f} s   peak {found['peak_mb']:6.0f} MB ({found['own_mb']:.0f} after "
        "imports)",
        flush=True,
    )


def start(args: argparse.Namespace) -> None:
    """The start-up table."""
    folder = Path(args.folder)
    best = {}
    for documents in (args.documents, args.documents // 10):
        data = make_set(folder, args.files, documents, args.tokens)
        sets = {"": data, ", checksums": with_checksums(data)}
        name = (
            f"epoch order, {args.files:,} files, {args.tokens:.0e} tokens, {documents:.0e} "
            "documents"
        )
        for state in ("cold", "cached"):
            runs = {what: [] for what in sets}
            for _ in range(args.rounds):
                for what, path in sets.items():
                    if state == "cold":
                        forget(path)
                    runs[what].append(measured("epoch", path, args.seq_length, 10**9))
            for what, found in runs.items():
                show(f"{name}{what}, {state}", min(found, key=lambda run: run["seconds"]))
            best[documents, state] = min(runs[""], key=lambda run: run["seconds"])
    for state in ("cold", "cached"):
        times = [
            best[documents, state]["seconds"]
            for documents in (args.documents, args.documents // 10)
        ]
        print(f"ten times the documents, {state}: {100 * (times[0] / times[1] - 1):+.1f} %")
    start_pair(args, folder)


def start_pair(args: argparse.Namespace, folder: Path) -> None:
    """The lines of one pair in Megatron's order."""
    plain = make_set(folder, 1, args.pair_documents, 1000 * args.pair_documents)
    pairs = {"megatron": plain, "megatron, checksums": with_checksums(plain)}
    if args.megatron_core:
        pairs["megatron-core"] = plain
    samples = 1000 * args.pair_documents // args.seq_length * 99 // 100
    for state in ("no index cache", "index cached"):
        runs: dict[str, list[dict[str, float]]] = {what: [] for what in pairs}
        for _ in range(args.rounds):
            for what, path in pairs.items():
                cache = Path(folder / f"cache-{what}")
                if state == "no index cache":
                    shutil.rmtree(cache, ignore_errors=True)
                order = what.partition(",")[0]
                runs[what].append(
                    measured(order, path / "part-00000", args.seq_length, samples, cache)
                )
        for what, found in runs.items():
            kind = "its helpers" if what == "megatron-core" else index_helpers.IMPLEMENTATION
            name = f"{what}, {args.pair_documents:.0e} documents, {kind}, {state}"
            show(name, min(found, key=lambda run: run["seconds"]))


def resume(args: argparse.Namespace) -> None:
    """The first micro-batch of an iteration, in both orders, by this process and by two workers."""
    folder = Path(args.folder)
    data = make_set(folder, args.files, args.documents, args.tokens)
    pair = make_set(folder, 1, args.pair_documents, 1000 * args.pair_documents) / "part-00000"
    of_pair = 1000 * args.pair_documents // args.seq_length * 99 // 100
    cache = folder / "cache-megatron"
    # indices are there, as they are when a run is resumed
    measured("megatron", pair, args.seq_length, of_pair, cache)
    for what, path, samples in (
        ("epoch", data, (args.iteration + 10) * BATCH),
        ("megatron", pair, of_pair),
    ):
        iteration = (
            min(args.iteration, of_pair // BATCH - 10) if what == "megatron" else args.iteration
        )
        for workers in (0, 2):
            runs = [
                measured(what, path, args.seq_length, samples, cache, iteration, workers)
                for _ in range(args.rounds)
            ]
            best = min(runs, key=lambda run: run["seconds"])
            show(f"{what} order, resumed at iteration {iteration:,}, {workers} workers", best)


def getitem(args: argparse.Namespace) -> None:
    """Samples a second, in turns."""
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(2)
    prefix = str(folder / "getitem")
    lengths = random.integers(1, 2000, args.getitem_tokens // 1000, dtype=np.int32)
    if not IndexedDataset.exists(prefix):
        write_pair(
            prefix,
            lengths,
            random.integers(0, VOCAB, int(lengths.sum(dtype=np.int64)), dtype=np.uint16),
        )
    corpus = IndexedDataset(prefix)
    count = (corpus.bin_bytes // 2 - 1) // args.seq_length
    epoch, *_ = build(
        our_flags(data_path=[prefix], split="1,0,0", data_order="epoch"),
        (count, 0, 0),
        args.seq_length,
    )
    megatron = GPTDataset(corpus, sequence_length=args.seq_length, num_samples=count, seed=1)
    readers = {"epoch order": epoch.__getitem__, "Megatron order": megatron.__getitem__}
    if args.megatron_core:
        import torch

        torch.set_num_threads(1)  # else it waits for threads that a loaded machine does not run
        peer = megatron_core_dataset(prefix, args.seq_length, count, str(folder / "cache-getitem"))
        readers["megatron-core"] = peer.__getitem__  # it makes labels and a loss mask too
        readers["its tokens alone"] = peer._query_document_sample_shuffle_indices
    numbers = random.permutation(count)[: args.samples].tolist()
    times: dict[str, list[list[float]]] = {name: [] for name in readers}
    for _ in range(args.rounds + 1):  # the first round fills the page cache
        for name, read in readers.items():
            laps = []
            for number in numbers:
                begin = time.perf_counter()
                read(number)
                laps.append(time.perf_counter() - begin)
            times[name].append(laps)
    for name, rounds in times.items():
        best = min(sum(laps) for laps in rounds[1:]) / len(numbers)
        middle, late = (
            min(float(np.percentile(laps, part)) for laps in rounds[1:]) for part in (50, 99)
        )
        print(
            f"__getitem__ at {args.seq_length}, {name:16s} {1e6 * best:6.1f} us = "
            f"{args.seq_length / best / 1e6:6.1f} M tokens/s; median {1e6 * middle:.1f}, 99th "
            f"percentile {1e6 * late:.0f} us",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    """`start`, `resume` or `getitem`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["child"]:
        what, path, seq_length, samples, cache, *more = words[1:]
        found = child(
            what,
            path,
            int(seq_length),
            int(samples),
            None if cache == "-" else cache,
            *map(int, more),
        )
        print(json.dumps(found))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["start", "resume", "getitem"])
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "data_startup"))
    parser.add_argument("--files", type=int, default=2419)
    parser.add_argument("--documents", type=int, default=10**8)
    parser.add_argument("--tokens", type=int, default=2 * 10**12)
    parser.add_argument("--pair-documents", type=int, default=10**7)
    parser.add_argument("--getitem-tokens", type=int, default=500_000_000)
    parser.add_argument("--iteration", type=int, default=10**6)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-megatron-core", dest="megatron_core", action="store_false")
    args = parser.parse_args(words)
    {"start": start, "resume": resume, "getitem": getitem}[args.part](args)


if __name__ == "__main__":
    main()
