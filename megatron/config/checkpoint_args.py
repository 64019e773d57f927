"""--use-checkpoint-args: architecture and tokenizer from the arguments saved with a checkpoint."""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.arguments import (
    Problems,
    config_from,
    flags_of,
    to_args_text,
    values_of,
)
from megatron.config import architecture, saved_flags
from megatron.config.architecture import FromCheckpoint
from megatron.config.checkpoint import is_url
from megatron.config.checks.paths import (
    newest_checkpoint,
    newest_with_good_args,
    of_another_suite,
)
from megatron.config.logging import SHORT
from megatron.config.model import ModelConfig
from megatron.config.tokenizer import TOKENIZER_FILES
from megatron.config.tree import Config


def take(typed: Mapping[str, Any], found: FromCheckpoint, tree: type[Config]) -> None:
    """Take the architecture of the newest checkpoint (or of --ckpt-step) into `found`, and where
    typed flags contradict it."""
    load = typed["load"]
    if is_url(load):
        found.problems.append(
            f"--use-checkpoint-args: needs a local directory, not --load {load}; give the model's "
            "flags themselves [checkpoint-args-not-local]"
        )
        return
    if problem := of_another_suite(load, typing.get_type_hints(tree).values()):
        found.problems.append(problem)
        # they come from the converted checkpoint
        found.lost |= {name for name, flag in flags_of(Config).items() if flag.group == "model"}
        return
    folder = newest_with_good_args(load, typed.get("ckpt_step"))
    newest = newest_checkpoint(load, typed.get("ckpt_step"))
    if folder is None:
        found.notes.append(
            f"--use-checkpoint-args: no checkpoint in {load}; the command line's values are used "
            "[checkpoint-args-missing]"
        )
        return
    if folder != newest:
        found.notes.append(
            f"WARNING: --use-checkpoint-args: {newest / 'args' if newest else load} is damaged; "
            f"those of {folder.name} are used [checkpoint-args-damaged]"
        )
    try:
        if (folder / "args").exists() and not (folder / "args").is_file():
            raise Problems(
                [
                    f"@{folder / 'args'}: not a file; the checkpoint is incomplete, choose another "
                    "--load [checkpoint-args-damaged]"
                ]
            )
        read = saved_flags.read(folder / "args")
    except Problems as error:
        found.problems += [
            f"--use-checkpoint-args: {line.removeprefix('@')}" for line in error.lines
        ]
        return
    found.notes += [f"WARNING: --use-checkpoint-args: {folder}: {line}" for line in read.notes]
    saved = read.config
    values = values_of(saved)
    for name, flag in flags_of(Config).items():
        if (flag.group == "model" or flag.trained) and name not in typed:
            found.values[name] = values[name]
            if values[name] != flag.default:
                found.taken[name] = values[name]
    _take_tokenizer_files(saved, typed, folder, found)
    found.notes += _taken_notes(found.taken, folder, typed.get("log_format", SHORT) == SHORT)
    merged = config_from(Config, {**found.values, **typed})
    found.problems += _contradictions(saved.model, merged.model, typed, folder)


def _taken_notes(taken: Mapping[str, Any], folder: Path, short: bool) -> list[str]:
    """What came from the checkpoint: as flags in one line, or one line each."""
    if short and taken:
        return [
            f"--use-checkpoint-args: from {folder}: "
            f"{' '.join(to_args_text(config_from(Config, dict(taken))).split())}"
        ]
    return [f"Setting {name} to {value} from checkpoint" for name, value in taken.items()]


def _take_tokenizer_files(
    saved: Config, typed: Mapping[str, Any], folder: Path, found: FromCheckpoint
) -> None:
    """Take over the files of the checkpoint's tokenizer, if they still exist and no other tokenizer
    is requested."""
    kind = config_from(Config, {**found.values, **typed}).data.tokenizer
    if kind != saved.data.tokenizer:
        return
    for name, what in TOKENIZER_FILES.get(kind, ()):
        path = getattr(saved.data, name)
        if name in typed or path is None:
            continue
        if os.path.exists(path):
            found.values[name] = found.taken[name] = path
            continue
        found.lost.add(name)
        flag = flags_of(Config)[name].spelling
        found.problems.append(
            f"--use-checkpoint-args: {path} does not exist on this machine; {folder / 'args'} "
            f"names it as {what} for {kind}: give {flag} PATH [tokenizer-file-missing]"
        )


def _contradictions(
    saved: ModelConfig, ours: ModelConfig, typed: Mapping[str, Any], folder: Path
) -> list[str]:
    """One line for each typed flag that contradicts the checkpoint."""
    lines = []
    for name, fields, theirs, mine in architecture.differences(saved, ours):
        given = [field for field in fields if field in typed]
        if given:
            spelling = " ".join(flags_of(Config)[field].spelling for field in given)
            lines.append(
                f"{spelling}: {name} is {mine} on the command line and {theirs} in the checkpoint "
                f"{folder}; omit it, or load without --use-checkpoint-args "
                "[flag-contradicts-checkpoint]"
            )
    return lines
