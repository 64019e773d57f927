"""Pretrain a GPT: entry point, from the command line to the last evaluation. `forward_step` is what
a researcher edits."""

from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()  # until the watch below takes over
    interrupt.check_output()

import contextlib
import gc
import os
import sys
import time
from dataclasses import replace

from megatron import launcher, threads
from megatron.training.launch.signals import SignalWatch, leave_with

STARTED = time.time()
USAGE_AT_START = threads.usage()
if __name__ == "__main__":
    gc.disable()  # until the loop starts: it would look through torch's objects again and again


def forward_step(batch, model):
    """Loss of one micro-batch: (sum over its tokens that count, number of these tokens, metrics).

    `metrics` are averaged over the global batch and logged with the loss: by name a tensor, whose
    mean it is, or a pair (sum, count). On pipeline stages before the last: the hidden states for
    the next stage.
    """
    output = model(
        batch.tokens,
        batch.position_ids,
        batch.labels,
        batch.document_ids,
        batch.dropout_seeds,
        hidden=batch.hidden,
        token_metrics=batch.token_metrics,
        router_step=batch.router_step,
    )
    if model.output_layer is None:
        return output
    losses, metrics = output
    if batch.loss_mask is None:
        return losses.sum(), losses.numel(), metrics
    return (losses * batch.loss_mask).sum(), batch.loss_mask.sum(), metrics


def print_kernels(line):
    """The end of a dry run: which kernels a run would use here. It needs torch, which the plan does
    not."""
    try:
        from megatron.training.logging.kernel_report import kernel_lines

        lines = kernel_lines(line.config)
    except (ImportError, ValueError) as error:
        lines = [f"kernels: not known on this machine: {error}"]
    print("\n".join(lines), flush=True)


def print_trace(line, plan):
    """Of a dry run with --trace: the training step of some ranks, on tensors without values."""
    if line.config.training.trace:
        from megatron.analysis.trace.dry_run import trace
        from megatron.training.preflight import build_tokenizer

        lines = trace(line, plan, build_tokenizer(line.config), forward_step)
        print("\n".join(lines), flush=True)


def main(argv: list[str] | None = None, signals: SignalWatch | None = None, services=None) -> None:
    """Parse and check before torch is imported; then plan, build, load, train. Tests give
    `services` of their own."""
    from megatron.config import command_line

    line = command_line.read(sys.argv[1:] if argv is None else argv, os.environ)
    from megatron import log
    from megatron.training import preflight

    log.show_details(not line.config.logging.is_short)
    if line.config.training.dry_run:
        if line.rank == 0:
            from megatron.training.dry_run import print_plan

            plan = print_plan(line)
            print_kernels(line)
            preflight.check_dry(line, plan)
            print_trace(line, plan)
        return
    tokenizer = preflight.check(line)
    from megatron.training.logging import output

    if signals:  # the program; who calls main() has streams of its own
        output.tolerate_failing_streams()
    writes = line.rank == 0 and not line.config.training.skip_train
    with held_lock(line.config.checkpoint.save if writes else None) as lock:
        if signals and lock:
            signals.leaving = lock.release
        threads.set_waiting(USAGE_AT_START)
        with exchange_with_object_store(line, writes), started_async_writer(line) as writer:
            train(line, tokenizer, lock, writer, signals, services)


def held_lock(directory):
    """A context with the lock of --save; with None where this process saves nothing."""
    if directory is None:
        return contextlib.nullcontext()
    from megatron.checkpoint.lock import held

    return held(directory)


def exchange_with_object_store(line, writes):
    """Fetch what --load names there; a context in which what is saved is uploaded."""
    if not (line.load_url or line.save_url or line.snapshot_url):
        return contextlib.nullcontext()
    from megatron.checkpoint import object_store
    from megatron.config import command_line

    c = line.config.checkpoint
    if writes and line.save_url and (c.finetune or not c.load):
        if problems := object_store.overwritten(line.save_url):
            command_line.refuse(problems, launcher.info())
    if line.load_url and line.rank == 0:
        object_store.fetch(
            line.load_url, c.load, c.ckpt_step, required=line.load_url != line.save_url
        )
    if line.snapshot_url and line.rank == 0 and c.load and c.ckpt_step is None:
        object_store.fetch_snapshot(line.snapshot_url, c.snapshot_dir, c.load)
    snapshots = c.snapshot_dir if c.snapshot_interval else None
    places = (
        object_store.places(c.save, line.save_url, snapshots, line.snapshot_url)
        if writes and c.save
        else []
    )
    return object_store.uploading(places, c.save)


