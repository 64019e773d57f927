"""Checks a command line against the files it names: data, tokenizer and the checkpoint of --load.
Loads no torch.

All of it is noticed later too, when model and data are built; here it costs a fraction of a second.
What cannot be read here is left to that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron import host, launcher
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.state import RunState
from megatron.config import command_line
from megatron.config.checks.paths import has_files
from megatron.config.command_line import CommandLine
from megatron.config.plan.plan import Plan, make_plan
from megatron.config.run_directory import STATE, vouched_file
from megatron.config.skip_ranges import may_skip
from megatron.config.tree import Config
from megatron.data.tokenizers.build import Tokenizer, tokenizer_from
from megatron.training import memory
from megatron.training.checkpointing import one_history
from megatron.training.feature import features_of


def build_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of the command line; synthetic data without one has a vocabulary of plain
    numbers. Raises ValueError, also for one without the end-of-document token that a flag needs."""
    tokenizer = tokenizer_from(config.data)
    for flag in ("mock_data", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if tokenizer.eod is None and getattr(config.data, flag):
            raise ValueError(
                f"--{flag.replace('_', '-')}: this {config.data.tokenizer} has no end-of-document "
                "token; omit the flag, or name an eos_token in the tokenizer's own files "
                "[flag-not-with-tokenizer]"
            )
    return tokenizer


def check(line: CommandLine, begins: bool = True) -> Tokenizer:
    """Exit with code 2 and one line per contradiction between the command line and its files;
    otherwise return the tokenizer. A run that does not begin with its process (`begins`) loads what
    is not there yet.

    Raises ValueError and OSError for files that cannot be read.
    """
    tokenizer = build_tokenizer(line.config)
    plan = make_plan(line.config, line.world_size, tokenizer.vocab_size)
    problems = [
        *_of_tokenizer(line, tokenizer),
        *(_of_resume(line, plan, tokenizer) if begins else []),
        *([] if line.script.datasets_provider else _of_data(line.config, plan, tokenizer)),
        *([] if line.script.model_provider else _of_memory(line.config, plan)),
    ]
    if problems:
        command_line.refuse(problems, launcher.info())
    return tokenizer


def check_dry(line: CommandLine, plan: Plan, more: Sequence[str] = ()) -> None:
    """As `check`, of the files that are on this machine, and with `more` problems."""
    try:
        tokenizer = build_tokenizer(line.config)
    except (ValueError, OSError):
        tokenizer = None
    problems = [*_of_tokenizer(line, tokenizer), *_of_resume(line, plan, tokenizer)]
    with contextlib.suppress(ValueError, OSError):  # which the dry run has said already
        if line.script.datasets_provider is None:
            problems += _of_data(line.config, plan, tokenizer)
    if problems or more:
        command_line.refuse(list(dict.fromkeys([*problems, *more])), launcher.info())


def _of_tokenizer(line: CommandLine, tokenizer: Tokenizer | None) -> Iterator[str]:
    """What features say of it."""
    if tokenizer is not None:
        for feature in features_of(line.config):
            yield from feature.tokenizer_problems(tokenizer, line)


def resumed_state(line: CommandLine) -> RunState | None:
    """The state of the checkpoint on this machine from which the run goes on; None where there is
    none, or it cannot be read."""
    return None if line.config.checkpoint.finetune else _state(_folder(line))


def _state(folder: Path | None) -> RunState | None:
    text = None if folder is None else vouched_file(folder, STATE)
    if text is None:
        return None
    from megatron.checkpoint import state_reader

    try:
        return state_reader.parse(text, f"{folder}")
    except CheckpointError:
        return None


def _folder(line: CommandLine) -> Path | None:
    """The checkpoint on this machine that the run loads."""
    c = line.config.checkpoint
    if c.load is None or line.load_url or line.snapshot_url:
        return None  # or what is newest is known when it is here
    from megatron.config.load_order import newest_with_good_args

    return newest_with_good_args(c.load, c.ckpt_step, c.slots_of(c.load))


def _of_memory(config: Config, plan: Plan) -> Iterator[str]:
    """Too little memory on this host, if it is certain that the run computes on CPUs."""
    device = config.training.device
    if device == "cpu" or (device == "auto" and not host.shows_accelerator()):
        yield from memory.problems_of_host(config, plan, on_cpu=True)


def _of_data(config: Config, plan: Plan, tokenizer: Tokenizer | None) -> list[str]:
    """Problems of data that are read here; packed data are when they are built. Raises ValueError
    and OSError where they cannot be read."""
    if config.packed or not has_files(config.data):
        return []
    from megatron.training.preflight_data import of_data

    return of_data(config, plan, tokenizer)


def _of_resume(line: CommandLine, plan: Plan, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Contradictions between this command line and the run directories: what --save holds, flags
    and counters of the checkpoint that would be loaded, records of skipped iterations. Raises
    CheckpointError for records that cannot be read."""
    yield from one_history.problems(line)
    folder = None if line.config.checkpoint.finetune else _folder(line)
    state = _state(folder)
    if folder is not None:
        from megatron.training.checkpointing.resume_checks import of_checkpoint

        yield from of_checkpoint(line, plan, tokenizer, folder, state)
    if folder is None or state is not None:
        yield from _of_skips(line, plan, state or RunState(versions={}))


def _of_skips(line: CommandLine, plan: Plan, state: RunState) -> list[str]:
    """What is wrong with iterations to skip, as far as can be seen here where the run goes on."""
    c = line.config.checkpoint
    elsewhere = line.load_url or line.snapshot_url or c.non_persistent_ckpt_type == "local"
    if line.config.training.skip_train or elsewhere or not may_skip(c, plan.skips):
        return []  # what is newest is known when it is here
    from megatron.checkpoint.skip_log import Position, Skips

    try:
        here = Position.of(state.iteration, state.consumed_train_samples, state.skipped_ranges())
    except CheckpointError:
        return []  # the load says why
    return Skips.read(c, plan.skips, here, state.skips).problems(plan)
