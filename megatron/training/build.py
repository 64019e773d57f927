"""Builds tokenizer, model, gradient buffers, optimizer and scheduler from configuration and
plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron import device as devices
from megatron import log
from megatron.config.mup import multipliers
from megatron.config.plan.plan import Plan, assignment, bucket_size, make_plan
from megatron.config.script import NO_SCRIPT, Script
from megatron.config.training import TrainingConfig
from megatron.config.tree import Config
from megatron.data.tokenizers.build import Tokenizer
from megatron.kernels import select
from megatron.kernels.select import choose_kernels, fp8_rows, kernel_table
from megatron.model.blocks.module import Recompute
from megatron.model.gpt import GPTModel, hidden_dtype
from megatron.optimizer.optimizer import MixedPrecisionOptimizer, ModelRanks
from megatron.optimizer.scheduler import build_scheduler
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import ParallelContext
from megatron.parallel.ddp import GradBuffers
from megatron.parallel.sharding import counts_in_norm, init_parameters, sharding_of
from megatron.parallel.single_stage import SingleStage
from megatron.timers import Timers
from megatron.training.batch import BatchRules
from megatron.training.feature import features_of
from megatron.training.launch.initialize import Runtime
from megatron.training.preflight import build_tokenizer
from megatron.training.run import Chunks, Run, Services

if TYPE_CHECKING:
    from megatron.parallel.pipeline import Pipeline


def check_requested(config: Config) -> None:
    """Raise ValueError, before CUDA starts, if a kernel requested by name is unavailable."""
    device = torch.device(devices.device_type(config.training.device))
    select.check_requested(device, getattr(torch, config.precision.params_dtype), config)


def make_tokenizer(config: Config, tokenizer: Tokenizer | None = None) -> Tokenizer:
    """Build the tokenizer of the command line (`tokenizer` if it exists already), and log it."""
    log.detail(f"> building {config.data.tokenizer} tokenizer ...")
    return tokenizer or build_tokenizer(config)


def plan_run(config: Config, world_size: int, vocab_size: int) -> Plan:
    """The plan, with Megatron's lines about batch and vocabulary."""
    plan = make_plan(config, world_size, vocab_size)
    dummies = plan.padded_vocab_size - vocab_size
    log.detail(
        f" > padded vocab (size: {vocab_size}) with {dummies} dummy tokens "
        f"(new size: {plan.padded_vocab_size})"
    )
    return plan


def build_model(
    config: Config, plan: Plan, runtime: Runtime, script: Script = NO_SCRIPT
) -> tuple[Chunks, Plan]:
    """The chunks of the model that this rank holds, their parameters initialized; and the plan,
    which is another one if the `script` has a model of its own."""
    ctx = runtime.ctx
    planned = sorted(layer for stage in plan.layers_per_stage for part in stage for layer in part)
    assert planned == list(range(config.model.num_layers)), f"layers {planned} are planned"
    log.detail("building GPT model ...")
    kernels = choose_kernels(runtime.device, getattr(torch, config.precision.params_dtype), config)
    for row in fp8_rows(runtime.device, config):
        if row.on:
            log.detail(f" > {row.operation}: {row.implementation} ({row.reason})")
    arguments: list[dict[str, Any]] = [
        dict(
            config=config.model,
            precision=config.precision,
            ctx=ctx,
            table=plan.parameters,
            vocab_size=plan.vocab_size,
            dtype=getattr(torch, config.precision.params_dtype),
            device=runtime.device,
            chunk=chunk,
            recompute=_recompute(config.training, len(chunk.layers)),
            kernels=kernels,
        )
        for chunk in plan.chunks(ctx.pp.rank)
    ]
    if script.model_provider is None:
        model = Chunks(GPTModel(**of_chunk) for of_chunk in arguments)
    elif config.parallel.shares_gradients:
        raise ValueError(
            "--data-parallel-sharding-strategy "
            f"{config.parallel.data_parallel_sharding_strategy}: the script has a model_provider, "
            "whose model may read weights where they are not there; omit one of the two, or use "
            "--data-parallel-sharding-strategy optim [own-model]"
        )
    else:
        from megatron.training import script_model

        built = script_model.build(script.model_provider, config, ctx, runtime.device, arguments)
        plan = script_model.plan_of(plan, built, config, ctx)
        model = Chunks(built)
    init_parameters(model.parameters(), ctx, config.training.seed)
    if log.shows_details() and ctx.dp.rank == 0 and ctx.cp.rank == 0:
        print(
            " > number of parameters on (tensor, pipeline) model parallel rank "
            f"({ctx.tp.rank}, {ctx.pp.rank}): {sum(p.numel() for p in model.parameters())}",
            flush=True,
        )
    return model, plan


def _recompute(t: TrainingConfig, layers: int) -> Recompute:
    """The activation recomputation of a chunk of so many layers."""
    if t.recompute_fraction is not None:
        return Recompute("full", "block", len(t.recomputed_runs(layers)))
    return Recompute(t.recompute, t.recompute_method, t.recompute_num_layers, t.recomputed_modules)