def started_async_writer(line):
    """A context with the writing process of --async-save, if it is asked for."""
    c = line.config.checkpoint
    if not (c.async_save and c.save) or line.config.training.skip_train:
        return contextlib.nullcontext()
    from megatron.checkpoint.async_writer import started

    return started()


def opened_eval_tasks(line):
    """--eval-tasks, read and checked; None without it. Raises ValueError where that fails."""
    files = line.config.training.eval_tasks
    if not files:
        return None
    try:
        from megatron.analysis.eval_tasks import EvalTasks
    except ImportError as error:
        raise ValueError(
            f"--eval-tasks needs the package lm-eval ({error}): pip install lm-eval, or omit the "
            "flag [package-missing]"
        ) from None
    return EvalTasks(files)


def print_start_lines(line, backend):
    """What Megatron prints before its table of arguments; not with --log-format short."""
    if not line.config.logging.is_short:
        from megatron.config.megatron_compat.argument_dump import start_lines
        from megatron.log import print_rank_0

        for text in start_lines(line, backend):
            print_rank_0(text)


def extra_hooks(run, tokenizer, lines, eval_tasks):
    """What some runs do beside training: --eval-tasks, and the ledger's shares on TensorBoard."""
    hooks = [eval_tasks.hook(run, tokenizer, lines)] if eval_tasks else []
    if run.config.checkpoint.save and run.config.logging.has_boards:
        from megatron.analysis.goodput_points import GoodputPoints

        hooks.append(GoodputPoints(run, lines))
    return hooks


def train(line, tokenizer, lock, writer, signals: SignalWatch | None, services=None) -> None:
    """Plan, build, load, train; `lock` of --save, `writer` of --async-save."""
    from megatron.device import default_backend
    from megatron.log import detail, detail_datetime, print_rank_0
    from megatron.timers import Timers
    from megatron.training import build, build_data, loop
    from megatron.training.checkpointing import data_position, load
    from megatron.training.launch import initialize
    from megatron.training.logging import preamble, training_log
    from megatron.training.logging.kernel_report import check_requested, kernel_lines
    from megatron.training.run import COMPUTE, Services
    from megatron.training.skipping import skip_plan

    config = line.config
    initialize.set_max_connections(config)
    backend = default_backend(line.config.training.device)
    short = config.logging.is_short
    eval_tasks = opened_eval_tasks(line)
    rendezvous = initialize.connect(config, signals)
    print_start_lines(line, backend)
    check_requested(config)
    tokenizer = build.make_tokenizer(config, tokenizer)
    plan = build.plan_run(config, line.world_size, tokenizer.vocab_size)
    writers = training_log.open_writers(config, plan.world_size)
    runtime = initialize.initialize(config, rendezvous)
    for text in preamble.opening(line, plan, runtime, backend) if short else kernel_lines(config):
        print_rank_0(text)
    plan, skips = skip_plan.resolve_skips(config, plan, runtime)
    timers = Timers(
        config.logging.timing_log_level,
        initialize.synchronizer(runtime),
        watched=COMPUTE if config.logging.log_straggler else (),
        stream=initialize.stream_clock(runtime),
    )
    lines = training_log.TrainingLog(config, plan, timers, runtime.ctx.world, writers, runtime)
    lines.start(time.time() - STARTED, backend)

    with timers("model-and-optimizer-setup"):
        run = build.build_run(config, plan, runtime, timers, tokenizer)
        services = services or Services(signals or SignalWatch())
        run.services = replace(
            services, fence=lock.check if lock else services.fence, writer=writer
        )
        loaded = load.load_checkpoint(run)
    lines.timers(["load-checkpoint"])
    detail_datetime("after model, optimizer, and learning rate scheduler are built")
    with timers("train/valid/test-data-iterators-setup"):
        data = build_data.build_data(config, plan, runtime, tokenizer, run)
        data_position.check_data_order(run, data.order)
        skip_plan.start_skips(run, skips)
    detail_datetime("after dataloaders are built")
    detail("done with setup ...")
    if short:
        preamble.print_loaded(config, data.rows, loaded, run.progress.iteration)
    lines.timers(["model-and-optimizer-setup", "train/valid/test-data-iterators-setup"])
    if signals:
        gc.freeze()  # what was imported and built stays until the end
        gc.enable()
    loop.pretrain(
        run, data, forward_step, lines, STARTED, extra_hooks(run, tokenizer, lines, eval_tasks)
    )
    initialize.finish(rendezvous)


if __name__ == "__main__":
    watch = SignalWatch()
    watch.catch_interrupts()
    try:
        main(signals=watch)
    except (Exception, SystemExit) as error:
        leave_with(error, watch)
