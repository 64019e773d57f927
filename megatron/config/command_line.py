"""The command line: from argv to a checked configuration, and from a configuration to help,
argument dump and plan.

Everything wrong with a command line is said at once, in well under a second, before anything large
is imported.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from megatron import launcher, log, optional
from megatron.arguments import (
    OtherFlags,
    Parsed,
    Parser,
    Problems,
    build_parser,
    config_from,
    flags_of,
    parse,
    read_words,
    to_args_text,
    values_of,
)
from megatron.config import architecture
from megatron.config.checkpoint import is_url, staged
from megatron.config.checks import rules as check
from megatron.config.checks.paths import newest_checkpoint, newest_with_good_args
from megatron.config.checks.tokenizer import BYTE_VOCAB_SIZE, TIKTOKEN_VOCAB_SIZE, ids_in_file
from megatron.config.logging import SHORT
from megatron.config.model import ModelConfig
from megatron.config.plan.plan import Plan, make_plan
from megatron.config.summary_lines import changed_arguments
from megatron.config.tokenizer import TOKENIZER_FILES
from megatron.config.tree import Config
from megatron.version import version_line

DESCRIPTION = (
    "Pretrain a GPT. Values follow their flags; @FILE reads flags from a file (typed ones win). "
    "Flags of Megatron-LM that have no effect here, or are refused, are listed with the reason in "
    "docs/flags.md."
)
# A flag that could not be read: what must not be called missing because of it.
_IN_PLACE_OF = {"train_samples": "--train-iters is missing"} | dict.fromkeys(
    (
        "data_path",
        "train_data_path",
        "data_args_path",
        "per_split_data_args_path",
        "mock_data",
        "dummy_data",
    ),
    "no data:",
)
_GPT2_VOCABULARY = 50257
# Of the data, what --use-checkpoint-args takes over: all that decides the ids. Its files:
# `_take_tokenizer_files`.
_TOKENIZER = {
    "tokenizer_type",
    "vocab_size",
    "vocab_extra_ids",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "tiktoken_special_tokens",
}


@dataclass(frozen=True)
class CommandLine:
    """A command line without problems. `typed`: what the user gave, by field name; `foreign`:
    Megatron's flags that have no effect here; `notes`: lines to print at the start; `world_size` is
    the plan's with --dry-run. Of --save, --load and --snapshot-dir in an object store, `save_url`,
    `load_url` and `snapshot_url`; the configuration then has their staging directories."""

    config: Config
    typed: dict[str, Any]
    foreign: dict[str, Any]
    notes: list[str]
    world_size: int
    rank: int
    save_url: str | None = None
    load_url: str | None = None
    snapshot_url: str | None = None


def parser() -> Parser:
    """All flags of pretrain_gpt.py, Megatron's foreign ones too (help leaves those out)."""
    return build_parser(
        Config,
        prog="pretrain_gpt.py",
        description=DESCRIPTION,
        others=_other_flags,
    )


def _other_flags() -> OtherFlags:
    """The flags of Megatron-LM that have no field here."""
    compat = optional.load("megatron.config.megatron_compat.flags")
    return OtherFlags(compat.parser_flags(), compat.explain, compat.ignores, compat.SYNONYMS)


def _judge_foreign(
    foreign: Mapping[str, Any], ignored: Sequence[str]
) -> tuple[list[str], list[str], list[list[str]]]:
    """Of typed flags of Megatron-LM that have no field here: errors, notes, and the command lines
    that replace some."""
    if not foreign and not ignored:
        return [], [], []
    compat = optional.load("megatron.config.megatron_compat.flags")
    replacements = list(compat.replaced(foreign).values())
    return compat.refused(foreign), compat.accepted(foreign, ignored), replacements


