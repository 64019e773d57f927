"""From configuration and plan to the things that train: tokenizer, model, optimizer, scheduler,
data sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron import log
from megatron.checkpoint.async_writer import Writer
from megatron.checkpoint.skip_log import SkipHistory
from megatron.checkpoint.state import RunState
from megatron.config.plan.plan import Plan, bucket_size, make_plan
from megatron.config.training import TrainingConfig
from megatron.config.tree import Config
from megatron.data import index_helpers
from megatron.data.build import Before, build_train_valid_test_datasets, check_tokenizer
from megatron.data.cyclic_sampler import CyclicSampler
from megatron.data.data_order import data_order_fingerprint
from megatron.data.ledger import Ledger, Recorder
from megatron.data.packed.build import build_packed_datasets
from megatron.data.plan_table import Row, plan_table
from megatron.data.sampler import PackedSampler, SequentialSampler
from megatron.data.subsets import subset_names
from megatron.data.tokenizers.build import Tokenizer
from megatron.kernels.select import choose_kernels, fp8_rows
from megatron.model.gpt import GPTModel, hidden_dtype
from megatron.model.layer import Recompute
from megatron.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.optimizer.scaler import build_grad_scaler
from megatron.optimizer.scheduler import OptimizerParamScheduler
from megatron.parallel.collectives import all_reduce, gather_objects
from megatron.parallel.context import ParallelContext
from megatron.parallel.ddp import GradBuffers
from megatron.parallel.fp8 import DelayedScaling, delayed_scaling
from megatron.parallel.pipeline import Pipeline
from megatron.parallel.sharding import counts, init_parameters
from megatron.timers import Timers
from megatron.training.batch import BatchRules
from megatron.training.launch.initialize import Runtime
from megatron.training.logging.internlm_format import start_line
from megatron.training.logging.subset_metrics import RowCounts
from megatron.training.preflight import build_tokenizer
from megatron.training.schedule import build_scheduler
from megatron.training.services import Services
from megatron.training.spikes.policy import SpikePolicy


@dataclass
class Progress:
    """How far a run is; everything else about its position follows from these."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0


@dataclass(frozen=True)
class UnderWay:
    """A save that has begun: all that is written of it but the tensors, and what is said when it is
    done."""

    temporary: Path
    iteration: int
    state: RunState
    args: str
    said: str
    is_snapshot: bool


@dataclass
class Run:
    """One training run: what was asked for, what follows, and what it is made of."""

    config: Config
    plan: Plan
    runtime: Runtime
    timers: Timers
    # of GPTModel: this rank's chunks of it, one without virtual stages
    model: nn.ModuleList
    pipeline: Pipeline
    buffers: GradBuffers
    optimizer: MixedPrecisionOptimizer
    scheduler: OptimizerParamScheduler
    rules: BatchRules
    tokenizer: dict[str, Any]
    progress: Progress = field(default_factory=Progress)
    spikes: SpikePolicy = field(default_factory=SpikePolicy)
    data_order: dict[str, Any] = field(default_factory=dict)
    recorder: Recorder | None = None  # of --data-ledger
    rows: RowCounts | None = None  # of --packed-samples and --log-subsets
    fp8: DelayedScaling | None = None  # of --fp8-recipe delayed
    writer: Writer | None = None  # of --async-save
    # `plan.skips` are the ranges to come
    skip_history: SkipHistory = field(default_factory=SkipHistory)
    under_way: UnderWay | None = None  # the save that --async-save has begun
    services: Services = field(default_factory=Services)
    # raises where another job has taken --save over; asked by rank 0
    fence: Callable[[], None] = lambda: None


def make_tokenizer(config: Config, made: Tokenizer | None = None) -> Tokenizer:
    """The tokenizer of the command line, announced; `made` where it was built before."""
    log.detail(f"> building {config.data.tokenizer} tokenizer ...")
    return made or build_tokenizer(config)


def plan_run(config: Config, world_size: int, vocab_size: int) -> Plan:
    """The plan, with Megatron's lines about batch and vocabulary."""
    plan = make_plan(config, world_size, vocab_size)
    dummies = plan.padded_vocab_size - vocab_size
    log.detail(
        f" > padded vocab (size: {vocab_size}) with {dummies} dummy tokens "
        f"(new size: {plan.padded_vocab_size})"
    )
    return plan


def build_model(config: Config, plan: Plan, runtime: Runtime) -> nn.ModuleList:
    """The chunks of the model that this rank holds, their parameters filled with their first
    values."""
    t = config.training
    ctx = runtime.ctx
    log.detail("building GPT model ...")
    kernels = choose_kernels(runtime.device, getattr(torch, config.precision.params_dtype), config)
    for row in fp8_rows(runtime.device, config):
        if row.on:
            log.detail(f" > {row.operation}: {row.implementation} ({row.reason})")
    model = nn.ModuleList(
        GPTModel(
            config.model,
            config.precision,
            ctx,
            plan.padded_vocab_size,
            plan.vocab_size,
            getattr(torch, config.precision.params_dtype),
            runtime.device,
            layers=layers,
            recompute=_recompute(t, len(layers)),
            kernels=kernels,
        )
        for layers in plan.layers_per_stage[ctx.pp.rank]
    )
    init_parameters(model.parameters(), ctx, t.seed)
    if ctx.dp.rank == 0 and ctx.cp.rank == 0:
        size = sum(p.numel() for p in model.parameters())
        if log.shows_details():
            print(
                " > number of parameters on (tensor, pipeline) model parallel rank "
                f"({ctx.tp.rank}, {ctx.pp.rank}): {size}",
                flush=True,
            )
    _check_whole(model, config, plan, ctx)
    return model


