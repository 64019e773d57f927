"""Tokenizers on a sentencepiece model, in Megatron's three readings. The only importer of
sentencepiece.

Source of what each reading adds: Megatron-LM's tokenizers of January 2024.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any

from megatron.data.tokenizers.base import Ids, Tokenizer, library
from megatron.small_files import read_bytes


class GPTSentencePieceTokenizer(Tokenizer):
    """A sentencepiece model as it is: nothing is added, `eod` is the model's end of sentence."""

    def __init__(self, tokenizer_model: str):
        self.files = (tokenizer_model,)
        processor = library("sentencepiece", type(self).__name__).SentencePieceProcessor
        try:
            self._model = processor()
            self._model.LoadFromSerializedProto(read_bytes(tokenizer_model))
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"--tokenizer-model {tokenizer_model}: not a sentencepiece model ({error}); give "
                "the .model file [tokenizer-file-malformed]"
            ) from None
        self.vocab_size = self._model.get_piece_size()
        ids = (self._model.bos_id(), self._model.eos_id(), self._model.pad_id())
        self.bos, self.eos, self.pad = (index if index >= 0 else None for index in ids)
        self.eod = self.eos

    @functools.cached_property
    def control(self) -> dict[str, int]:
        """See `Tokenizer.control`: the model's control pieces, such as <s> and </s>."""
        model = self._model
        return {
            model.id_to_piece(index): index
            for index in range(model.get_piece_size())
            if model.is_control(index)
        }

    def encode(self, text: str) -> Ids:
        """See `Tokenizer.encode`."""
        return self._model.encode(text)

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        return self._model.decode([int(index) for index in ids])


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """A sentencepiece model in Llama 2's way: every text begins with `bos`, as Megatron's does."""

    def __init__(self, tokenizer_model: str):
        super().__init__(tokenizer_model)
        if self.bos is None:
            raise ValueError(
                f"--tokenizer-model {tokenizer_model}: has no begin-of-sentence piece, which "
                "Llama2Tokenizer puts before every text; use --tokenizer-type "
                "GPTSentencePieceTokenizer [tokenizer-file-malformed]"
            )

    def encode(self, text: str) -> Ids:
        """See `Tokenizer.encode`."""
        return [self.bos, *self._model.encode(text)]

    def encode_inside(self, text: str) -> Ids:
        """See `Tokenizer.encode_inside`: without `bos`, which a chat template writes itself."""
        return self._model.encode(text)


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """A sentencepiece model with Megatron's special pieces, added behind the model's own where it
    lacks them.

    In this order: <CLS> <SEP> <EOD> <MASK>, pad, bos, eos, <extra_id_0> and so on. A special piece
    that stands in a text becomes its id, and the text around it is encoded in parts. `eod` is
    <EOD>.
    """

    def __init__(self, tokenizer_model: str, vocab_extra_ids: int = 0):
        super().__init__(tokenizer_model)
        self._extra_ids = vocab_extra_ids
        known = {self._model.id_to_piece(index): index for index in range(self.vocab_size)}
        names = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
        for index, name in ((self.pad, "<PAD>"), (self.bos, "<BOS>"), (self.eos, "<EOS>")):
            names.append(name if index is None else self._model.id_to_piece(index))
        names += [f"<extra_id_{number}>" for number in range(vocab_extra_ids)]
        self._special = {name: known.setdefault(name, len(known)) for name in names}
        self._name_of = {index: name for name, index in self._special.items()}
        self.vocab_size = len(known)
        self.pad, self.bos, self.eos = (self._special[name] for name in names[4:7])
        self.eod = self._special["<EOD>"]
        # Of names that begin at one place Megatron takes the one listed first; so does an
        # alternation.
        self._cut = re.compile("(" + "|".join(re.escape(name) for name in names) + ")")

    @property
    def control(self) -> dict[str, int]:
        """See `Tokenizer.control`."""
        return self._special

    def encode(self, text: str) -> Ids:
        """See `Tokenizer.encode`."""
        *texts, last = self._cut.split(text)
        ids: list[int] = []
        for between, name in zip(texts[::2], texts[1::2], strict=True):
            ids += self._model.encode(between)
            ids.append(self._special[name])
        return ids + self._model.encode(last)

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of ids, special pieces by name with a space behind each."""
        text = ""
        plain: list[int] = []
        for index in map(int, ids):
            if index in self._name_of:
                text += f"{self._model.decode(plain)} {self._name_of[index]} "
                plain = []
            else:
                plain.append(index)
        return text + self._model.decode(plain)

    def settings(self) -> dict[str, Any]:
        """See `Tokenizer.settings`."""
        return {"vocab_extra_ids": self._extra_ids}
