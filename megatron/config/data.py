"""Where samples come from and in which order. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data sets, their order, and the tokenizer."""

    data_path: tuple[str, ...] | None = arg(
        None, help="one prefix, or a blend: weight prefix weight prefix ..."
    )
    train_data_path: tuple[str, ...] | None = arg(None, help="blend of the training split alone")
    valid_data_path: tuple[str, ...] | None = arg(None, help="blend of the validation split alone")
    test_data_path: tuple[str, ...] | None = arg(None, help="blend of the test split alone")
    data_args_path: str | None = arg(
        None, help="file that holds the words of --data-path", dump=False
    )
    per_split_data_args_path: str | None = arg(
        None, help="JSON file with the keys train, valid, test", dump=False
    )
    mock_data: bool = arg(False, help="synthetic data: no files needed", dump=False)
    packed_samples: bool = arg(
        False,
        help="a micro-batch is one row of micro-batch-size x seq-length tokens, filled with "
        "whole samples; attention, positions and labels stay inside each (docs/data.md)",
        dump=False,
    )
    pack_into_one: bool = arg(
        False,
        help="packed rows: attention crosses the samples of each seq-length tokens",
        dump=False,
    )
    pad_samples: bool = arg(
        False,
        help="packed rows: micro-batch-size samples, each cut to seq-length, and padding",
        dump=False,
    )
    min_sample_length: int = arg(
        0, help="packed rows: leave samples of fewer tokens out", dump=False
    )
    dummy_data: Literal["internlm"] | None = arg(
        None, help="made-up samples to pack, those of InternLM's demos: no files needed", dump=False
    )
    split: str | None = arg(
        None,
        help="share of train, validation and test: three numbers "
        "(default: 969, 30, 1; not with per-split paths)",
    )
    data_cache_path: str | None = arg(None, help="directory of the index cache")
    data_order: Literal["megatron", "epoch"] = arg(
        "megatron",
        help=(
            "megatron: as Megatron orders samples, from indexes built for the length of the run; "
            "epoch: a permutation of each epoch, the same however long the run is, with nothing "
            "to build"
        ),
        dump=False,
    )
    continue_data_mix: bool = arg(
        False,
        help="with --load and --data-order epoch: a mix of data other than the "
        "checkpoint's begins, and each data set goes on where it was left",
        dump=False,
    )
    multiple_validation_sets: bool = arg(
        False,
        help="each data set of the validation split has a validation of its own; with "
        "--valid-data-path or per-split paths, without weights. Of packed samples each directory "
        "with files is one",
        dump=False,
    )
    full_validation: bool = arg(
        False,
        help="each validation reads all of its data from the start, but for an incomplete "
        "last micro-batch, and not --eval-iters batches",
        dump=False,
    )
    num_workers: int = arg(2, help="processes that read ahead; 0 reads in the training process")
    dataloader_type: Literal["single", "cyclic"] | None = arg(
        None, help="single pass in index order, or reshuffled every epoch (default: single)"
    )
    data_sharding: bool = arg(
        True, off="--no-data-sharding", help="cyclic order: every rank draws from all samples"
    )
    reset_position_ids: bool = arg(
        False, help="positions start again after each end-of-document token"
    )
    reset_attention_mask: bool = arg(False, help="attention stays inside a document")
    eod_mask_loss: bool = arg(False, help="no loss where the input is an end-of-document token")
    mid_level_dataset_surplus: float = arg(
        0.005, help="margin of samples each member of a blend gets", dump=False
    )
    tokenizer_type: str | None = arg(
        None,
        help="GPT2BPETokenizer, SentencePieceTokenizer, GPTSentencePieceTokenizer, "
        "Llama2Tokenizer, HuggingFaceTokenizer, TikTokenizer, ByteTokenizer (257 ids: the bytes "
        "of UTF-8 and an end-of-document token) or NullTokenizer (default: GPT2BPETokenizer, or "
        "NullTokenizer with --mock-data)",
    )
    vocab_file: str | None = arg(None, help="vocab.json of the BPE")
    merge_file: str | None = arg(None, help="merges.txt of the BPE")
    tokenizer_model: str | None = arg(None, help="model file of the other tokenizers")
    vocab_size: int | None = arg(
        None, help="number of ids of NullTokenizer and TikTokenizer; checked for the others"
    )
    vocab_extra_ids: int = arg(0, help="<extra_id_N> pieces that SentencePieceTokenizer adds")
    tiktoken_pattern: Literal["v1", "v2"] | None = arg(
        None, help="how TikTokenizer cuts a text (default: v2)", dump=False
    )
    tiktoken_num_special_tokens: int = arg(
        1000, help="ids that TikTokenizer keeps for special pieces", dump=False
    )
    tiktoken_special_tokens: tuple[str, ...] | None = arg(
        None, help="names of TikTokenizer's first special pieces", dump=False
    )
    allow_data_order_change: bool = arg(
        False,
        help="resume although the order of the data differs from the checkpoint's",
        dump=False,
    )

    @property
    def tokenizer(self) -> str:
        """The type of tokenizer, also where none was named: synthetic data is made of plain
        numbers."""
        return self.tokenizer_type or (
            "NullTokenizer" if self.mock_data or self.dummy_data else "GPT2BPETokenizer"
        )
