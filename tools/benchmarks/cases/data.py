"""The data tools and data sets, beside what Megatron does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cases.subject import Subject
from harness import COMMAND, Case, Setup, benchmark, each
from processes import ROOT

from megatron.data.indexed_dataset import HEADER, MAGIC, IndexedDataset, bin_path, idx_path

VOCAB = 50257
ORDERS = ("megatron", "epoch")
# As Megatron's preprocess_data.py does it: a pool that encodes with `tokenizers` and sends lists of
# ids to one writer, which is ours.
LIKE_MEGATRON = """
import json, multiprocessing, sys
from tokenizers import Tokenizer, models, pre_tokenizers
import numpy as np
root, source, prefix, vocab, merges, workers = sys.argv[1:]
sys.path.insert(0, root)
from megatron.data.preprocess.dataset_writer import IndexedDatasetBuilder
engine = Tokenizer(models.BPE.from_file(vocab, merges))
engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
eod = json.load(open(vocab, encoding="utf-8"))["<|endoftext|>"]
def encode(line):
    ids = engine.encode(json.loads(line)["text"]).ids
    return ids + [eod] if ids else ids
with open(source, encoding="utf-8") as lines, multiprocessing.Pool(int(workers)) as pool:
    with IndexedDatasetBuilder(prefix + "_text_document", np.uint16) as builder:
        for ids in pool.imap(encode, lines, 32):
            builder.add_document(ids, [len(ids)] if ids else [])
"""
# The parts of Megatron's preprocess_data_fast.py that are to be had: gigatoken on whole files,
# megatron-core's builder.
FAST_MEGATRON = """
import sys
import awkward, gigatoken, numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tokenizers import Tokenizer, models, pre_tokenizers
source, prefix, vocab, merges = sys.argv[1:]
engine = Tokenizer(models.BPE.from_file(vocab, merges))
engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
engine = gigatoken.Tokenizer.from_json(engine.to_str().encode())
rows = engine.encode_files([source])
ends = np.cumsum(awkward.to_numpy(awkward.num(rows)))
ids = awkward.to_numpy(awkward.flatten(rows)).astype(np.uint16)
ids = np.insert(ids, ends, engine.vocab_size - 1)
lengths = np.diff(ends + np.arange(1, len(ends) + 1), prepend=0)
builder = IndexedDatasetBuilder(prefix + "_text_document.bin", dtype=np.uint16)
start = 0
for length in lengths.tolist():
    builder.add_document(ids[start:start + length], [length])
    start += length
builder.finalize(prefix + "_text_document.idx")
"""


def make_text(folder: Path, megabytes: float) -> tuple[str, str, str]:
    """JSON Lines of this repository's own sources, repeated, and a vocabulary that is trained on
    them: the paths of text, vocab.json and merges.txt."""
    sources = [*ROOT.glob("docs/*.md"), *ROOT.glob("megatron/**/*.py"), *ROOT.glob("tests/**/*.py")]
    lines = [json.dumps({"text": path.read_text(encoding="utf-8")}) for path in sorted(sources)]
    once = folder / "once.jsonl"
    text = folder / "text.jsonl"
    paths = str(text), str(folder / "vocab.json"), str(folder / "merges.txt")
    if text.exists():
        return paths
    once.write_text("\n".join(lines[:60] if megabytes < 1 else lines) + "\n", encoding="utf-8")
    with open(text, "wb") as file:
        while file.tell() < 1e6 * megabytes:
            file.write(once.read_bytes())
    size = "1000" if megabytes < 1 else "20000"
    words = ["--input", str(once), "--vocab-size", size, "--output-dir", str(folder)]
    tool = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py")]
    subprocess.run([*tool, *words], check=True, capture_output=True)
    return paths


@benchmark
def tokenize(
    setup: Setup,
    workers: int = each(1, 2),
    mb: float = 100.0,
    input: str = "",
    vocab: str = "",
    merges: str = "",
) -> Iterator[Case]:
    """tools/preprocess_data.py from .jsonl to .bin and .idx, whole processes; peers that must write
    the same bytes: `tokenizers` in a pool as Megatron's tool has it (tokenizers), gigatoken on the
    whole file and megatron-core's builder as its fast tool has it (gigatoken). Without input, vocab
    and merges mb MB of this repository's sources, with a vocabulary trained on them."""
    if not input:
        input, vocab, merges = make_text(setup.folder, 0.3 if setup.small else mb)
    prefix = str(setup.folder / "written")
    common = {"digest": (".bin", ".idx"), "environment": {"OMP_NUM_THREADS": "1"}}

    def ours(tree: Path) -> dict[str, Any]:
        flags = (
            f"--output-prefix {prefix}-{tree.name} --append-eod --tokenizer-type GPT2BPETokenizer "
            f"--workers {workers}"
        ).split()
        words = [sys.executable, str(tree / "tools" / "preprocess_data.py"), *flags]
        words += ["--input", input, "--vocab-file", vocab, "--merge-file", merges]
        return {"words": words, "writes": f"{prefix}-{tree.name}_text_document", **common}

    sides = setup.commands(ours)
    for name, needs, code, more in (
        ("tokenizers", "tokenizers", LIKE_MEGATRON, (str(ROOT),)),
        ("gigatoken", "awkward", FAST_MEGATRON, ()),
    ):
        words = [sys.executable, "-c", code, *more, input, f"{prefix}-{name}", vocab, merges]
        words += [str(workers)] * bool(more)
        given = {"words": words, "writes": f"{prefix}-{name}_text_document", **common}
        sides += setup.peer(name, needs, COMMAND, given)
    yield Case(f"{workers} workers", sides, Path(input).stat().st_size / 1e6, "MB")


