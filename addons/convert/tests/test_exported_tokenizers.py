"""hf-export's tokenizer files: transformers' AutoTokenizer gives the ids and the texts of ours."""

from __future__ import annotations

import random
import re

import pytest

from megatron.addons.convert import hf_tokenizer
from megatron.data.tokenizers.build import build_tokenizer
from tests.core.data.vocabularies import (
    ADVERSARIAL,
    gpt2_files,
    package_file,
    write_bpe,
    write_tiktoken,
)

pytestmark = pytest.mark.peers
# Blocks with blanks of many kinds, letters that join, right-to-left text, signs, private characters.
BLOCKS = (
    *("\t\n\r \x85\u2000\u2028\u3000", "abcXYZ'stllre", "éßÖİςẞ", "日本語한글", "مرحباनमस्"),
    *("0123٣४", "👩‍🇩🇪\u0301\u200d", ".,;:!?/=_-", "the theta in a tab"),
)


def odd_texts(count: int) -> list[str]:
    """Texts of characters of all blocks, in short runs."""
    draw = random.Random(7)
    special = re.compile(r"<\|endoftext\|>|</?s>|<EOD>| {4000}")  # of blanks there are ties
    texts = [text for text in ADVERSARIAL if not special.search(text)]
    while len(texts) < count:
        runs = (draw.choice(BLOCKS) for _ in range(draw.randrange(1, 12)))
        texts.append("".join(draw.choice(run) for run in runs for _ in range(draw.randrange(1, 6))))
    return texts


PIECES = (b"th", b" t", b"the", b" the", b"in", "é".encode(), b"aa", b"aaa", b"  ", b"\n\n", b"12")


def of_gpt2(files):
    return {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": files[0],
        "merge_file": files[1],
    }


def tiktoken(folder):
    return {
        "tokenizer_type": "TikTokenizer",
        "tokenizer_model": write_tiktoken(folder / "tik.json", PIECES),
        "vocab_size": 256 + len(PIECES) + 20,
        "tiktoken_num_special_tokens": 20,
    }


def of_mistral(kind):
    file = package_file("mistral-common", "tokenizer.model.v1")
    return {"tokenizer_type": kind, "tokenizer_model": file}


def unigram(folder):
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "text").write_text("\n".join(text for text in ADVERSARIAL if len(text) < 500) * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=1200,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    model = str(folder / "m.model")
    return {"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": model}


CASES = {
    "GPT-2 BPE": lambda folder: of_gpt2(write_bpe(folder)),
    "GPT-2's own": lambda folder: of_gpt2(gpt2_files()),
    "tiktoken": tiktoken,
    "Llama 2's": lambda folder: of_mistral("Llama2Tokenizer"),
    "sentencepiece with Megatron's pieces": lambda folder: of_mistral("SentencePieceTokenizer"),
    "unigram": unigram,
    "bytes": lambda folder: {"tokenizer_type": "ByteTokenizer"},
}


@pytest.mark.parametrize("case", CASES)
def test_auto_tokenizer_gives_our_ids(case, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = build_tokenizer(**CASES[case](tmp_path))
    for name, content in hf_tokenizer.files(ours, 64).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    different = []
    for text in odd_texts(1000):
        ids = ours.tokenize(text)
        if theirs(text, verbose=False)["input_ids"] != ids:
            different.append(text)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.detokenize(ids), repr(text)
    # Of cuts that are equally likely the two libraries take one or the other.
    assert len(different) <= (10 if case == "unigram" else 0), different[:3]
    assert (theirs.eos_token_id, theirs.model_max_length) == (ours.eod, 64)