def _recompute(t: TrainingConfig, layers: int) -> Recompute:
    """What a chunk of so many layers computes again."""
    if t.recompute_fraction is not None:
        return Recompute("full", "block", len(t.recomputed_runs(layers)))
    return Recompute(t.recompute, t.recompute_method, t.recompute_num_layers)


def _check_whole(model: nn.ModuleList, config: Config, plan: Plan, ctx: ParallelContext) -> None:
    """Do all ranks together hold the layers and parameters that were asked for, each once?"""
    layers = [int(name) for chunk in model for name in chunk.decoder.layers]
    built = sorted(layer for rank in gather_objects(layers, ctx.pp) for layer in rank)
    assert built == list(range(config.model.num_layers)), f"layers {built} were built"
    size = sum(
        gather_objects(
            sum(p.numel() for p in model.parameters() if counts(p.sharding, ctx)), ctx.model
        )
    )
    assert size == plan.num_parameters, (
        f"{size} parameters were built, {plan.num_parameters} asked for"
    )


def build_pipeline(config: Config, plan: Plan, runtime: Runtime) -> Pipeline:
    """This rank's stage, with links for hidden states of this model's shape."""
    m = config.model
    ctx = runtime.ctx
    rows = config.training.micro_batch_size
    length = m.seq_length
    if config.data.packed_samples:
        rows, length = 1, rows * length
    length = length // ctx.cp.size // (ctx.tp.size if ctx.sequence_parallel else 1)
    return Pipeline(
        ctx,
        len(plan.layers_per_stage[ctx.pp.rank]),
        (length, rows, m.hidden_size),
        hidden_dtype(m, getattr(torch, config.precision.params_dtype)),
        runtime.device,
        config.parallel.overlap_p2p_comm,
    )


def build_run(
    config: Config, plan: Plan, runtime: Runtime, timers: Timers, tokenizer: Tokenizer
) -> Run:
    """Model, gradient buffers, optimizer and scheduler."""
    model = build_model(config, plan, runtime)
    p = config.precision
    o = config.optimizer
    ctx = runtime.ctx
    d = config.data
    params = list(model.parameters())
    overlap = config.parallel
    buffers = GradBuffers(
        params,
        ctx,
        getattr(torch, p.grad_dtype),
        bucket_size=bucket_size(config, plan, ctx.pp.rank),
        overlap_grad_reduce=overlap.overlap_grad_reduce,
        overlap_param_gather=overlap.overlap_param_gather,
        whole_params=overlap.zero_partition == "whole-params",
    )
    if config.logging.log_format == "internlm" and ctx.shard.size > 1:
        shares = f"Number of elements on ranks: {buffers.layout.elements()}, rank:0"
        log.print_rank_0(start_line("_partition_param_list", shares, datetime.now()))
    scaler = build_grad_scaler(
        fp16=p.fp16,
        loss_scale=p.loss_scale,
        initial_loss_scale=p.initial_loss_scale,
        min_loss_scale=p.min_loss_scale,
        max_loss_scale=p.max_loss_scale,
        loss_scale_window=int(p.loss_scale_window),
        hysteresis=p.hysteresis,
        growth_factor=p.loss_scale_growth_factor,
        backoff_factor=p.loss_scale_backoff_factor,
    )
    optimizer = MixedPrecisionOptimizer(
        buffers.owned,
        optimizer=o.optimizer,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        adam_beta2_schedule_c=o.adam_beta2_schedule_c,
        sgd_momentum=o.sgd_momentum,
        clip_grad=o.clip_grad,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
        apply_wd_to_all=o.apply_wd_to_all,
        apply_wd_to_qk_layernorm=o.apply_wd_to_qk_layernorm,
        embed_grad_scale=config.model.embed_grad_scale,
        decoupled_lr=o.decoupled_lr,
        decoupled_min_lr=o.decoupled_min_lr,
        grad_scaler=scaler,
        counts=lambda q: counts(q.sharding, ctx),
        reduce_sum=lambda x: all_reduce(x, ctx.optimizer),
        reduce_max=lambda x: all_reduce(x, ctx.optimizer, "max"),
        span=lambda name: timers(name, 1),
    )
    if config.training.torch_compile:
        for chunk in model:
            for layer in chunk.decoder.layers.values():
                layer.compile(dynamic=False)
    buffers.wait_in_forward(model)
    rules = BatchRules(
        tokenizer.eod,
        d.reset_position_ids,
        d.reset_attention_mask,
        d.eod_mask_loss,
        ctx.cp,
        d.packed_samples,
    )
    scheduler = build_scheduler(config, plan, optimizer)
    log.detail(f"> learning rate decay style: {scheduler.lr_decay_style}")
    return Run(
        config,
        plan,
        runtime,
        timers,
        model,
        build_pipeline(config, plan, runtime),
        buffers,
        optimizer,
        scheduler,
        rules,
        tokenizer.identity(),
        spikes=SpikePolicy(config.spikes.spike_action),
        recorder=build_recorder(config, runtime),
        fp8=delayed_scaling(model, p, ctx),
    )


