"""Pretrain a GPT, from the command line to the last evaluation. `forward_step` is what a researcher
edits, or gives to `main` in a script of their own. torch is imported when the command line and the
files it names have been checked."""

from __future__ import annotations

import gc
import os
import sys
import time

from megatron import interrupt

STARTED = time.time()


def forward_step(batch, model):
    """Loss of one micro-batch: (sum over its tokens that count, number of these tokens, metrics).

    `metrics` are averaged over the global batch and logged with the loss: by name a tensor, whose
    mean it is, or a pair (sum, count). On pipeline stages before the last: the hidden states for
    the next stage.
    """
    output = model(batch.tokens, batch.position_ids, labels=batch.labels, **batch.extras)
    if model.output_layer is None:
        return output
    losses = output
    metrics: dict = {}
    if batch.loss_mask is None:
        return losses.sum(), losses.numel(), metrics
    return (losses * batch.loss_mask).sum(), batch.loss_mask.sum(), metrics


def train(line, tokenizer, forward_step, services, watch=None):
    """Connect the ranks; build model, optimizer and data; load a checkpoint; train."""
    from megatron.device import default_backend
    from megatron.log import detail_datetime
    from megatron.training import build, build_data, loop, memory, script_args
    from megatron.training.checkpointing import data_position, load
    from megatron.training.feature import features_of
    from megatron.training.launch import initialize
    from megatron.training.logging import argument_dump, kernel_report, preamble, training_log
    from megatron.training.skipping import skip_plan

    config = line.config
    initialize.set_max_connections(config)
    backend = default_backend(config.training.device)
    for feature in features_of(config):
        feature.prepare()
    rendezvous = initialize.connect(config, watch)
    preamble.print_arguments(line, backend)
    kernel_report.check_requested(config)
    tokenizer = build.make_tokenizer(config, tokenizer)
    plan = build.plan_run(config, line.world_size, tokenizer.vocab_size)
    values = argument_dump.dumped_values(config, plan, backend, line.foreign, rank=line.rank)
    script_args.set_args(values, line.extra)
    writers = training_log.open_writers(config, plan.world_size)
    runtime = initialize.initialize(config, rendezvous)
    memory.check(config, plan, runtime)
    preamble.print_opening(line, plan, runtime, backend)
    plan, skips = skip_plan.resolve_skips(config, plan, runtime)
    timers = initialize.build_timers(config, runtime)
    lines = training_log.TrainingLog(config, plan, timers, runtime.ctx.world, writers, runtime)
    lines.start(time.time() - STARTED, backend)

    with memory.explained(config, plan, runtime):
        with timers("model-and-optimizer-setup"):
            run = build.build_run(config, plan, runtime, timers, tokenizer, services)
            run.script_flags = line.extra_flags
            loaded = load.load_checkpoint(run)
        lines.timers(["load-checkpoint"])
        detail_datetime("after model, optimizer, and learning rate scheduler are built")

        with timers("train/valid/test-data-iterators-setup"):
            data = build_data.build_data(config, plan, runtime, tokenizer, run.progress)
            data_position.check_data_order(run, data.order)
            skip_plan.start_skips(run, skips)
        detail_datetime("after dataloaders are built")
        preamble.print_loaded(config, data.rows, loaded, run.progress.iteration)
        lines.timers(["model-and-optimizer-setup", "train/valid/test-data-iterators-setup"])

        if watch:
            gc.freeze()  # what was imported and built stays until the end
            gc.enable()
        loop.train(run, data, forward_step, lines, STARTED)
    initialize.finish(rendezvous)


def pretrain(argv, forward_step=forward_step, services=None, watch=None, extra_args_provider=None):
    """Read and check the command line; then train, or print what would be done (--dry-run).

    `services`: what the loop calls, if not the usual (`training.run.Services`); `watch` hears
    signals, in a process that does nothing else; `extra_args_provider(parser)` adds flags of a
    script to the parser of argparse.
    """
    from megatron import log, threads
    from megatron.config import command_line
    from megatron.features.registry import RunConfig

    usage = threads.usage()
    line = command_line.read(argv, os.environ, extra_args_provider, RunConfig)
    log.show_details(not line.config.logging.is_short)
    if line.config.training.dry_run:
        from megatron.analysis import dry_run

        dry_run.report(line, forward_step)
        return
    from megatron.training import preflight
    from megatron.training.checkpointing.save_services import save_services
    from megatron.training.logging.output import tolerate_failing_streams

    tokenizer = preflight.check(line)
    threads.set_waiting(usage)
    if watch:  # without it, the streams are the caller's
        tolerate_failing_streams()
    with save_services(line, services, watch) as services:
        train(line, tokenizer, forward_step, services, watch)


def main(argv=None, *, forward_step=forward_step, extra_args_provider=None):
    """The program: streams, signals and the launcher's end come before the slow imports.

    With `argv` a caller's own command line; its streams and signals stay the caller's.
    """
    if argv is not None:
        return pretrain(argv, forward_step, extra_args_provider=extra_args_provider)
    interrupt.exit_at_once()  # until `watch` takes over
    interrupt.check_output()
    gc.disable()  # until the loop starts: it would look through torch's objects again and again
    from megatron.training.launch.signals import SignalWatch, leave_with

    watch = SignalWatch()
    watch.catch_interrupts()
    try:
        pretrain(sys.argv[1:], forward_step, None, watch, extra_args_provider)
    except (Exception, SystemExit) as error:
        if interrupt.lacks_package(error):
            raise
        leave_with(error, watch)


if __name__ == "__main__":
    main()