def write_pair(prefix: str, lengths: np.ndarray, tokens: np.ndarray | None = None) -> None:
    """A pair of uint16, one sequence a document; without `tokens` the .bin is a hole."""
    pointers = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    with open(idx_path(prefix), "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, len(lengths), len(lengths) + 1))
        for array in (lengths.astype("<i4"), pointers * 2, documents):
            file.write(array.data)
    with open(bin_path(prefix), "wb") as file:
        if tokens is not None:
            file.write(tokens.astype("<u2").data)
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))


def our_dataset(paths: list[str], order: str, seq: int, samples: int, cache: str | None) -> Any:
    """This suite's training set of these pairs."""
    from megatron.data.request import DataRequest
    from megatron.data.sources import source_of

    names = (
        "data_path train_data_path valid_data_path test_data_path data_args_path "
        "per_split_data_args_path data_cache_path"
    ).split()
    fixed = {
        "mock_data": False,
        "mid_level_dataset_surplus": 0.005,
        "multiple_validation_sets": False,
        "packed_samples": False,
        "split": "1,0,0",
    }
    given = {"data_path": paths, "data_order": order, "data_cache_path": cache}
    # of another checkout DataConfig may have other fields
    flags: Any = SimpleNamespace(**dict.fromkeys(names) | fixed | given)
    request = DataRequest(
        sizes=(samples, 0, 0), sequence_length=seq, seed=1, vocab_size=VOCAB, eod=VOCAB - 1
    )
    return source_of(flags).build(flags, request, [])[0]


def megatron_core_dataset(prefix: str, seq: int, samples: int, cache: str | None) -> Any:
    """megatron-core's GPTDataset of a whole pair."""
    import torch
    from megatron.core.datasets import gpt_dataset, indexed_dataset, utils

    torch.set_num_threads(1)  # else it waits for threads that a loaded machine does not run
    tokenizer = SimpleNamespace(
        vocab_size=VOCAB, eod=VOCAB - 1, pad=-1, unique_identifiers={"class": "none"}
    )
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq,
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


