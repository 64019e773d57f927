"""The gigatoken engine for GPT-2's byte-level BPE. The only importer of gigatoken."""

import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from megatron import log
from megatron.data.preprocess.jsonl import json_text
from megatron.data.tokenizers.base import library

# What encoders disagree on, if on anything: scripts, white space, controls, contractions, digits,
# code, special names.
PROBE = (
    "I'll we've they're IT'S 'tis x's' ''s  two  spaces   three\n\n\n\tdef f(x):\r\n    return "
    "{'a': 1_000.5e-3}  # !!\n",
    "<|endoftext|> a<|endoftext|>b <|endoftext|",
    "deep learning 深度学习，模型。カタカナ 한국어 مرحبا ١٢٣ שלום हिन्दी ไทย Привет ½ Ⅷ ² ß ſ ﬁ",
    "😀👩‍👩‍👧‍👦🇩🇪👍🏽❤️ e\u0301 Z̸̡a",
    "\u00a0\u2003\u3000\u200b\ufeff\u2028\u0085\x1c\x1f\x0b\x0c \x00\x7f\x9f "
    "\ufffd\ufffe\U0010ffff",
    "x" * 300 + " " * 300 + "\n" * 99 + "1" * 99 + "!" * 99 + "é" * 99,
    "the quick Brown FOX supercalifragilistic antidisestablishment",
    "".join(map(chr, range(0x250))),
    "",
)

# digest_of_probe with GPT-2's published files.
GPT2_PROBE = "fe8f0d92b979f80da2dd40bac1b89254638a507335ca56aab5b5ef89c35d5354"

CHUNK = 1 << 18  # characters
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")


def digest_of_probe(encode: Callable[[str], Sequence[int] | np.ndarray]) -> str:
    """sha256 of the ids of all texts of PROBE."""
    ids = [[int(index) for index in encode(text)] for text in PROBE]
    return hashlib.sha256(repr(ids).encode()).hexdigest()


def engine(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], expected: str
) -> Callable[[str], np.ndarray] | None:
    """Text to ids, unsigned [n], or None if gigatoken is not installed, or (said in a line) does
    not take these files or gives ids of another digest than `expected`.

    No piece is special to it: a text that spells one stays text.
    """
    if importlib.util.find_spec("gigatoken") is None:
        return None
    make = library("gigatoken.gigatoken_rs", "GPT2BPETokenizer").load_hf_json
    try:
        encode = make(_as_json(vocabulary, merges)).encode
        digest = digest_of_probe(encode)
    except (TypeError, ValueError, RuntimeError) as error:
        log.warn_once(f"gigatoken does not take these vocabulary files ({error}); tiktoken is used")
        return None
    if digest != expected:
        log.warn_once("gigatoken gives other ids than the vocabulary files; tiktoken is used")
        return None
    smallest = np.uint16 if len(vocabulary) <= 1 << 16 else np.uint32

    def encode_in_chunks(text: str) -> np.ndarray:
        if len(text) <= CHUNK:
            return encode(text)
        # an id for each byte; the rest stays untouched
        ids = np.empty(len(text) * (1 if text.isascii() else 4), smallest)
        count = 0
        for chunk in chunks(text):
            chunk_ids = encode(chunk)
            ids[count : count + len(chunk_ids)] = chunk_ids
            count += len(chunk_ids)
        return ids[:count]

    return encode_in_chunks


def chunks(text: str) -> Iterator[str]:
    """A long text in parts that GPT-2's pattern cuts alike, so that memory stays small: behind the
    end of a line with no white space around it, which is a cut of its own whatever comes before and
    behind.
    """
    start = 0
    while len(text) - start > CHUNK and (end := LINE_END.search(text, start + CHUNK)):
        yield text[start : end.end()]
        start = end.end()
    yield text[start:]


def _as_json(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> bytes:
    """A tokenizer.json of these pieces, without special ones."""
    cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocabulary,
        "merges": merges,
    }
    return json_text(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": cut,
            "post_processor": None,
            "decoder": cut,
            "model": model,
        }
    )
