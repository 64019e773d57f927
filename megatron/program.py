"""From a command line to the last evaluation: what pretrain_gpt.py and scripts of one's own call.

torch is imported when the command line and the files it names have been checked.
"""

from __future__ import annotations

import enum
import functools
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron import interrupt

if TYPE_CHECKING:
    from megatron.config.command_line import CommandLine
    from megatron.config.plan.plan import Plan
    from megatron.config.script import ExtraArgsProvider, Script
    from megatron.config.tree import Config
    from megatron.data.tokenizers.base import Tokenizer
    from megatron.training.launch.initialize import Runtime
    from megatron.training.launch.rendezvous import Rendezvous
    from megatron.training.launch.signals import SignalWatch
    from megatron.training.logging.training_log import TrainingLog
    from megatron.training.run import Run, Services
    from megatron.training.step import ForwardStep

STARTED = time.time()


class ModelType(enum.Enum):
    """Megatron's name of what is trained: GPT."""

    encoder_or_decoder = 1


_EMBEDDING_RANKS = ("get_embedding_ranks", "get_position_embedding_ranks")


def extra_arguments(
    provider: ExtraArgsProvider | None, defaults: Mapping[str, Any] | None
) -> ExtraArgsProvider:
    """A script's own flags, and its defaults, as one function of the parser."""

    def add(parser: Any) -> None:
        if provider is not None:
            provider(parser)
        parser.set_defaults(**defaults or {})

    return add


def pretrain(
    train_valid_test_datasets_provider: Callable[..., Any] | None,
    model_provider: Callable[..., Any] | None,
    model_type: Any,
    forward_step_func: Callable[..., Any],
    process_non_loss_data_func: None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    argv: Sequence[str] | None = None,
    services: Services | None = None,
    **unsupported: Any,
) -> None:
    """Train with a script's own functions, in the order of Megatron's arguments.

    `train_valid_test_datasets_provider`: called with the numbers of samples needed, returns three
    torch data sets (`data.script_datasets`); None for the data of the command line.
    `model_provider`: returns a model (`training.script_model`); None for the GPT of the command
    line. `forward_step_func`: `training.script_step` says what it takes and returns.
    `extra_args_provider(parser)` adds flags to the parser of argparse, `args_defaults` are other
    defaults by name. With `argv` a caller's own command line: its streams and signals stay the
    caller's. `services`: what the loop calls, if not the usual (`training.run.Services`).

    The program leaves with 2 if the command line is wrong. Raises TypeError for what there is not.
    """

    def work(words: Sequence[str], watch: SignalWatch | None = None) -> None:
        functions = {"process_non_loss_data_func": process_non_loss_data_func, **unsupported}
        _check_arguments(model_type, functions)
        from megatron.config.script import Script

        script = Script(
            forward_step_func,
            extra_arguments(extra_args_provider, args_defaults)
            if extra_args_provider or args_defaults
            else None,
            train_valid_test_datasets_provider,
            model_provider,
        )
        run(words, script, services, watch)

    if argv is not None:
        return work(argv)
    # Streams, signals and the launcher's end come before the slow imports.
    interrupt.exit_at_once()  # until `watch` takes over
    interrupt.check_output()
    gc.disable()  # until the loop starts: it would look through torch's objects again and again
    from megatron.training.launch.signals import SignalWatch

    watch = SignalWatch()
    watch.catch_interrupts()
    try:
        work(sys.argv[1:], watch)
    except (Exception, SystemExit) as error:
        if interrupt.lacks_package(error):
            raise
        from megatron.training.launch.leaving import leave_with

        leave_with(error, watch)


