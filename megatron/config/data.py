"""Flags of data sets, their order, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.arguments import Needs, arg
from megatron.config.checkpoint import is_url
from megatron.config.tokenizer import TokenizerConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig(TokenizerConfig):
    """Data sets, their order, and the tokenizer."""

    data_path: tuple[str, ...] | None = arg(None)
    """prefix of a data set, or a blend: weight prefix weight prefix ..."""

    train_data_path: tuple[str, ...] | None = arg(None)
    """prefix or blend of the training split only"""

    valid_data_path: tuple[str, ...] | None = arg(None)
    """prefix or blend of the validation split only"""

    test_data_path: tuple[str, ...] | None = arg(None)
    """prefix or blend of the test split only"""

    data_args_path: str | None = arg(None)
    """text file with the arguments of --data-path"""

    per_split_data_args_path: str | None = arg(None)
    """JSON file with the keys train, valid, test: the --data-path arguments of each split"""

    mock_data: bool = arg(False)
    """synthetic data; needs no files"""

    dummy_data: str | None = arg(
        None,
        choices=(),
        per_run=True,
        requires=Needs("--packed-samples", lambda v: v.config.packed),
    )
    """with --packed-samples: generated samples; needs no files"""

    split: str | None = arg(
        None,
        needs=Needs(
            "--data-path or --data-args-path", lambda v: not (v["mock_data"] or v["dummy_data"])
        ),
    )
    """weights of the training, validation and test split, three numbers (default: 969, 30, 1; not
    with per-split paths)"""

    data_cache_path: str | None = arg(None)
    """directory in which sample indexes are cached"""

    object_storage_cache_path: str | None = arg(
        None,
        per_run=True,
        needs=Needs("data in an object store (--data-path s3://...)", lambda v: _in_a_store(v)),
    )
    """directory on a disk of each host in which data of an object store (s3://...) are cached:
    their indexes, and blocks of their tokens"""

    object_storage_cache_gib: float = arg(
        100.0, above=0, per_run=True, needs="object_storage_cache_path"
    )
    """GiB that the blocks in --object-storage-cache-path may fill"""

    object_storage_prefetch: int = arg(
        8, minimum=0, per_run=True, needs="object_storage_cache_path"
    )
    """iterations whose data are fetched ahead from the object store; 0 fetches them when they are
    read"""

    data_order: Literal["megatron", "epoch"] = arg("megatron")
    """order of samples: megatron (Megatron's, from indexes built for the length of the run) or
    epoch (a permutation per epoch, independent of the length of the run; no index is built)"""

    continue_data_mix: bool = arg(
        False,
        needs=Needs(
            "--load and --data-order epoch", lambda v: v["load"] and v["data_order"] == "epoch"
        ),
    )
    """with --load and --data-order epoch: change the blend on resume; each data set continues where
    it stopped"""

    multiple_validation_sets: bool = arg(False)
    """validate each data set of the validation split separately; with --valid-data-path or
    per-split paths, without weights. With --packed-samples each directory with files is one data
    set"""

    full_validation: bool = arg(
        False, needs=Needs("validation (--eval-iters is 0)", lambda v: v["eval_iters"])
    )
    """each validation reads all of its data once, except an incomplete last micro-batch, instead of
    --eval-iters batches"""

    num_workers: int = arg(2, minimum=0, maximum=256)
    """data workers (read-ahead processes) per rank; 0 reads in the training process"""

    dataloader_type: Literal["single", "cyclic"] | None = arg(None)
    """single: one pass in index order; cyclic: reshuffled every epoch (default: single)"""

    data_sharding: bool = arg(True, needs=("dataloader_type", "cyclic"), off="--no-data-sharding")
    """with --dataloader-type cyclic: every rank draws from all samples, not from its own shard"""

    reset_position_ids: bool = arg(
        False,
        needs=Needs(
            "positions (--position-embedding-type is none)",
            lambda v: v.config.model.positions != "none",
        ),
    )
    """restart position ids after each end-of-document token"""

    reset_attention_mask: bool = arg(False)
    """document mask: attention does not cross end-of-document tokens"""

    eod_mask_loss: bool = arg(False)
    """mask the loss where the input is an end-of-document token"""

    mid_level_dataset_surplus: float = arg(0.005, minimum=0)
    """fraction of extra samples built for each data set of a blend"""

    allow_data_order_change: bool = arg(False, per_run=True, needs="load")
    """resume although the data order differs from the checkpoint's"""

    @property
    def tokenizer(self) -> str:
        """The type of tokenizer, also where none was named: synthetic data is made of plain
        numbers."""
        return self.tokenizer_type or (
            "NullTokenizer" if self.mock_data or self.dummy_data else "GPT2BPETokenizer"
        )


def _in_a_store(v: Any) -> bool:
    """Whether the flags name data in an object store, or files that may."""
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    words = [word for name in names for word in v[name] or ()]
    return any(map(is_url, words)) or v["data_args_path"] or v["per_split_data_args_path"]
