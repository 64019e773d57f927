"""Tokenizing, beside what Megatron does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import COMMAND, Case, Setup, benchmark, each
from processes import ROOT

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
        options = {"words": words, "writes": f"{prefix}-{name}_text_document", **common}
        sides += setup.peer(name, needs, COMMAND, options)
    yield Case(f"{workers} workers", sides, Path(input).stat().st_size / 1e6, "MB")