def read(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """The checked command line of this process; `environ` says which rank of how many it is.

    Problems go to stderr of rank 0, one line each, and the process exits with 2; --help exits with
    0.
    """
    flags = parser()
    parsed = parse(flags, argv)
    here, wrong = launcher.read(environ)
    wrong += launcher.rendezvous_problems(environ)
    if parsed.help:
        if here.rank == 0:
            print(flags.help(), end="", flush=True)
        raise SystemExit(0)
    if parsed.version:
        if here.rank == 0:
            print(version_line(flags.prog), flush=True)
        raise SystemExit(0)
    line, problems = _checked(flags, parsed, here)
    if wrong or problems:
        refuse([*wrong, *problems], here)
    return line


def judge(argv: Sequence[str], world_size: int) -> tuple[list[str], list[str]]:
    """(notes, problems) of a command line on `world_size` ranks, as a dry run would say them."""
    flags = parser()
    parsed = parse(flags, [*argv, "--dry-run", "--world-size", str(world_size)])
    line, problems = _checked(flags, parsed, launcher.read({})[0])
    return line.notes, problems


def refuse(problems: list[str], here: launcher.LaunchInfo) -> NoReturn:
    """Say what is wrong with a command line and leave with 2.

    Rank 0 speaks; where it has nothing to say, so that no launcher ends the rest, a rank of each
    node.
    """
    if here.rank:
        time.sleep(0.0 if here.local_rank is None else log.OTHERS_WAIT)
    if here.rank == 0 or here.local_rank == 0:
        speaker = f"rank {here.rank}: " if here.rank else ""
        log.last_words("".join(f"{speaker}error: {text}\n" for text in problems))
    raise SystemExit(2)


def _checked(
    flags: Parser, parsed: Parsed, here: launcher.LaunchInfo
) -> tuple[CommandLine, list[str]]:
    known = flags_of(Config)
    foreign = {name: value for name, value in parsed.typed.items() if name not in known}
    refused, accepted, replacements = _judge_foreign(foreign, parsed.ignored)
    typed = {name: value for name, value in parsed.typed.items() if name not in foreign}
    for words in replacements:
        typed = parse(flags, words).typed | typed
    typed, unsupported = _with_deepspeed(flags, typed, foreign.get("deepspeed_config"))
    theirs = _Theirs() if parsed.unread_file else _from_checkpoint(flags, typed)
    config = config_from(Config, {**theirs.values, **typed})
    world_size = config.training.world_size if config.training.dry_run else None
    world_size = max(1, world_size or here.world_size)
    # What an @FILE that cannot be read would have said is not missing.
    found = [] if parsed.unread_file else check.problems(config, world_size, typed)
    unread = tuple(
        _IN_PLACE_OF.get(flag.name, f"{flag.spelling} is missing")
        for flag in flags.flags
        if flag.name in parsed.broken | theirs.lost
    )
    problems = [
        *parsed.problems,
        *refused,
        *unsupported,
        *theirs.problems,
        *(text for text in found if not text.startswith(unread)),
    ]
    notes = [*parsed.notes, *accepted, *theirs.notes]
    if not problems:
        notes += check.notes(config, world_size, typed)
    c = config.checkpoint
    urls = [path if is_url(path) else None for path in (c.save, c.load, c.snapshot_dir)]
    config = replace(config, checkpoint=staged(c))
    return CommandLine(config, typed, foreign, notes, world_size, here.rank, *urls), problems


def _with_deepspeed(
    flags: Parser, typed: dict[str, Any], path: str | None
) -> tuple[dict[str, Any], list[str]]:
    """(typed flags and those of the JSON file of --deepspeed_config, problems)."""
    if path is None:
        return typed, []
    compat = optional.load("megatron.config.megatron_compat.deepspeed")
    try:
        words, problems = compat.read_deepspeed(path)
    except OSError as error:
        missing = f"--deepspeed_config {path}: {error.strerror or error}; give a JSON file"
        return typed, [] if typed.get("dry_run") else [f"{missing} [file-not-readable]"]
    theirs = parse(flags, words)
    problems += [f"--deepspeed_config {path}: {line}" for line in theirs.problems]
    for name, value in theirs.typed.items():
        if typed.get(name, value) != value:
            flag = flags_of(Config)[name].spelling
            problems.append(
                f"{flag} {typed[name]}: --deepspeed_config {path} says {value}; make them agree "
                "[flag-contradicts-deepspeed-config]"
            )
    return theirs.typed | typed, problems


@dataclass
class _Theirs:
    """What --use-checkpoint-args brings. `lost`: flags of files that the checkpoint names and that
    are not there."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    # those of the values that differ from their defaults
    taken: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _from_checkpoint(flags: Parser, typed: Mapping[str, Any]) -> _Theirs:
    """The architecture of the newest checkpoint (or of --ckpt-step), and where typed flags
    contradict it."""
    found = _Theirs()
    load = typed.get("load")
    if not typed.get("use_checkpoint_args") or load is None:
        return found
    if is_url(load):
        found.problems.append(
            f"--use-checkpoint-args: reads a directory, and --load {load} is none; give the flags "
            "themselves [checkpoint-args-not-local]"
        )
        return found
    folder = newest_with_good_args(load, typed.get("ckpt_step"))
    newest = newest_checkpoint(load, typed.get("ckpt_step"))
    if folder != newest:
        found.notes.append(
            f"WARNING: --use-checkpoint-args: {newest / 'args' if newest else load} is damaged; "
            f"those of {folder.name} are used [checkpoint-args-damaged]"
        )
    if folder is None:
        found.notes.append(
            f"--use-checkpoint-args: no checkpoint in {load}; the command line's values count "
            "[checkpoint-args-missing]"
        )
        return found
    try:
        if (folder / "args").exists() and not (folder / "args").is_file():
            raise Problems(
                [
                    f"@{folder / 'args'}: is no file; the checkpoint is not complete, choose "
                    "another --load [checkpoint-args-damaged]"
                ]
            )
        words = read_words(folder / "args")
    except Problems as error:
        found.problems += [
            f"--use-checkpoint-args: {line.removeprefix('@')}" for line in error.lines
        ]
        return found
    theirs = parse(flags, [word for word in words if not word.startswith("@")])
    found.problems += [
        f"--use-checkpoint-args: {folder / 'args'}: {line}" for line in theirs.problems
    ]
    if found.problems:
        return found
    saved = config_from(Config, theirs.typed)
    values = values_of(saved)
    for name, flag in flags_of(Config).items():
        if (flag.group == "model" or name in _TOKENIZER) and name not in typed:
            found.values[name] = values[name]
            if values[name] != flag.default:
                found.taken[name] = values[name]
    _take_tokenizer_files(saved, typed, folder, found)
    found.notes += _taken_notes(found.taken, folder, typed.get("log_format", SHORT) == SHORT)
    merged = config_from(Config, {**found.values, **typed})
    found.problems += _contradictions(saved.model, merged.model, typed, folder)
    return found


def _taken_notes(taken: Mapping[str, Any], folder: Path, short: bool) -> list[str]:
    """What came from the checkpoint: as flags in one line, or one line each."""
    if short and taken:
        return [
            f"--use-checkpoint-args: from {folder}: "
            f"{' '.join(to_args_text(config_from(Config, dict(taken))).split())}"
        ]
    return [f"Setting {name} to {value} from checkpoint" for name, value in taken.items()]


def _take_tokenizer_files(
    saved: Config, typed: Mapping[str, Any], folder: Path, found: _Theirs
) -> None:
    """Take over the files of the checkpoint's tokenizer, where they still exist; not where another
    one is asked for."""
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
    """A line for everything that the typed flags say otherwise than the checkpoint."""
    lines = []
    for name, fields, theirs, mine in architecture.differences(saved, ours):
        given = [field for field in fields if field in typed]
        if given:
            spelling = " ".join(flags_of(Config)[field].spelling for field in given)
            lines.append(
                f"{spelling}: {name} is {mine} by it and {theirs} in the checkpoint {folder}; "
                "omit it, or load without --use-checkpoint-args [flag-contradicts-checkpoint]"
            )
    return lines


def dumped_values(
    config: Config,
    plan: Plan,
    distributed_backend: str,
    foreign: Mapping[str, Any] | None = None,
    *,
    rank: int = 0,
) -> dict[str, Any]:
    """{name: value} as Megatron's dump has them after its own checks: defaults filled in, derived
    names added.

    `distributed_backend`: the one in use, where the flag left it open; `foreign`: typed flags
    without effect.
    """
    flags = flags_of(Config)
    m = config.model
    t = config.training
    o = config.optimizer
    values = values_of(config)
    found = {
        name: value
        for name, value in values.items()
        if flags[name].dump or value != flags[name].default
    }
    found = {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}
    found.pop("recompute_activations", None)
    if config.logging.log_format == "megatron":  # its dump has no such name
        found.pop("log_format", None)
    found |= {
        name: value or None
        for name, value in found.items()
        if name.startswith(("no_load_", "no_save_"))
    }
    found |= optional.load("megatron.config.megatron_compat.flags").dumped(foreign or {})
    constant = o.weight_decay_incr_style == "constant"
    chunks = len(plan.layers_per_stage[0])
    return found | {
        "accumulate_allreduce_grads_in_fp32": config.precision.grad_dtype == "float32"
        if config.precision.bf16
        else values["accumulate_allreduce_grads_in_fp32"],
        "attention_softmax_in_fp32": m.attention_softmax_in_fp32 or m.apply_query_key_layer_scaling,
        "bias_gelu_fusion": m.bias_gelu_fusion and m.add_bias_linear,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "data_parallel_size": plan.data_parallel_size,
        "dataloader_type": config.data.dataloader_type or "single",
        "distributed_backend": config.parallel.distributed_backend or distributed_backend,
        "encoder_num_layers": m.num_layers,
        "encoder_seq_length": m.seq_length,
        "end_weight_decay": o.weight_decay if constant else o.end_weight_decay,
        "start_weight_decay": o.weight_decay if constant else o.start_weight_decay,
        "ffn_hidden_size": m.ffn,
        "kv_channels": m.head_dim,
        "position_embedding_type": m.positions,
        "global_batch_size": plan.batch.final_global_batch_size,
        "overlap_p2p_comm": config.parallel.overlap_p2p_comm and len(plan.layers_per_stage) > 1,
        "params_dtype": f"torch.{config.precision.params_dtype}",
        "rampup_batch_size": None
        if t.rampup_batch_size is None
        else list(map(str, t.rampup_batch_size)),
        "rank": rank,
        "world_size": plan.world_size,
        "recompute_granularity": t.recompute,
        "sequence_parallel": config.parallel.sequence_parallel
        and config.parallel.tensor_model_parallel_size > 1,
        "split": plan.split,
        "tokenizer_type": config.data.tokenizer,
        "transformer_pipeline_model_parallel_size": config.parallel.pipeline_model_parallel_size,
        "variable_seq_lengths": False,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
    }


def dump(
    config: Config,
    plan: Plan,
    distributed_backend: str,
    foreign: Mapping[str, Any] | None = None,
    *,
    rank: int = 0,
) -> str:
    """The argument dump in Megatron's form; arguments as for
    `dumped_values`."""
    lines = [
        f"  {name} {'.' * (48 - len(name))} {value}"
        for name, value in dumped_values(
            config, plan, distributed_backend, foreign, rank=rank
        ).items()
    ]
    return "\n".join(
        [
            f"{'-' * 24} arguments {'-' * 24}",
            *sorted(lines, key=str.lower),
            f"{'-' * 20} end of arguments {'-' * 21}",
        ]
    )


def start_lines(line: CommandLine, distributed_backend: str) -> list[str]:
    """What a run prints first, in Megatron's order: sizes, notes, precision, arguments,
    micro-batches. With --log-format short nothing, since `training/logging/preamble.py` follows.

    `distributed_backend`: as for `dumped_values`.
    """
    config = line.config
    p = line.config.parallel
    if config.logging.is_short:
        return []
    plan = make_plan(config, line.world_size, vocabulary(config)[0])
    found = [
        f"using world size: {plan.world_size}, data-parallel size: {plan.data_parallel_size}, "
        f"context-parallel size: {p.context_parallel_size} tensor-model-parallel size: "
        f"{p.tensor_model_parallel_size}, pipeline-model-parallel size: "
        f"{p.pipeline_model_parallel_size} ",
        *line.notes,
    ]
    batch = plan.batch.lines()
    found += [text for text in batch if text.startswith("setting global batch size")]
    numbers = config.precision
    if (
        numbers.bf16
        and numbers.grad_dtype == "float32"
        and not numbers.accumulate_allreduce_grads_in_fp32
    ):
        found.append("accumulate and all-reduce gradients in fp32 for bfloat16 data type.")
    return [
        *found,
        f"using torch.{config.precision.params_dtype} for parameters ...",
        *_arguments(line, plan, distributed_backend),
        *(text for text in batch if text not in found),
    ]


def _arguments(line: CommandLine, plan: Plan, distributed_backend: str) -> list[str]:
    """What --print-arguments asks for."""
    match line.config.logging.printed_arguments:
        case "all":
            return [dump(line.config, plan, distributed_backend, line.foreign, rank=line.rank)]
        case "changed":
            return changed_arguments(line.config)
    return []


def vocabulary(config: Config) -> tuple[int, str]:
    """(size, where it comes from) of the vocabulary as far as it is known without building the
    tokenizer."""
    d = config.data
    if d.vocab_size is not None:
        return d.vocab_size, "--vocab-size"
    if d.tokenizer == "TikTokenizer":
        return TIKTOKEN_VOCAB_SIZE, "TikTokenizer's, without --vocab-size"
    if d.tokenizer == "ByteTokenizer":
        return BYTE_VOCAB_SIZE, "ByteTokenizer's"
    if d.tokenizer_model and (size := ids_in_file(d.tokenizer, d.tokenizer_model)):
        return size, f"--tokenizer-model {d.tokenizer_model}"
    if d.tokenizer == "GPT2BPETokenizer" and d.vocab_file and os.path.isfile(d.vocab_file):
        try:
            size = len(json.loads(Path(d.vocab_file).read_text(encoding="utf-8")))
            return max(1, size), f"--vocab-file {d.vocab_file}"
        except (OSError, ValueError, TypeError):
            # building the tokenizer says what is wrong with it
            pass
    return _GPT2_VOCABULARY, "assumed, GPT-2's; give --vocab-size to plan for another"


def print_plan(line: CommandLine) -> Plan:
    """What --dry-run prints first; the plan."""
    size, source = vocabulary(line.config)
    plan = make_plan(line.config, line.world_size, size)
    describe = optional.load("megatron.config.plan.report").describe
    lines = [
        *line.notes,
        f"plan for {line.world_size} rank{'s' * (line.world_size > 1)} (vocabulary: {source})",
    ]
    print("\n".join([*lines, *(f"  {text}" for text in describe(line.config, plan))]), flush=True)
    return plan