class Reader(Subject):
    """Reads samples in a random order from a set that is open. order: `megatron-core` or ours."""

    def __init__(self, prefix: str, order: str, seq: int, count: int, cache: str):
        samples = (IndexedDataset(prefix).bin_bytes // 2 - 1) // seq
        if order == "megatron-core":
            self._set = megatron_core_dataset(prefix, seq, samples, cache)
        else:
            self._set = our_dataset([prefix], order, seq, samples, None)
        self._numbers = np.random.default_rng(2).permutation(samples)[:count].tolist()

    def warm_up(self) -> None:
        """Fill the page cache."""
        self.turn()

    def turn(self) -> float:
        """Seconds of all samples."""
        start = time.perf_counter()
        for number in self._numbers:
            self._set[number]
        return time.perf_counter() - start


@benchmark
def read_samples(
    setup: Setup,
    order: str = each(*ORDERS),
    seq: int = 2048,
    tokens: int = 100_000_000,
    count: int = 20_000,
) -> Iterator[Case]:
    """Samples read by one process from a pair in the page cache, documents of 1,000 tokens; peer:
    megatron-core's GPTDataset (megatron-core), which makes labels and a loss mask too."""
    if setup.small:
        tokens, count, seq = 20_000, 50, 64
    prefix = str(setup.folder / "pair")
    if not IndexedDataset.exists(prefix):
        random = np.random.default_rng(2)
        lengths = random.integers(1, 2000, tokens // 1000, dtype=np.int32)
        ids = random.integers(0, VOCAB, int(lengths.sum(dtype=np.int64)), dtype=np.uint16)
        write_pair(prefix, lengths, ids)
    given = {"prefix": prefix, "order": order, "seq": seq, "count": count}
    given["cache"] = str(setup.folder / "cache")
    sides = setup.ours("ours", "cases.data:Reader", given)
    other = {**given, "order": "megatron-core"}
    sides += setup.peer("megatron-core", "megatron.core", "cases.data:Reader", other)
    yield Case(f"{order} order", sides, count * seq, "tokens")


def open_and_report(words: list[str]) -> None:
    """Open a set in this process, read one sample, and print the seconds since the imports."""
    order, seq, samples, cache, *paths = words
    if order == "megatron-core":
        import megatron.core.datasets.gpt_dataset  # noqa: F401
    else:
        import megatron.data.sources  # noqa: F401
    start = time.perf_counter()
    if order == "megatron-core":
        megatron_core_dataset(paths[0], int(seq), int(samples), cache or None)[0]
    else:
        our_dataset(paths, order, int(seq), int(samples), cache or None)[0]
    print(time.perf_counter() - start)


OPEN = """
import sys
sys.path[:0] = sys.argv[1:4]
from cases.data import open_and_report
open_and_report(sys.argv[4:])
"""


@benchmark
def open_data(
    setup: Setup,
    order: str = each(*ORDERS),
    cached: int = each(0, 1),
    documents: int = 10_000_000,
    files: int = 2419,
    seq: int = 2048,
) -> Iterator[Case]:
    """A data set opened and its first sample read, in a new process each time, imports not counted:
    in epoch order so many files (sparse, 20,000 tokens a document), in Megatron's one pair, without
    and with an index cache; peer: megatron-core's GPTDataset of that pair (megatron-core)."""
    if order == "epoch" and cached:
        return  # it has no index
    if setup.small:
        documents, files = 2000, 3
    folder = setup.folder / order
    mean, count = (20_000, files) if order == "epoch" else (1000, 1)
    paths = [str(folder / f"part-{number:05d}") for number in range(count)]
    if not folder.exists():
        folder.mkdir()
        random = np.random.default_rng(1)
        for path in paths:
            write_pair(path, random.integers(1, 2 * mean, documents // count, dtype=np.int32))
    samples = mean * documents // seq * 9 // 10

    def words(tree: Path, side: str) -> dict[str, Any]:
        cache = str(setup.folder / f"cache-{side}-{tree.name}")
        here = str(ROOT / "tools" / "benchmarks")
        given = [str(tree), here, f"{here}/step", side, str(seq), str(samples), cache, *paths]
        command = {"words": [sys.executable, "-c", OPEN, *given], "reports": True}
        return command if cached else {**command, "writes": cache}

    sides = setup.commands(lambda tree: words(tree, order))
    if order == "megatron":
        other = words(ROOT, "megatron-core")
        sides += setup.peer("megatron-core", "megatron.core", COMMAND, other)
    yield Case(f"{order} order" + ", indices cached" * cached, sides, documents, "documents")
