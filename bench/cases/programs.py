"""Whole processes: the start of pretrain_gpt.py, and tokenizing beside what Megatron does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import COMMAND, ROOT, Case, Setup, Side, benchmark, each
from sizes import SMALL, command_line, parse_size

Text = tuple[str, str, str]  # paths of .jsonl, vocab.json and merges.txt
WHAT = ("help", "first-step")
KEY = "_text_document"
# As Megatron's preprocess_data.py does it: a pool that encodes with `tokenizers` and sends lists of
# ids to one writer, which is ours.
LIKE_MEGATRON = """
import json, multiprocessing, sys
from tokenizers import Tokenizer, models, pre_tokenizers
import numpy as np
root, source, prefix, vocab, merges, workers = sys.argv[1:]
sys.path.insert(0, root)
from megatron.data.preprocess.dataset_writer import write_index
engine = Tokenizer(models.BPE.from_file(vocab, merges))
engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
eod = json.load(open(vocab, encoding="utf-8"))["<|endoftext|>"]
def encode(line):
    ids = engine.encode(json.loads(line)["text"]).ids
    return ids + [eod] if ids else ids
with open(source, encoding="utf-8") as lines, multiprocessing.Pool(int(workers)) as pool:
    lengths, counts = [], []
    with open(prefix + "_text_document.bin", "wb") as tokens:
        for ids in pool.imap(encode, lines, 32):
            tokens.write(np.array(ids, np.uint16).tobytes())
            lengths += [len(ids)] * bool(ids)
            counts.append(int(bool(ids)))
lengths, counts = np.array(lengths, np.int32), np.array(counts, np.int32)
sizes = len(lengths), len(counts)
index = prefix + "_text_document.idx"
write_index(index, np.dtype(np.uint16), sizes, lambda: [lengths], [counts])
"""
# The parts of Megatron's preprocess_data_fast.py that are to be had: gigatoken on whole files,
# megatron-core's builder.
FAST_MEGATRON = """
import sys
import awkward, gigatoken, numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tokenizers import Tokenizer, models, pre_tokenizers
_, source, prefix, vocab, merges, _ = sys.argv[1:]
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


def program(name: str, *words: object, tree: Path = ROOT) -> list[str]:
    """The command line of a program of a checkout."""
    return [sys.executable, str(tree / name), *map(str, words)]


def preprocess(text: Text, prefix: object, *flags: object, tree: Path = ROOT) -> list[str]:
    """The command line that tokenizes a text."""
    source, vocab, merges = text
    tokenizer = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab)
    files = ("--merge-file", merges, "--input", source, "--output-prefix", prefix)
    return program(
        "tools/preprocess_data.py", "--append-eod", *tokenizer, *files, *flags, tree=tree
    )


def make_text(folder: Path, megabytes: float) -> Text:
    """JSON Lines of this repository's own sources, repeated, and a vocabulary that is trained on
    them."""
    sources = [*ROOT.glob("docs/*.md"), *ROOT.glob("megatron/**/*.py"), *ROOT.glob("tests/**/*.py")]
    lines = [json.dumps({"text": path.read_text(encoding="utf-8")}) for path in sorted(sources)]
    once = folder / "once.jsonl"
    text = folder / "text.jsonl"
    if not text.exists():
        part, size = (lines[:60], 1000) if megabytes < 1 else (lines, 20000)
        once.write_text("\n".join(part) + "\n", encoding="utf-8")
        with open(text, "wb") as file:
            while file.tell() < 1e6 * megabytes:
                file.write(once.read_bytes())
        flags = ("--input", once, "--vocab-size", size, "--output-dir", folder)
        words = program("tools/train_tokenizer.py", *flags)
        subprocess.run(words, check=True, capture_output=True)
    return str(text), str(folder / "vocab.json"), str(folder / "merges.txt")


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
    text = (input, vocab, merges) if input else make_text(setup.folder, 0.3 if setup.small else mb)

    def command(words: list[str], prefix: str) -> dict[str, Any]:
        return {"words": words, "writes": prefix + KEY, "digest": (".bin", ".idx")}

    def ours(tree: Path) -> dict[str, Any]:
        prefix = f"{setup.folder}/{tree.name}"
        return command(preprocess(text, prefix, "--workers", workers, tree=tree), prefix)

    sides = setup.ours(COMMAND, ours, threads=1)
    for name, needs, code in (
        ("tokenizers", "tokenizers", LIKE_MEGATRON),
        ("gigatoken", "awkward", FAST_MEGATRON),
    ):
        source, *files = text
        prefix = f"{setup.folder}/{name}"
        words = [sys.executable, "-c", code, str(ROOT), source, prefix, *files, str(workers)]
        sides += setup.peer(name, needs, COMMAND, command(words, prefix), threads=1)
    yield Case(f"{workers} workers", sides, Path(text[0]).stat().st_size / 1e6, "MB")


@benchmark
def startup(setup: Setup, what: str = each(*WHAT)) -> Iterator[Case]:
    """pretrain_gpt.py as a whole process: --help, and a run of one step of a tiny model; beside it
    the interpreter, for first-step with `import torch`."""
    if what not in WHAT:
        raise ValueError(f"what={what}: is none of {', '.join(WHAT)}")
    training = command_line(parse_size(SMALL), "fp32", "cpu", iterations=1)
    flags, code = (["--help"], "pass") if what == "help" else (training, "import torch")
    sides = setup.ours(
        COMMAND, lambda tree: {"words": program("pretrain_gpt.py", *flags, tree=tree)}
    )
    sides.append(Side(f"python: {code}", COMMAND, {"words": [sys.executable, "-c", code]}))
    yield Case(what, sides)