def build_recorder(config: Config, runtime: Runtime) -> Recorder | None:
    """What takes notes for --data-ledger: rank 0 writes, and of the ranks that read the same
    samples one counts."""
    path = config.logging.data_ledger
    ctx = runtime.ctx
    if path is None:
        return None
    ledger = Ledger(path, config.model.seq_length) if runtime.rank == 0 else None
    return Recorder(ledger, counts=not (ctx.tp.rank or ctx.pp.rank or ctx.cp.rank))


@dataclass(frozen=True)
class Data:
    """The data sets (None or none: not wanted or not there) and their samplers; of validation there
    may be several."""

    train: Any
    valid: list[Any]
    test: Any
    valid_names: list[str]  # of several validation sets, what their lines call them
    train_sampler: Any
    valid_samplers: list[Any]
    test_sampler: Any
    order: dict[str, Any]
    rows: list[Row] = field(default_factory=list)  # of the table of what each split reads


def build_data(
    config: Config, plan: Plan, runtime: Runtime, tokenizer: Tokenizer, run: Run | None = None
) -> Data:
    """The data sets of this rank. A checkpoint that `run` was loaded from says which mix of data it
    had."""
    d = config.data
    t = config.training
    ctx = runtime.ctx
    targets = plan.targets
    for line in (
        "> building train, validation, and test datasets ...",
        " > datasets target sizes (minimum size):",
        f"    train:      {targets.train}",
        f"    validation: {targets.valid}",
        f"    test:       {targets.test}",
        "> building train, validation, and test datasets for GPT ...",
    ):
        log.detail(line)
    if index_helpers.REASON and not d.mock_data:
        log.detail(
            f" > index helpers: {index_helpers.IMPLEMENTATION}, because {index_helpers.REASON}"
        )

    rows: list[Row] = []
    sizes = (
        targets.train,
        None if d.full_validation and targets.valid else targets.valid,
        targets.test,
    )
    if d.packed_samples:
        train, valid, test = build_packed_datasets(
            d,
            sequence_length=config.model.seq_length,
            micro_batch_size=t.micro_batch_size,
            global_batch_size=plan.batch.final_global_batch_size,
            sizes=sizes,
            vocab_size=tokenizer.vocab_size,
            identity=tokenizer.identity(),
            rows=rows,
        )
    else:
        check_tokenizer(d, tokenizer.identity())
        before = None
        if run is not None and run.data_order.get("train"):
            before = Before(
                run.data_order["train"], run.progress.consumed_train_samples, d.continue_data_mix
            )
        train, valid, test = build_train_valid_test_datasets(
            d,
            sequence_length=config.model.seq_length,
            seed=t.seed,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            sizes=sizes,
            before=before,
            rows=rows,
        )
    if run is not None and train is not None and config.logging.counts_subsets(d.packed_samples):
        run.rows = RowCounts(
            subset_names(train), ctx, config.logging.log_accuracy, d.packed_samples
        )
        run.model[-1].keep_losses = True
        run.model[-1].count_right = config.logging.log_accuracy
    valids = valid if isinstance(valid, list) else [valid] if valid is not None else []
    for line in plan_table(rows):
        log.detail(line)
    log.detail("> finished creating GPT datasets ...")
    place = (t.micro_batch_size, ctx.dp.rank, ctx.dp.size)

    def sampler(dataset: Any, cyclic: bool) -> Any:
        if dataset is None:
            return None
        if d.packed_samples:
            return PackedSampler(len(dataset), *place)
        if cyclic:
            return CyclicSampler(len(dataset), *place, d.data_sharding)
        return SequentialSampler(len(dataset), *place)

    cyclic = d.dataloader_type == "cyclic"
    of_train = sampler(train, cyclic)
    order = data_order_fingerprint(train, valid, None if of_train is None else of_train.order())
    names = [
        one.subsets[0] if d.packed_samples else str(number) for number, one in enumerate(valids)
    ]
    for name, one in zip(names, valids, strict=True) if d.multiple_validation_sets else ():
        log.print_rank_0(
            f" > validation-{name}: {len(one)} {'rows' if d.packed_samples else 'samples'} of "
            f"{', '.join(subset_names(one))}"
        )
    return Data(
        train,
        valids,
        test,
        names,
        of_train,
        [sampler(one, cyclic and not d.full_validation) for one in valids],
        sampler(test, False),
        order,
        rows,
    )
