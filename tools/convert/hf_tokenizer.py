"""The tokenizer of a model that was trained here as Hugging Face's files: tokenizer.json,
tokenizer_config.json and generation_config.json, as AutoTokenizer and `generate` read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.data.tokenizers import gpt2_bpe
from megatron.data.tokenizers.base import Tokenizer, library
from megatron.data.tokenizers.bpe import TikTokenizer, tiktoken_patterns

ODD_TEXTS = (
    "Plain words, 12345 numbers.",
    "  two  spaces\n\n\tand a tab\r\n",
    "naïve café Übermut \u0130stanbul \u1e9e",
    "日本語のテキスト 한국어 العربية हिन्दी",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200d\u202e\ufeff",
    "\x00\x7f\u0085\u2028 \ue000 \U0010ffff",
    "I'll we've they're IT'S CamelCaseWord x=y+1; // 3.14e-10",
)


def files(tokenizer: Tokenizer, context: int) -> dict[str, bytes]:
    """{name: content}; of a tokenizer whose own file Hugging Face reads (sentencepiece,
    tokenizer.json) without tokenizer.json. `context`: the model's longest sequence."""
    engine = _engine(tokenizer)
    names = {
        f"{kind}_token": _piece(tokenizer, index)
        for kind, index in (("bos", tokenizer.bos), ("eos", tokenizer.eod), ("pad", tokenizer.pad))
    }
    settings: dict[str, Any] = {name: piece for name, piece in names.items() if piece is not None}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast" if engine else "LlamaTokenizer",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    ids = {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eod,
        "pad_token_id": tokenizer.pad,
    }
    made = {
        "tokenizer_config.json": _as_json(settings),
        "generation_config.json": _as_json({k: v for k, v in ids.items() if v is not None}),
    }
    return made | ({"tokenizer.json": engine.to_str(pretty=True).encode()} if engine else {})


def _as_json(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


def _piece(tokenizer: Tokenizer, index: int | None) -> str | None:
    names = {number: name for name, number in tokenizer.control.items()}
    return None if index is None else names.get(index)


def _engine(tokenizer: Tokenizer) -> Any:
    """A tokenizer of the library `tokenizers` that gives the ids of ours; None where it reads our
    file itself."""
    t = library("tokenizers", type(tokenizer).__name__)
    alphabet = gpt2_bpe.byte_alphabet()
    kind = type(tokenizer).__name__
    if kind == "NullTokenizer":
        words = {str(index): index for index in range(tokenizer.vocab_size)}
        engine = t.Tokenizer(t.models.WordLevel(words, unk_token=None))
        engine.pre_tokenizer = t.pre_tokenizers.WhitespaceSplit()
        return engine
    if kind == "ByteTokenizer":
        vocabulary = {piece: byte for byte, piece in enumerate(alphabet)}
        return _byte_level(t, vocabulary, [], None, tokenizer.special)
    if kind == "GPT2BPETokenizer":
        vocabulary = gpt2_bpe.read_vocabulary(tokenizer.files[0])
        merges = gpt2_bpe.read_merges(tokenizer.files[1])
        known = [pair for pair in merges if "".join(pair) in vocabulary]
        return _byte_level(t, vocabulary, known, gpt2_bpe.GPT2_PATTERN, tokenizer.special)
    if isinstance(tokenizer, TikTokenizer):
        return _of_ranks(t, tokenizer)
    return None


def _byte_level(
    t: Any,
    vocabulary: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    pattern: str | None,
    special: Mapping[str, int],
) -> Any:
    """Byte-level BPE whose texts are cut by a pattern."""
    engine = t.Tokenizer(t.models.BPE(dict(vocabulary) | dict(special), list(merges)))
    to_bytes = t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pattern is None:
        engine.pre_tokenizer = to_bytes
    else:
        cut = t.pre_tokenizers.Split(t.Regex(pattern), "isolated")
        engine.pre_tokenizer = t.pre_tokenizers.Sequence([cut, to_bytes])
    engine.decoder = t.decoders.ByteLevel()
    engine.add_special_tokens([t.AddedToken(name, special=True) for name in special])
    return engine


def _of_ranks(t: Any, tokenizer: TikTokenizer) -> Any:
    """tiktoken's ranks as merges: a piece is made of two shorter ones, of the pair that is merged
    last when the piece alone is encoded, which is the pair of the lowest ranks."""
    ranks = tokenizer.ranks
    alphabet = gpt2_bpe.byte_alphabet()
    merges: list[tuple[bytes, bytes]] = []
    for piece in ranks:
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        made = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(made, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    merges.sort(key=lambda pair: ranks[pair[0] + pair[1]])

    def spelled(piece: bytes) -> str:
        return "".join(alphabet[byte] for byte in piece)

    return _byte_level(
        t,
        {spelled(piece): rank for piece, rank in ranks.items()},
        [(spelled(left), spelled(right)) for left, right in merges],
        tiktoken_patterns()[tokenizer.settings()["pattern"]],
        tokenizer.special,
    )
