"""Tokenizers that work in tiktoken, tokenizers or transformers. The only importer of these three.

A library is imported when a tokenizer needs it, so training on tokenized data needs none.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron import log
from megatron.config.tokenizer import TIKTOKEN_SPECIAL, TIKTOKEN_VOCAB_SIZE
from megatron.data.preprocess.trial import failure
from megatron.data.tokenizers import gigatoken, gpt2_bpe
from megatron.data.tokenizers.base import Ids, Tokenizer, check_unicode, library
from megatron.small_files import path_inside, read_bytes, read_json


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level BPE from vocab.json and merges.txt; `<|endoftext|>` in a text is ordinary
    text, and a piece without an id is id 0.

    The engine is chosen at the first text: gigatoken if installed, else tiktoken; their ids are
    equal. Raises ValueError then for merges that are no BPE (`gpt2_bpe.products`).
    """

    def __init__(self, vocab_file: str, merge_file: str, engine: str | None = None):
        self.files = (vocab_file, merge_file)
        vocabulary = gpt2_bpe.read_vocabulary(vocab_file)
        merges = gpt2_bpe.read_merges(merge_file)
        if "<|endoftext|>" not in vocabulary:
            raise ValueError(
                f"--vocab-file {vocab_file}: has no piece <|endoftext|>, which ends a document; "
                'add "<|endoftext|>" with the next id [tokenizer-file-malformed]'
            )
        unknown = (
            0 if self._published else sum(left + right not in vocabulary for left, right in merges)
        )
        if unknown:
            log.warn_once(
                f"{vocab_file} has no id for {unknown} of the {len(merges)} products of "
                f"{merge_file}; they become id 0; if the two files were not made together, give a "
                "pair that was"
            )
        self.vocab_size = len(vocabulary)
        self.eod = self.eos = vocabulary["<|endoftext|>"]
        self.special = {"<|endoftext|>": self.eod}
        self._vocabulary = vocabulary
        self._merges = merges
        # gigatoken needs an id for each product and byte
        whole = not unknown and vocabulary.keys() >= set(gpt2_bpe.byte_alphabet())
        self._preferred = engine if whole else "tiktoken"

    def encode(self, text: str) -> Ids:
        """See `Tokenizer.encode`."""
        if gpt2_bpe.has_newer_characters(text) or gpt2_bpe.has_endless_blank(text):
            return self._tiktoken.encode_by_cuts(text)
        return self._engine[1](text)

    def _encode_checked(self, text: str) -> Ids:
        try:
            return self.encode(text)
        except UnicodeEncodeError:  # looking for newer characters found half of a pair
            return super()._encode_checked(text)

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._pieces[int(index)] for index in ids).decode("utf-8", errors="replace")

    @functools.cached_property
    def _pieces(self) -> dict[int, bytes]:
        return {index: gpt2_bpe.bytes_of(piece) for piece, index in self._vocabulary.items()}

    @property
    def engine(self) -> str:
        """Which engine encodes: gigatoken or tiktoken."""
        return self._engine[0]

    @functools.cached_property
    def _engine(self) -> tuple[str, Callable[[str], Ids]]:
        if self._preferred != "tiktoken":
            expected = gigatoken.GPT2_PROBE
            if not self._published:
                expected = gigatoken.digest_of_probe(self._tiktoken.encode_by_cuts)
            encode = gigatoken.engine(self._vocabulary, self._merges, expected)
            if encode is not None:
                return "gigatoken", encode
        return "tiktoken", self._tiktoken.encode

    @functools.cached_property
    def _tiktoken(self) -> _Tiktoken:
        if self._published:
            products = [left + right for left, right in self._merges]
        else:
            products = gpt2_bpe.products(self.files[1], self._merges)
        return _Tiktoken(self._vocabulary, products)

    @functools.cached_property
    def _published(self) -> bool:
        """Whether these are GPT-2's own files, known to be right: spares the check."""
        return tuple(self.identity()["sha256"]) == gpt2_bpe.GPT2_SHA256