def build_pipeline(config: Config, plan: Plan, runtime: Runtime) -> SingleStage | Pipeline:
    """This rank's stage, with links for hidden states of this model's shape."""
    m = config.model
    ctx = runtime.ctx
    if ctx.pp.size == 1:
        return SingleStage()

    def shape(rows: int) -> tuple[int, ...]:
        length = m.seq_length
        if config.packed:
            rows, length = 1, rows * length
        length = length // ctx.cp.size // (ctx.tp.size if ctx.sequence_parallel else 1)
        return length, rows, m.hidden_size

    from megatron.parallel.pipeline import Pipeline

    return Pipeline(
        ctx,
        len(plan.layers_per_stage[ctx.pp.rank]),
        shape(plan.batch.micro_batch_size),
        hidden_dtype(m, getattr(torch, config.precision.params_dtype)),
        runtime.device,
        config.parallel.overlap_p2p_comm,
        config.parallel.microbatch_group_size_per_vp_stage,
        shape(plan.evaluation_batch.micro_batch_size),
        1 + len(plan.behind) * plan.apart,
    )


def build_buffers(
    config: Config, plan: Plan, ctx: ParallelContext, parameters: list[nn.Parameter]
) -> GradBuffers:
    """The memory of gradients and, sharded, of weights."""
    p = config.parallel
    dtype = getattr(torch, config.precision.grad_dtype)
    options: dict[str, Any] = dict(
        overlap_grad_reduce=p.overlap_grad_reduce,
        # a model of one's own may read a weight outside of the module that has it
        overlap_param_gather=p.overlap_param_gather and not plan.own_model,
        assign=assignment(config),
        fp32_accumulation=p.ddp_reduce_scatter_with_fp32_accumulation,
    )
    if p.shares_gradients and max(ctx.shard.size, ctx.experts.shard.size) > 1:
        from megatron.parallel.fsdp import ShardedBuffers

        initialize = partial(init_parameters, ctx=ctx, seed=config.training.seed)
        return ShardedBuffers(
            parameters,
            ctx,
            dtype,
            frees_weights=p.shares_weights,
            initialize=initialize,
            **options,
        )
    size = bucket_size(config, plan, ctx.pp.rank)
    return GradBuffers(parameters, ctx, dtype, bucket_size=size, **options)


def build_optimizer(
    config: Config, ctx: ParallelContext, buffers: GradBuffers, timers: Timers
) -> MixedPrecisionOptimizer:
    """The optimizer of the parameters that this rank owns."""
    p = config.precision
    o = config.optimizer
    grad_scaler = muon = None
    if p.fp16 or p.loss_scale is not None:
        from megatron.optimizer.scaler import build_grad_scaler

        grad_scaler = build_grad_scaler(p)
    if o.optimizer == "muon":
        from megatron.optimizer.muon import Muon

        muon = Muon(config.muon, ctx)
    by_mup = multipliers(config.model.mup_width, o.optimizer, o.decoupled_lr is not None)
    return MixedPrecisionOptimizer(
        buffers.owned,
        o,
        grad_scaler=grad_scaler,
        multipliers=by_mup if config.model.use_mup else None,
        muon=muon,
        embed_grad_scale=config.model.embed_grad_scale,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
        ranks=ModelRanks(
            counts=lambda q: counts_in_norm(sharding_of(q), ctx),
            reduce_sum=lambda x: all_reduce(x, ctx.optimizer),
            reduce_max=lambda x: all_reduce(x, ctx.optimizer, "max"),
        ),
        span=lambda name: timers(name, 1),
    )


def build_run(
    config: Config,
    plan: Plan,
    runtime: Runtime,
    timers: Timers,
    tokenizer: Tokenizer,
    services: Services | None = None,
    script: Script = NO_SCRIPT,
) -> Run:
    """Model, gradient buffers, optimizer and scheduler. `script`: whose model it is."""
    ctx = runtime.ctx
    if ctx.world.size > 1 and runtime.device.type in devices.BACKENDS:
        from megatron.parallel.warm_up import make_communicators

        ring = len(plan.layers_per_stage[0]) > 1
        communicators = make_communicators(
            ctx, runtime.device, tied=config.model.embeds_again, ring=ring
        )
        log.detail(
            f"> made {len(communicators)} communicators on rank 0: {', '.join(communicators)}"
        )
    model, plan = build_model(config, plan, runtime, script)
    buffers = build_buffers(config, plan, ctx, list(model.parameters()))
    optimizer = build_optimizer(config, ctx, buffers, timers)
    if config.training.torch_compile:
        from megatron.model.compile import compile_layers

        for chunk in model:
            compile_layers(chunk.decoder.layers.values(), dynamic=False)
    buffers.gathering.wait_in_forward(model)
    scheduler = build_scheduler(config, plan, optimizer)
    log.detail(f"> learning rate decay style: {scheduler.lr_decay_style}")
    fp8 = None
    if config.precision.fp8:
        from megatron.parallel.fp8 import delayed_scaling

        fp8 = delayed_scaling(model, config.precision, ctx)
    graphs = None
    if config.kernels.cuda_graphs:
        from megatron.training.cuda_graph import micro_batch_graphs

        graphs = micro_batch_graphs(config, model[0], buffers, runtime.device, bool(plan.own_model))
    d = config.data
    rows = kernel_table(runtime.device, getattr(torch, config.precision.params_dtype), config)
    run = Run(
        config,
        plan,
        runtime,
        timers,
        model,
        build_pipeline(config, plan, runtime),
        buffers,
        optimizer,
        scheduler,
        BatchRules(
            tokenizer.eod,
            d.reset_position_ids,
            d.reset_attention_mask,
            d.eod_mask_loss,
            ctx.cp,
        ),
        tokenizer.identity(),
        kernels={row.operation: row.implementation for row in rows if row.on},
        fp8=fp8,
        graphs=graphs,
        services=services or Services(),
    )
    for feature in features_of(config):
        feature.built(run)
    return run
