"""--use-checkpoint-args: architecture and tokenizer from the arguments saved with a checkpoint."""

import os
import typing
from collections.abc import Iterator, Mapping
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
from megatron.config.checkpoint import FromCheckpoint, is_url
from megatron.config.checks.load_paths import of_another_suite
from megatron.config.load_order import newest, newest_with_good_args
from megatron.config.logging import SHORT
from megatron.config.model import ModelConfig
from megatron.config.tokenizer import TOKENIZER_FILES
from megatron.config.tree import Config, FeatureFlags
from megatron.small_files import UnsafeName, path_inside


def take(typed: Mapping[str, Any], result: FromCheckpoint, tree: type[Config]) -> None:
    """Take the architecture of the newest checkpoint (or of --ckpt-step) into `result`, and where
    typed flags contradict it."""
    load = typed["load"]
    if is_url(load):
        result.problems.append(
            f"--use-checkpoint-args: needs a local directory, not --load {load}; give the model's "
            "flags themselves [checkpoint-args-not-local]"
        )
        return
    groups = typing.get_type_hints(tree).values()
    if problem := of_another_suite(load, [g for g in groups if issubclass(g, FeatureFlags)]):
        result.problems.append(problem)
        # they come from the converted checkpoint
        result.lost |= {name for name, flag in flags_of(Config).items() if flag.group == "model"}
        return
    folder = newest_with_good_args(load, typed.get("ckpt_step"))
    first = newest(load, typed.get("ckpt_step"))
    if folder is None:
        result.notes.append(
            f"--use-checkpoint-args: no checkpoint in {load}; the command line's values are used "
            "[checkpoint-args-missing]"
        )
        return
    if folder != first:
        result.notes.append(
            f"WARNING: --use-checkpoint-args: {first / 'args' if first else load} is damaged; "
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
        read = saved_flags.read(path_inside(folder, "args"))
    except UnsafeName as error:
        result.problems.append(f"--use-checkpoint-args: {error}")
        return
    except Problems as error:
        result.problems += [
            f"--use-checkpoint-args: {line.removeprefix('@')}" for line in error.lines
        ]
        return
    result.notes += [f"WARNING: --use-checkpoint-args: {folder}: {line}" for line in read.notes]
    saved = read.config
    values = values_of(saved)
    for name, flag in flags_of(Config).items():
        if (flag.group == "model" or flag.trained) and name not in typed:
            result.values[name] = values[name]
            if values[name] != flag.default:
                result.changed[name] = values[name]
    _take_tokenizer_files(saved, typed, folder, result)
    if result.changed and typed.get("log_format", SHORT) == SHORT:
        flags = to_args_text(config_from(Config, dict(result.changed))).split()
        result.notes.append(f"--use-checkpoint-args: from {folder}: {' '.join(flags)}")
    else:
        result.notes += [
            f"Setting {name} to {v} from checkpoint" for name, v in result.changed.items()
        ]
    merged = config_from(Config, {**result.values, **typed})
    result.problems += _contradictions(saved.model, merged.model, typed, folder)


def _take_tokenizer_files(
    saved: Config, typed: Mapping[str, Any], folder: Path, result: FromCheckpoint
) -> None:
    """Take over the files of the checkpoint's tokenizer, if they still exist and no other tokenizer
    is requested."""
    kind = config_from(Config, {**result.values, **typed}).data.tokenizer
    if kind != saved.data.tokenizer:
        return
    for name, description in TOKENIZER_FILES.get(kind, ()):
        path = getattr(saved.data, name)
        if name in typed or path is None:
            continue
        if os.path.exists(path):
            result.values[name] = result.changed[name] = path
            continue
        result.lost.add(name)
        flag = flags_of(Config)[name].spelling
        result.problems.append(
            f"--use-checkpoint-args: {path} does not exist on this machine; {folder / 'args'} "
            f"names it as {description} for {kind}: give {flag} PATH [tokenizer-file-missing]"
        )


def _contradictions(
    saved: ModelConfig, now: ModelConfig, typed: Mapping[str, Any], folder: Path
) -> Iterator[str]:
    """One line for each typed flag that contradicts the checkpoint."""
    for name, fields, before, after in architecture.differences(saved, now):
        if spellings := [flags_of(Config)[field].spelling for field in fields if field in typed]:
            yield (
                f"{' '.join(spellings)}: {name} is {after} on the command line and {before} in the "
                f"checkpoint {folder}; omit it, or load without --use-checkpoint-args "
                "[flag-contradicts-checkpoint]"
            )