class _Tiktoken:
    """GPT-2's merges in tiktoken, which merges the neighbours that together have the lowest rank.
    `products` in the order of their merges, each of which its own bytes merge into. At any moment,
    what stands in the place of a product is then what its bytes alone give, so the pair that
    together is a product is its merge."""

    def __init__(self, vocabulary: Mapping[str, int], products: Sequence[str]):
        pieces = [*gpt2_bpe.byte_alphabet(), *products]
        ids = [vocabulary.get(piece, 0) for piece in pieces]
        rising = ids[256:] == sorted(ids[256:]) and len(set(ids)) == len(ids)
        self._ids = None if rising else np.array(ids)  # by rank; else the ids are the ranks
        ranks = zip(map(gpt2_bpe.bytes_of, pieces), ids if rising else range(len(ids)), strict=True)
        self._ranks = dict(ranks)

    def _encoder(self, pattern: str) -> Callable[[str], list[int]]:
        encoding = library("tiktoken", "GPT2BPETokenizer").Encoding
        engine = encoding("gpt2", pat_str=pattern, mergeable_ranks=self._ranks, special_tokens={})
        # encode_to_numpy looks for special pieces: slower, although it spares a list
        return engine.encode_ordinary

    @functools.cached_property
    def _by_pattern(self) -> Callable[[str], list[int]]:
        return self._encoder(gpt2_bpe.GPT2_PATTERN)

    @functools.cached_property
    def _by_cut(self) -> Callable[[str], list[int]]:
        return self._encoder("(?s:.+)")

    def _ids_of(self, ranks: list[int]) -> Ids:
        return ranks if self._ids is None else self._ids[ranks]

    def encode(self, text: str) -> Ids:
        """The ids of a text, cut by tiktoken."""
        return self._ids_of(self._by_pattern(text))

    def encode_by_cuts(self, text: str) -> Ids:
        """The ids of a text, cut by `regex`, whose tables of Unicode are newer, and which does not
        give up on an endless run."""
        cuts = library("regex", "GPT2BPETokenizer").findall(gpt2_bpe.GPT2_PATTERN, text)
        return self._ids_of([rank for cut in cuts for rank in self._by_cut(cut)])


class TikTokenizer(Tokenizer):
    """A tiktoken vocabulary in JSON: a list of {"rank", "token_bytes" (base64), ...}, alone or
    under the key "vocab".

    Ids: `num_special` special pieces first (the named ones, then unnamed ones), then the pieces by
    rank, `vocab_size` in all. A special piece that stands in a text is ordinary text. `eod` is
    </s>. Source: Megatron-LM's format.
    """

    def __init__(
        self,
        tokenizer_model: str,
        pattern: str = "v2",
        vocab_size: int = TIKTOKEN_VOCAB_SIZE,
        num_special: int = 1000,
        special: Sequence[str] = TIKTOKEN_SPECIAL,
    ):
        self.files = (tokenizer_model,)
        self.vocab_size = vocab_size
        self._settings: dict[str, Any] = {
            "pattern": pattern,
            "num_special": num_special,
            "special": list(special),
        }
        self._names = [
            *special,
            *(f"<SPECIAL_{number}>" for number in range(len(special), num_special)),
        ]
        self.special = {name: index for index, name in enumerate(self._names)}
        self.bos, self.eos, self.pad = (
            self._names.index(name) for name in ("<s>", "</s>", "<pad>")
        )
        self.eod = self.eos
        pieces = _tiktoken_pieces(tokenizer_model, vocab_size - num_special)
        self.ranks = {piece: num_special + rank for rank, piece in enumerate(pieces)}
        self._pieces = [name.encode("utf-8") for name in self._names] + pieces

    def encode(self, text: str) -> Ids:
        """See `Tokenizer.encode`. Raises ValueError for a run of a million like characters:
        tiktoken gives up there."""
        try:
            return self._engine.encode_ordinary(text)
        except BaseException as error:
            # pyo3's, which no module exports and no Exception is
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(
                "tiktoken gives up on this text, which has an endless run; cut it in parts"
            ) from None

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of ids, special pieces by name; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._pieces[int(index)] for index in ids).decode("utf-8", errors="replace")

    def settings(self) -> dict[str, Any]:
        """See `Tokenizer.settings`."""
        return {"vocab_size": self.vocab_size, **self._settings}

    @functools.cached_property
    def _engine(self) -> Any:
        pattern = tiktoken_patterns()[self._settings["pattern"]]
        encoding = library("tiktoken", "TikTokenizer").Encoding
        return encoding(
            "tiktoken-file", pat_str=pattern, mergeable_ranks=self.ranks, special_tokens={}
        )


