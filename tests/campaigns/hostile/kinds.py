"""Every kind of file that a run or a tool opens: a small good one, and the reader of it that runs
and tools use. Judges nothing."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron.analysis.run_reader import read_run
from megatron.args_file import read_words
from megatron.arguments import Problems
from megatron.checkpoint import lock, reading, skip_log, store
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.reading import candidates
from megatron.config import command_line
from megatron.data.blend.blended_dataset import BlendedDataset, read_blend_file, read_split_blends
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.megatron_order import open_corpus
from megatron.data.pair_checksums import verify_tokens, write_sums
from megatron.data.samples import Samples
from megatron.data.tokenizers import metadata
from megatron.data.tokenizers.build import build_tokenizer
from megatron.features.registry import RunConfig
from megatron.training.launch.control_file import ControlFileRequests
from megatron.training.result import Requests
from tests.campaigns.hostile import forged, oracles
from tests.campaigns.hostile.campaign import Kind, run_tool
from tests.core.checkpoint.saves import Unsynced, save
from tests.core.data.vocabularies import write_bpe, write_sentencepiece, write_tiktoken
from tests.load_tool import load_tool
from tests.pairs import PairWriter

PLOT = load_tool("plot")
PREPROCESS = load_tool("preprocess_data")
CHECKPOINT = "run/iter_0000020"
VOCAB = 100
TEXT = "the cat ate 12 apples\n"


# --- checkpoints


def read_checkpoint(folder: Path) -> Any:
    tries, problems = candidates(folder / "run")
    if not tries:
        raise ValueError("nothing there: " + "; ".join(problems))
    found = reading.load(folder / "run") or reading.load(tries[0].path, tries[0].step)
    with found.reader() as reader:
        reader.verify()
        tensors = {name: reader.read(name).tolist() for name in sorted(reader.names())}
    return tensors, found.args, repr(found.state), found.iteration


# --- data


def pair(dtype: type, *documents: tuple[int, ...]) -> Callable[[Path], None]:
    """Writes documents whose sequences have these lengths."""

    def make(folder: Path) -> None:
        numbers = np.random.default_rng(3)
        with PairWriter(folder / "d", dtype) as builder:
            for lengths in documents:
                builder.add_document(numbers.integers(0, VOCAB, sum(lengths)), lengths)

    return make


def make_pair(folder: Path) -> None:
    pair(np.uint16, (5,), (9,), (1,), (0,), (7,), (3,))(folder)
    write_sums(str(folder / "d"))


def read_pair(folder: Path) -> list[list[int]]:
    prefix = str(folder / "d")
    metadata.maker(prefix)
    IndexedDataset(prefix).check()
    verify_tokens(prefix)
    dataset = GPTDataset(open_corpus(prefix, VOCAB), sequence_length=4, num_samples=None, seed=1)
    return [dataset[number].tolist() for number in range(len(dataset))]


def read_foreign_pair(folder: Path) -> tuple[list[bytes], bool]:
    """The sequences of a pair without checksums, and whether it can be trained on."""
    prefix = str(folder / "d")
    corpus = IndexedDataset(prefix)
    corpus.check()
    try:
        sequences = [corpus[number].tobytes() for number in range(len(corpus))]
    except ValueError as error:
        raise AssertionError("check() takes it") from error
    try:
        corpus = open_corpus(prefix, oracles.VOCAB)
        dataset = GPTDataset(corpus, sequence_length=4, num_samples=None, seed=1)
        samples = Samples(dataset, oracles.VOCAB)
        every = [samples[number].tokens for number in range(len(samples))]
    except ValueError:
        return sequences, False
    assert all(
        len(tokens) == 5 and 0 <= min(tokens) <= max(tokens) < oracles.VOCAB for tokens in every
    )
    return sequences, True


def _cached(folder: Path) -> list[list[int]]:
    cache = IndexCache(str(folder / "cache"))
    dataset = GPTDataset(
        open_corpus(str(folder / "d"), VOCAB),
        sequence_length=4,
        num_samples=None,
        seed=1,
        cache=cache,
    )
    blend = BlendedDataset([dataset, dataset], [0.5, 0.5], 8, cache=cache)
    return [blend[number].tolist() for number in range(len(blend))]


def read_cache(folder: Path) -> list[int]:
    found = IndexCache(str(folder)).load("Kind", "text", {"a": np.arange(5)})
    if found is None:
        raise ValueError("is made again")
    return found["a"].tolist()


def make_cache(folder: Path) -> None:
    make_pair(folder)
    (folder / "cache").mkdir()
    _cached(folder)


def preprocess(folder: Path, *flags: object) -> IndexedDataset:
    """What preprocess_data.py makes of in.jsonl."""
    words = ["--input", folder / "in.jsonl", "--output-prefix", folder / "x", "--workers", 1]
    run_tool(PREPROCESS.main, *words, *flags)
    return IndexedDataset(str(next(folder.glob("x_*.bin")).with_suffix("")))


def read_texts(folder: Path) -> list[list[list[int]]]:
    """The ids of each document that has any; bad records are left out."""
    size = ("--vocab-size", oracles.VOCAB, "--max-bad-records", 99)
    corpus = preprocess(folder, "--tokenizer-type", "NullTokenizer", *size)
    corpus.check()
    documents = [
        [ids for ids in (corpus[number].tolist() for number in range(first, end)) if ids]
        for first, end in itertools.pairwise(corpus.document_indices.tolist())
    ]
    return [document for document in documents if document]


def make_texts(folder: Path) -> None:
    url = "https://example.org/\u00fc"
    lines = [
        json.dumps({"text": text, "n": 1.5, "url": url}, ensure_ascii=len(text) < 9)
        for text in (
            "5 0 999",
            ["1 2", "3"],
            "12 13 14 15 16 17",
            "",
            "900",
            ["", "4"],
            "8 8 8 8 8",
        )
    ]
    bad = '{"half a surrogate: \\ud800": 1}'  # is reported
    (folder / "in.jsonl").write_text("\n".join([*lines, bad, ""]))


def make_blends(folder: Path) -> None:
    (folder / "blend.txt").write_text("0.3 /data/a 0.7 /data/b\n")
    splits = {"train": ["0.5", "/data/a", "0.5", "/data/b"], "valid": "/data/c", "test": None}
    (folder / "splits.json").write_text(json.dumps(splits))


def read_blends(folder: Path) -> Any:
    return read_blend_file(str(folder / "blend.txt")), read_split_blends(
        str(folder / "splits.json")
    )


# --- tokenizers


def read_gpt2(folder: Path) -> Any:
    files = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    paths = {flag: str(folder / name) for flag, name in files.items()}
    tokenizer = build_tokenizer("GPT2BPETokenizer", **paths)
    return list(tokenizer.tokenize(TEXT)), tokenizer.vocab_size


def make_tokenizer_json(folder: Path) -> None:
    vocab, merges = write_bpe(folder)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "vocab": json.loads(Path(vocab).read_text()),
        "merges": Path(merges).read_text().splitlines()[1:],
    }
    added = {"id": len(model["vocab"]) - 1, "content": "<|endoftext|>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{**added, **flags}],
                "pre_tokenizer": level,
                "decoder": level,
                "model": model,
            }
        )
    )
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')


def tokenize(kind: str, name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        size = {"vocab_size": 289} if kind == "TikTokenizer" else {}
        more = {"tiktoken_num_special_tokens": 10} if kind == "TikTokenizer" else {}
        tokenizer = build_tokenizer(kind, tokenizer_model=str(folder / name), **size, **more)
        return list(map(int, tokenizer.tokenize(TEXT))), tokenizer.vocab_size, tokenizer.eod

    return read


# --- flags and configurations


FLAGS = (
    "--num-layers 2 --hidden-size 64  # small\n--num-attention-heads 4 --seq-length 32\n"
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3\n"
    "--train-iters 10 --mock-data --vocab-size '100' --lr-decay-style cosine\n"
)


def read_flags(folder: Path) -> Any:
    return command_line.judge([*read_words(folder / "args")], 1, RunConfig)


# --- what runs write


def make_logs(folder: Path) -> None:
    (folder / "x.log").write_text(
        "".join(
            f" iteration {n:8}/      20 | consumed samples: {8 * n:12} | elapsed time per iteration "
            f"(ms): 12.5 | learning rate: 1.0E-03 | global batch size: 8 | lm loss: {9 - n / 9:.6E} "
            "| loss scale: 1.0 | grad norm: 1.500 | number of skipped iterations: 0 | "
            "number of nan iterations: 0 |\n"
            for n in range(1, 21)
        )
        + " validation loss at iteration 20 on validation set | lm loss value: 2.25E+00 |\n"
    )
    rows = [
        {
            "iteration": n,
            "lm_loss": 9 - n / 9,
            "grad_norm": 1.5,
            "learning_rate": 1e-3,
            "consumed_samples": 8 * n,
            "consumed_tokens": 64 * n,
            "global_batch_size": 8,
            "elapsed_ms": 12.5,
            "skipped": 0,
            "skip_reason": None,
            "tokens_per_second": 5.0,
        }
        for n in range(1, 21)
    ]
    rows.append({"iteration": 20, "split": "validation", "lm_loss": 2.25, "bits_per_byte": 1.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_logs(folder: Path) -> Any:
    names = ("x.log", "metrics.jsonl")
    plots = [run_tool(PLOT.main, folder / name) for name in names]
    return plots, [repr(read_run(str(folder / name))) for name in names]


def make_skips(folder: Path) -> None:
    texts = ("user", "command line", "2026-01-01T00:00:00Z")
    new = [
        skip_log.SkipRecord(ranges, 16, 88, 768, *texts).line() for ranges in ("3-5 9-11", "20-20")
    ]
    names = ("id", "a", "b", "s0", "s1", "tokens", "reason", "source", "time", "hash")
    old = json.dumps(dict(zip(names, ("9-11", 9, 11, 72, 96, 768, *texts, "ab"), strict=True)))
    forget = json.dumps({"forget": "9-11", "time": texts[-1]})
    (folder / "skips.jsonl").write_text("\n".join([*new, old, forget, ""]))


def read_skips(folder: Path) -> Any:
    lines, rest = skip_log.read(folder)
    return skip_log.parse(lines, "skips.jsonl"), rest


def make_control(folder: Path) -> None:
    (folder / "control").write_text("-5\n")


def read_control(folder: Path) -> Any:
    control = ControlFileRequests(str(folder / "control"))
    request = control.request(9)
    control.after_iteration(9, Requests(save_now=1))
    if request is None:
        raise ValueError("nothing is requested")
    return request


def make_lock(folder: Path) -> None:
    values = {"host": "h", "machine": lock._machine(), "pid": 1 << 22, "started": "1"}
    text = json.dumps({**values, "token": "ab" * 8, "since": "2026-01-01 00:00:00"})
    (folder / ".lock.000001").write_text(text)


def read_lock(folder: Path) -> None:
    lock.acquire(folder).release()


CHECKPOINT_ERRORS = (CheckpointError, ValueError, OSError)
CHECKPOINT_FILES = ("manifest.json", "state.json", "args", "weights_00000.safetensors")
KINDS = [
    Kind(
        "checkpoint",
        lambda folder: save(folder / "run", 20, Unsynced()),
        read_checkpoint,
        tuple(f"{CHECKPOINT}/{name}" for name in CHECKPOINT_FILES),
        CHECKPOINT_ERRORS,
        checksummed=True,
        forged=forged.CHECKPOINTS,
    ),
    Kind(
        "checkpoint tracker",
        lambda folder: save(folder / "run", 20, Unsynced()),
        read_checkpoint,
        (f"run/{store.TRACKER}",),
        CHECKPOINT_ERRORS,
        checksummed=True,
    ),
    Kind(".idx, .bin", make_pair, read_pair, ("d.idx", "d.bin"), checksummed=True),
    Kind("PREFIX.json", make_pair, read_pair, ("d.json",), checksummed=True),
    *(
        Kind(
            f"pair without checksums, {name}",
            make,
            read_foreign_pair,
            ("d.idx", "d.bin"),
            cost=0.025,
            oracle=oracles.pair,
            forged=forged.PAIRS,
        )
        for name, make in (
            ("uint16", pair(np.uint16, (5,), (9,), (1,), (0,), (7,), (3,))),
            ("sentences", pair(np.int32, (2, 3), (4, 0, 5), (0,), (6,))),
            ("one sequence", pair(np.uint16, (8,))),
        )
    ),
    Kind("index cache", make_cache, _cached, ("cache/*",), checksummed=True),
    Kind(
        "cached array",
        lambda folder: IndexCache(str(folder)).store("Kind", "text", {"a": np.arange(5)}),
        read_cache,
        ("*",),
        checksummed=True,
        forged={"objects": forged.cache_of_objects},
    ),
    Kind(
        "text records",
        make_texts,
        read_texts,
        ("in.jsonl",),
        stream=True,
        cost=0.25,
        oracle=oracles.texts,
    ),
    Kind("blends", make_blends, read_blends, ("blend.txt", "splits.json")),
    Kind(
        "vocab.json, merges.txt",
        write_bpe,
        read_gpt2,
        ("vocab.json", "merges.txt"),
        forged=forged.VOCABULARIES,
    ),
    Kind(
        "tokenizer.json",
        make_tokenizer_json,
        tokenize("HuggingFaceTokenizer", "tokenizer.json"),
        ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        needs=("tokenizers",),
    ),
    Kind(
        "SentencePiece model",
        write_sentencepiece,
        tokenize("GPTSentencePieceTokenizer", "m.model"),
        ("m.model",),
        needs=("sentencepiece",),
    ),
    Kind(
        "tiktoken",
        lambda folder: write_tiktoken(folder / "t.json", [bytes([97, n]) for n in range(97, 120)]),
        tokenize("TikTokenizer", "t.json"),
        ("t.json",),
        needs=("tiktoken",),
        forged=forged.TIKTOKEN,
    ),
    Kind(
        "args file",
        lambda folder: (folder / "args").write_text(FLAGS),
        read_flags,
        ("args",),
        (Problems, OSError),
    ),
    Kind("logs, metrics", make_logs, read_logs, ("x.log", "metrics.jsonl"), cost=4),
    Kind("skips.jsonl", make_skips, read_skips, ("skips.jsonl",), (CheckpointError,)),
    Kind(
        "control file",
        make_control,
        read_control,
        ("control",),
        forged={"code": forged.files(control=b"__import__('os').system('x')")},
    ),
    Kind(
        "lock file",
        make_lock,
        read_lock,
        (".lock.000001",),
        (CheckpointError,),
        forged=forged.LOCKS,
    ),
]
