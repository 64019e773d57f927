"""The tokenizer of a model that was trained here as Hugging Face's files: tokenizer.json,
tokenizer_config.json and generation_config.json, as AutoTokenizer and `generate` read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron.data.tokenizers import gpt2_bpe
from megatron.data.tokenizers.base import Tokenizer, library
from megatron.data.tokenizers.bpe import TikTokenizer, tiktoken_patterns
from megatron.data.tokenizers.sentencepiece import GPTSentencePieceTokenizer
from megatron.small_files import read_bytes

_BLANK = "\u2581"  # how sentencepiece writes a blank
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
    """{name: content}; without tokenizer.json where the tokenizer has one itself, and of
    sentencepiece models that are neither BPE nor unigram. `context`: the longest sequence."""
    engine = _engine(tokenizer)
    names = {
        f"{kind}_token": _piece(tokenizer, index)
        for kind, index in (("bos", tokenizer.bos), ("eos", tokenizer.eod), ("pad", tokenizer.pad))
    }
    settings: dict[str, Any] = {name: piece for name, piece in names.items() if piece is not None}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    ids = {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eod,
        "pad_token_id": tokenizer.pad,
    }
    contents = {
        "tokenizer_config.json": _as_json(settings),
        "generation_config.json": _as_json({k: v for k, v in ids.items() if v is not None}),
    }
    return contents | ({"tokenizer.json": engine.to_str(pretty=True).encode()} if engine else {})


def _as_json(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


def _piece(tokenizer: Tokenizer, index: int | None) -> str | None:
    names = {number: name for name, number in tokenizer.control.items()}
    return None if index is None else names.get(index)


def _engine(tokenizer: Tokenizer) -> Any:
    """A tokenizer of the library `tokenizers` that gives the ids of ours; None where there is
    none, or needs none."""
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
        in_vocabulary = [pair for pair in merges if "".join(pair) in vocabulary]
        return _byte_level(t, vocabulary, in_vocabulary, gpt2_bpe.GPT2_PATTERN, tokenizer.special)
    if isinstance(tokenizer, TikTokenizer):
        return _of_ranks(t, tokenizer)
    if isinstance(tokenizer, GPTSentencePieceTokenizer):
        return _of_sentencepiece(t, tokenizer)
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
        splits = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
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


def _of_sentencepiece(t: Any, tokenizer: GPTSentencePieceTokenizer) -> Any:
    """A sentencepiece model: its normalization, its pieces with their scores, and behind them the
    pieces that Megatron adds."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at import
    model.ParseFromString(read_bytes(tokenizer.files[0]))
    trainer, spec = model.trainer_spec, model.normalizer_spec
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    if trainer.model_type == trainer.UNIGRAM:
        engine = t.Tokenizer(t.models.Unigram(pieces, trainer.unk_id, trainer.byte_fallback))
    elif trainer.model_type == trainer.BPE:
        vocabulary = {piece: index for index, (piece, _) in enumerate(pieces)}
        engine = t.Tokenizer(
            t.models.BPE(
                vocabulary,
                _merges_by_score(pieces, vocabulary),
                unk_token=pieces[trainer.unk_id][0],
                fuse_unk=True,
                byte_fallback=trainer.byte_fallback,
            )
        )
    else:
        return None
    steps = (
        [t.normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    )
    if spec.remove_extra_whitespaces:
        steps += [t.normalizers.Strip(), t.normalizers.Replace(t.Regex(" {2,}"), " ")]
    steps += [t.normalizers.Prepend(_BLANK)] if spec.add_dummy_prefix else []
    engine.normalizer = t.normalizers.Sequence([*steps, t.normalizers.Replace(" ", _BLANK)])
    decoders = t.decoders
    parts = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    parts += [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    engine.decoder = decoders.Sequence(parts)
    special = {**tokenizer.control, **tokenizer.special}
    added = sorted(special, key=special.__getitem__)
    engine.add_special_tokens(
        [t.AddedToken(name, normalized=False, special=True) for name in added]
    )
    if type(tokenizer).__name__ == "Llama2Tokenizer":
        bos = _piece(tokenizer, tokenizer.bos)
        engine.post_processor = t.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos)]
        )
    return engine


def _merges_by_score(
    pieces: Sequence[tuple[str, float]], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """sentencepiece joins the neighbours that together have the highest score."""
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, score in pieces:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, vocabulary[left], vocabulary[right], (left, right)))
    return [pair for *_, pair in sorted(merges)]