def tiktoken_patterns() -> dict[str, str]:
    """Megatron's two ways to cut a text; v2 also breaks words at case changes and keeps slashes
    with symbols."""
    upper = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
    lower = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    lead = r"[^\r\n\p{L}\p{N}]?"
    digit = r"\p{N}"
    blanks = r"\s+(?!\S)|\s+"
    return {
        "v1": rf"{lead}+\p{{L}}+|{digit}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{blanks}",
        "v2": rf"{lead}[{upper}]*[{lower}]+|{lead}[{upper}]+[{lower}]*|{digit}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{blanks}",
    }


def _tiktoken_pieces(path: str, count: int) -> list[bytes]:
    """The first `count` pieces of a tiktoken JSON file by rank; raises ValueError saying what is
    wrong with it."""
    try:
        rows = read_json(path)
        rows = rows["vocab"] if isinstance(rows, dict) else rows
        pieces = [base64.b64decode(row["token_bytes"], validate=True) for row in rows]
        ranks = [row["rank"] for row in rows]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, binascii.Error) as error:
        raise ValueError(
            f"--tokenizer-model {path}: not a tiktoken vocabulary in JSON "
            f"({type(error).__name__}: {error}); TikTokenizer reads a list of "
            '{"rank": 0, "token_bytes": "AA==", "token_str": ...} [tokenizer-file-malformed]'
        ) from None
    if (
        ranks != list(range(len(ranks)))
        or len(set(pieces)) != len(pieces)
        or sum(len(piece) == 1 for piece in pieces[:count]) != 256
    ):
        raise ValueError(
            f"--tokenizer-model {path}: its pieces are not ranked 0, 1, 2, ..., each once, all "
            "256 bytes among them; give the file as its maker published it "
            "[tokenizer-file-malformed]"
        )
    if len(pieces) < count:
        raise ValueError(
            f"--vocab-size: {path} has {len(pieces)} pieces, but {count} are requested in "
            "addition to the "
            f"special ones; give --vocab-size {len(pieces)} plus --tiktoken-num-special-tokens "
            "[vocab-size-not-that-of-tokenizer]"
        )
    return pieces[:count]


