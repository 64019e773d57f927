"""Loads a trained model and its tokenizer from a checkpoint directory."""

import atexit
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.checkpoint import reading, store
from megatron.checkpoint.sharded_reader import Reader
from megatron.config.parallel import ParallelConfig
from megatron.config.plan.parameters import parameter_table
from megatron.config.plan.plan import padded_vocab_size
from megatron.config.precision import DTYPES, PrecisionConfig
from megatron.config.script import NO_SCRIPT, Script
from megatron.config.tree import Config
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.metadata import vocabulary_of
from megatron.data.tokenizers.trained import check_ids, with_tokenizer
from megatron.device import choose_device, device_notes
from megatron.inference import script_model
from megatron.inference.linear import store_matrices_as
from megatron.inference.speculative import check_heads
from megatron.model.gpt import GPTModel
from megatron.parallel.context import ParallelContext
from megatron.parallel.sharding import local_box, sharding_of
from megatron.training.build import make_tokenizer
from megatron.training.checkpointing.load import read_into
from megatron.training.checkpointing.saved_args import saved_config
from megatron.training.launch.initialize import finish, initialize


@dataclass(frozen=True)
class TrainedModel:
    """What a checkpoint holds for a reader: the model, its tokenizer, and where they come from."""

    model: GPTModel
    tokenizer: Tokenizer
    config: Config
    iteration: int
    directory: str


def open_trained_model(
    path: str,
    step: int | None = None,
    tokenizer_files: Mapping[str, Any] | None = None,
    device: str = "auto",
    tensor_parallel: int = 1,
    script: Script = NO_SCRIPT,
    dtype: str = "auto",
    drafts: int = 0,
) -> TrainedModel:
    """The newest checkpoint of the run directory `path` (or that of `step`, or the iter_XXXXXXX
    that `path` is).

    Flags come from the checkpoint's args file, the vocabulary from the files it names unless
    `tokenizer_files` (vocab_file, merge_file, tokenizer_model) says others; for a model of numbers,
    which knows of no tokenizer, also tokenizer_type. With `tensor_parallel`
    above 1 so many ranks of one launcher call this together and each loads its part; the checkpoint
    may have any layout. `script`: one whose model_provider makes the model. `dtype`: bf16, fp16,
    fp32, or auto, that of training on an accelerator and fp32 on a CPU. On a CPU matrices are
    stored in it and all is computed in fp32. `drafts`: so many tokens will be drafted by its heads.
    Raises ValueError or CheckpointError saying what to do.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}: must be one of {', '.join(DTYPES)} [value-not-a-choice]")
    stored = reading.load(path, step)
    if stored is None:
        raise ValueError(
            f"{path}: no checkpoint there ({store.TRACKER} is missing); give the directory that "
            "--save named, or an iter_XXXXXXX in it "
            "[checkpoint-missing]"
        )
    saved = saved_config(stored, own_model=script.model_provider is not None)
    check_heads(saved.model.mtp_num_layers or 0, drafts)
    config = replace(
        saved,
        data=with_tokenizer(saved.data, tokenizer_files or {}),
        parallel=ParallelConfig(tensor_model_parallel_size=tensor_parallel),
        precision=PrecisionConfig(),
    )
    tokenizer = make_tokenizer(config)
    if config.data.tokenizer == saved.data.tokenizer:
        _check_tokenizer(stored.state.data.get("tokenizer"), tokenizer, str(stored.directory))
        rows = tokenizer.vocab_size
    else:
        rows = saved.data.vocab_size or 0
        check_ids(rows, tokenizer, path)
    padded = padded_vocab_size(rows, config.model.make_vocab_size_divisible_by, tensor_parallel)
    ctx, grid = _grid(config, device)
    precision = wanted_precision(dtype, saved.precision, grid)
    stored_as = getattr(torch, precision.params_dtype)
    if grid.type != "cpu":
        config = replace(config, precision=precision)
    arguments: dict[str, Any] = dict(
        config=config.model,
        precision=config.precision,
        ctx=ctx,
        table=parameter_table(config.model, padded, tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        dtype=getattr(torch, config.precision.params_dtype),
        device=grid,
    )
    if script.model_provider is None:
        model = GPTModel(**arguments)
    else:
        args = stored.directory / store.ARGS
        model = script_model.build(script, config, tokenizer, args, arguments)
    if stored_as != arguments["dtype"]:
        store_matrices_as(model, stored_as)
    with stored.reader() as reader, torch.no_grad():
        _load_weights(model, reader, rows)
        if script.model_provider is not None:
            script_model.check_names(model, reader.names(), str(stored.directory))
            script_model.check_cache(model.eval())
    model.eval()
    return TrainedModel(model, tokenizer, config, stored.iteration, str(stored.directory))


def wanted_precision(dtype: str, trained: PrecisionConfig, device: torch.device) -> PrecisionConfig:
    """The flags of a model whose matrices have this dtype on this device."""
    if dtype == "auto":
        dtype = "fp32"
        if device.type != "cpu":
            dtype = "bf16" if trained.bf16 else "fp16" if trained.fp16 else "fp32"
    return PrecisionConfig(bf16=dtype == "bf16", fp16=dtype == "fp16")


def _load_weights(model: GPTModel, reader: Reader, rows: int) -> None:
    """This rank's part of every parameter; of vocabularies the first `rows`."""
    for parameter in model.parameters():
        sharding = sharding_of(parameter)
        box = local_box(sharding, model.ctx)
        read_into(parameter, reader, sharding.name, sharding, box, rows)
    reader.wait()


def _grid(config: Config, device: str) -> tuple[ParallelContext, torch.device]:
    """This process alone, or its place among the tensor-parallel ranks, which connect here; and its
    device."""
    tp = config.parallel.tensor_model_parallel_size
    if tp == 1:
        chosen = choose_device(device, 0)
        for text in device_notes(device):
            print(f"WARNING: {text}", file=sys.stderr)
        return ParallelContext(config.parallel), chosen
    for block in config.model.blocks:
        for name, size in block.uneven(tp, tp):
            raise ValueError(
                f"{tp} processes: {name} ({size}) cannot be shared equally by as many tensor-"
                "parallel processes; start another number of them"
            )
    # Gloo's threads may hold Python objects: they must end before the interpreter does.
    atexit.register(finish, None)
    # `choose_device` refuses any other string
    training = replace(config.training, device=device)  # type: ignore[arg-type]
    runtime = initialize(replace(config, training=training))
    return runtime.ctx, runtime.device


def _check_tokenizer(trained: Mapping | None, now: Tokenizer, directory: str) -> None:
    """The ids must mean what they meant in training; only the paths of the files may differ."""
    if not trained:
        return
    before, after = vocabulary_of(trained), vocabulary_of(now.identity())
    differ = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    if differ:
        raise ValueError(
            f"{directory} was trained with another tokenizer ({', '.join(differ)} differ); give "
            "the files it was trained with: --vocab-file and --merge-file, or --tokenizer-model "
            "[tokenizer-not-that-of-training]"
        )