def _check_arguments(model_type: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for a model that is no GPT, and for arguments that must be left out."""
    kind = getattr(model_type, "name", model_type)  # that of megatron-core is another class
    if kind != ModelType.encoder_or_decoder.name:
        raise ValueError(
            f"pretrain: model_type {kind}: only encoder_or_decoder, a GPT, can be trained "
            "[no-such-argument]"
        )
    # which ranks hold the embedding follows from the flags: functions that say it are not called
    for name, value in arguments.items():
        if value is not None and name not in _EMBEDDING_RANKS:
            raise ValueError(
                f"pretrain: {name} has no effect here; leave it out [no-such-argument]"
            )


def check_packages() -> None:
    """Raise ValueError where another project's megatron.training comes first on the path."""
    spec = importlib.util.find_spec("megatron.training")
    package = Path(__file__).parent
    if spec is not None and spec.origin and Path(spec.origin).parent.parent != package:
        raise ValueError(
            f"{Path(spec.origin).parent} comes before {package} on Python's path, and is another "
            "project's megatron.training; take it off PYTHONPATH, or put this suite first "
            "[other-megatron]"
        )


def read_command_line(argv: Sequence[str], script: Script) -> CommandLine:
    """The checked command line. Flags of add-ons are read where they may be asked for."""
    from megatron.config import command_line
    from megatron.features import own

    def with_addons() -> type[Config]:
        from megatron.features.registry import RunConfig

        return RunConfig

    more = command_line.More(with_addons, own.ASKING)
    return command_line.read(argv, os.environ, script, own.OwnConfig, more)


def run(
    argv: Sequence[str],
    script: Script,
    services: Services | None = None,
    watch: SignalWatch | None = None,
) -> None:
    """Read and check the command line; then train, or print what would be done (--dry-run).

    `watch` hears signals, in a process that does nothing else.
    """
    check_packages()
    from megatron import log, threads

    usage = threads.usage()
    lines = stages_of(read_command_line(argv, script))
    line = lines[0]
    log.show_details(not line.config.logging.is_short)
    if line.config.training.dry_run:
        from megatron.analysis import dry_run

        dry_run.report(line)
        return
    from megatron.training import preflight
    from megatron.training.checkpointing.save_services import save_services
    from megatron.training.logging.output import tolerate_failing_streams

    tokenizers = [preflight.check(each, begins=each is line) for each in lines]
    if watch:  # without it, the streams are the caller's
        tolerate_failing_streams()
    if threads.set_waiting(usage) and watch and "torch" in sys.modules:
        # OpenMP has read the variable when the script imported torch
        del os.environ["OMP_WAIT_POLICY"]
        log.warn_once(
            "threads that wait keep their cores busy, and this host has too few: start the script "
            "with OMP_WAIT_POLICY=passive, or import torch inside its functions; it is slower so "
            "[torch-imported-before-pretrain]"
        )
    with save_services(line, services, watch) as complete_services:
        train(lines, tokenizers, complete_services, watch)


def stages_of(line: CommandLine) -> Sequence[CommandLine]:
    """The runs of this process, one after the other: those of a feature, else `line` alone."""
    from megatron.training.feature import features_of

    return [run for one in features_of(line.config) for run in one.stage_lines(line)] or [line]


def train(
    lines: Sequence[CommandLine],
    tokenizers: Sequence[Tokenizer],
    services: Services,
    watch: SignalWatch | None = None,
) -> None:
    """Connect the ranks and make each of the runs that begin where the one before ended."""
    from megatron.training.launch import initialize

    rendezvous, join = connect(lines[0].config, watch)
    for line, tokenizer in zip(lines, tokenizers, strict=True):
        if not _train(line, tokenizer, services, watch, join):
            break
        gc.unfreeze()
        gc.collect()  # before the next run needs the memory of this one
    initialize.finish(rendezvous)


def connect(
    config: Config, watch: SignalWatch | None = None
) -> tuple[Rendezvous | None, Callable[[], Runtime]]:
    """The connections of this rank, and what makes its process groups, once."""
    from megatron.training.feature import features_of
    from megatron.training.launch import initialize

    initialize.set_max_connections(config)
    for feature in features_of(config):
        feature.prepare(config)
    rendezvous = initialize.connect(config, watch)
    return rendezvous, functools.cache(functools.partial(initialize.initialize, config, rendezvous))


def begin(
    line: CommandLine, tokenizer: Tokenizer, services: Services, join: Callable[[], Runtime]
) -> tuple[Run, TrainingLog, Tokenizer, str | None]:
    """`join` the other ranks; build model and optimizer; load a checkpoint, whose path is
    returned."""
    from megatron.device import default_backend
    from megatron.training import build, current_run, memory
    from megatron.training.checkpointing.start import load_checkpoint
    from megatron.training.launch import initialize
    from megatron.training.logging import preamble, training_log
    from megatron.training.logging.writers import open_writers

    config = line.config
    backend = default_backend(config.training.device)
    preamble.print_arguments(line, backend)
    build.check_requested(config)
    tokenizer = build.make_tokenizer(config, tokenizer)
    plan = build.plan_run(config, line.world_size, tokenizer.vocab_size)
    current_run.tell("begin", line, plan, backend, tokenizer, line.rank)
    writers = open_writers(config, plan.world_size)
    runtime = join()
    memory.check(line, plan, runtime)
    preamble.print_opening(line, plan, runtime, backend)
    timers = initialize.build_timers(config, runtime)
    current_run.tell("connected", timers, runtime.ctx)
    lines = training_log.TrainingLog(config, plan, timers, runtime.ctx.world, writers, runtime)
    lines.start(time.time() - STARTED, functools.partial(_dumped, line, plan, backend))

    with memory.explained(line, plan, runtime):
        with timers("model-and-optimizer-setup"):
            run = build.build_run(config, plan, runtime, timers, tokenizer, services, line.script)
            run.script_flags = line.extra_flags
            lines.take_plan(run.plan)
            loaded = load_checkpoint(run)
            if line.part and run.progress.iteration not in line.part:
                raise ValueError(
                    f"--load {config.checkpoint.load}: what was loaded is of iteration "
                    f"{run.progress.iteration}, and this stage has the iterations after "
                    f"{line.part[0]}, up to {line.part[-1]}; remove the damaged checkpoints after "
                    "it, or give --ckpt-step [checkpoint-of-another-stage]"
                )
            current_run.tell("progress", run.progress)
        lines.timers(["load-checkpoint"])
    return run, lines, tokenizer, loaded


def _train(
    line: CommandLine,
    tokenizer: Tokenizer,
    services: Services,
    watch: SignalWatch | None,
    join: Callable[[], Runtime],
) -> bool:
    """Begin the run, build its data, train. Whether that was a stage to its end."""
    run, lines, tokenizer, loaded = begin(line, tokenizer, services, join)
    from megatron.log import detail_datetime
    from megatron.training import build_data, loop, memory, skipping
    from megatron.training.logging import preamble

    config, plan, runtime, timers = line.config, run.plan, run.runtime, run.timers
    with memory.explained(line, plan, runtime):
        detail_datetime("after model, optimizer, and learning rate scheduler are built")

        with timers("train/valid/test-data-iterators-setup"):
            data = build_data.build_data(
                config, plan, runtime, tokenizer, run.progress, line.script.datasets_provider
            )
            build_data.check_data_order(run, data.order)
            skipping.resolve_skips(run, skipping.read_skips(run))
            lines.take_plan(run.plan)
        detail_datetime("after dataloaders are built")
        preamble.print_loaded(config, data.rows, loaded, run.progress)
        lines.timers(["model-and-optimizer-setup", "train/valid/test-data-iterators-setup"])

        if watch:
            gc.freeze()  # what was imported and built stays until the end
            gc.enable()
        return loop.train(run, data, _batch_step(line.script), lines, STARTED)


def _dumped(line: CommandLine, plan: Plan, backend: str) -> dict[str, Any]:
    """The arguments as Megatron prints them."""
    from megatron.training.logging import argument_dump

    return argument_dump.dumped_values(
        line.config, plan, backend, line.foreign, of_script=line.extra
    )


def _batch_step(script: Script) -> ForwardStep:
    """The script's forward_step, called with (batch, model)."""
    assert script.forward_step is not None, "the program has one"
    if script.takes_batch:
        return script.forward_step
    from megatron.training.script_step import as_batch_step

    return as_batch_step(script)