EXTENDS = "extends.json"  # in the folder of a tokenizer: a list, `Tokenizer.identity`'s


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face tokenizer from a local folder or tokenizer.json, with nothing added before or
    after a text.

    tokenizer.json is read by `tokenizers`, a folder without one by `transformers`; no network, no
    code from the folder. A special piece that stands in a text becomes its id, as Hugging Face has
    it. `eod` is tokenizer_config.json's eos.
    """

    _with_offsets: Callable[[str], Any] | None  # of `tokenizers`, which tells where tokens are

    def __init__(self, tokenizer_model: str):
        path = Path(tokenizer_model)
        json_file = path if path.is_file() else path_inside(path, "tokenizer.json")
        if json_file.is_file():
            self._read_json(json_file)
        else:
            self._read_folder(path)

    def _read_json(self, path: Path) -> None:
        read = library("tokenizers", "HuggingFaceTokenizer").Tokenizer.from_buffer
        try:
            engine = read(read_bytes(path))
        except BaseException as error:  # the library raises nothing narrower
            raise ValueError(
                f"--tokenizer-model {path}: not a Hugging Face tokenizer.json ({failure(error)}) "
                "[tokenizer-file-malformed]"
            ) from None
        engine.no_truncation()
        engine.no_padding()
        ids = engine.get_vocab(with_added_tokens=True)
        self.vocab_size = max(len(ids), max(ids.values()) + 1)
        names, config_files = _special_names(path.parent)
        self.eos, self.bos, self.pad = (
            ids.get(names.get(f"{name}_token")) for name in ("eos", "bos", "pad")
        )
        self.eod = self.eos
        self.files = (str(path), *config_files)
        self.extends = _extended(path_inside(path.parent, EXTENDS))
        self._control = {
            token.content: index
            for index, token in engine.get_added_tokens_decoder().items()
            if token.special
        }
        self._with_offsets = lambda text: engine.encode(text, add_special_tokens=False)
        self._encode = lambda text: engine.encode(text, add_special_tokens=False).ids
        self._decode = lambda ids: engine.decode(ids, skip_special_tokens=False)

    def _read_folder(self, path: Path) -> None:
        for file in path.iterdir() if path.is_dir() else ():
            path_inside(path, file.name)
        read = library("transformers", "HuggingFaceTokenizer").AutoTokenizer.from_pretrained
        try:
            engine = read(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises many kinds
            reason = str(error).strip().split("\n")[0]
            raise ValueError(
                f"--tokenizer-model {path}: holds no Hugging Face tokenizer that can be loaded "
                f"({reason}); give a folder made by save_pretrained, or a tokenizer.json "
                "[tokenizer-file-malformed]"
            ) from None
        self.vocab_size = max(len(engine), max(engine.get_vocab().values()) + 1)
        self.eos = engine.eos_token_id
        self.bos = engine.bos_token_id
        self.pad = engine.pad_token_id
        self.eod = self.eos
        self.files = tuple(
            str(file)
            for file in sorted(path.iterdir())
            if file.suffix in (".json", ".txt", ".model")
        )
        self._control = dict(zip(engine.all_special_tokens, engine.all_special_ids, strict=True))
        self._with_offsets = None
        self._encode = lambda text: engine.encode(text, add_special_tokens=False)
        self._decode = lambda ids: engine.decode(ids, skip_special_tokens=False)

    def encode(self, text: str) -> Ids:
        """See `Tokenizer.encode`."""
        return self._encode(text)

    @property
    def control(self) -> dict[str, int]:
        """See `Tokenizer.control`."""
        return self._control

    def tokenize_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.tokenize_spans`, except that the text is encoded as a whole, as
        transformers does: a token that crosses the border of a span belongs to it."""
        if self._with_offsets is None:
            return super().tokenize_spans(text, spans)
        check_unicode(text)
        encoding = self._with_offsets(text)
        starts, ends = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        inside = np.zeros(len(starts), bool)
        for first, end in spans:
            inside |= (starts < end) & (np.maximum(ends, starts + 1) > first)
        return np.asarray(encoding.ids, np.int64), inside

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of ids, special pieces by name."""
        return self._decode([int(index) for index in ids])


def _extended(file: Path) -> list[str]:
    """What the file says that a tokenizer extends."""
    if not file.is_file():
        return []
    try:
        fingerprints = read_json(file)
    except (UnicodeDecodeError, json.JSONDecodeError):
        fingerprints = None
    if isinstance(fingerprints, list) and all(isinstance(each, str) for each in fingerprints):
        return fingerprints
    raise ValueError(
        f"--tokenizer-model {file}: not a JSON list of fingerprints; remove it, and data of the "
        "tokenizer before are refused [tokenizer-file-malformed]"
    )


def _special_names(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Special pieces by name ("eos_token": "</s>"), and the files next to tokenizer.json that say
    so."""
    names = {}
    files = []
    for file_name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = path_inside(folder, file_name)
        if not file.is_file():
            continue
        try:
            entries = read_json(file)
            if not isinstance(entries, dict):
                raise TypeError("not an object")
        except (UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
            raise ValueError(
                f"--tokenizer-model {file}: not a JSON file ({error}) [tokenizer-file-malformed]"
            ) from None
        files.append(str(file))
        for name, entry in entries.items():
            entry = entry.get("content") if isinstance(entry, dict) else entry
            if name.endswith("_token") and isinstance(entry, str):
                names[name] = entry
    return names, files
