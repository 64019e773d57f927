"""The command line: from argv to a checked configuration.

Everything wrong with a command line is reported together, in well under a second, before anything
large is imported.
"""

import argparse
import functools
import shlex
import time
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NoReturn

from megatron import launcher, log
from megatron.arguments import (
    Extension,
    ForeignFlags,
    NamedFlags,
    Parsed,
    Parser,
    build_parser,
    config_from,
    flags_of,
    parse,
    values_of,
)
from megatron.config.checkpoint import FromCheckpoint, is_url, staged
from megatron.config.script import NO_SCRIPT, ExtraArgsProvider, Script
from megatron.config.tree import Config
from megatron.problems import error_lines
from megatron.version import version_line

DESCRIPTION = """\
Pretrain a GPT. @FILE reads flags from a file; flags on the command line override them.
docs/flags.md has all of them, and those of other programs that are read or refused.

The flags one starts with:
  --model gpt2                  (--help models: published architectures by name), or
  --num-layers 12 --hidden-size 768 --num-attention-heads 12
  --seq-length 1024 --max-position-embeddings 1024
  --micro-batch-size 4 --global-batch-size 32 --train-iters 10000 --lr 6e-4
  --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt
  --data-path PREFIX --save DIR --load DIR"""
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


@dataclass(frozen=True)
class More:
    """Flags that few command lines need: those of `tree`, made when a word is unknown, help is
    asked for or one of the flags `asking` is typed."""

    tree: Callable[[], type[Config]]
    asking: Set[str]

    def is_needed(self, parsed: Parsed) -> bool:
        """Whether they may change what was parsed without them."""
        asked = parsed.help or parsed.explain is not None or parsed.ignored
        return bool(asked or parsed.problems or self.asking & parsed.typed.keys())


@dataclass(frozen=True)
class CommandLine:
    """A command line without problems. Flags that have no effect have their defaults in `config`.

    `typed`: what the user gave, by field name; `foreign`: flags of another program that a feature
    has read; `notes`: lines to print at the start; `world_size` is the plan's with --dry-run;
    `words`: as typed; `extra`: what `extra_args_provider` added, `extra_flags` as typed, one flag
    each; `script`: the functions of a script of one's own. Of --save, --load and --snapshot-dir in
    an object store, `save_url`, `load_url` and `snapshot_url`; the configuration then has their
    staging directories. `more`: flags that were not needed. `part`: the iterations of which a
    checkpoint may be, of a run that is a part of another.
    """

    config: Config
    typed: dict[str, Any]
    foreign: dict[str, Any]
    notes: list[str]
    world_size: int
    rank: int
    extra: argparse.Namespace | None = None
    extra_flags: Sequence[str] = ()
    script: Script = NO_SCRIPT
    save_url: str | None = None
    load_url: str | None = None
    snapshot_url: str | None = None
    more: More | None = None
    words: Sequence[str] = ()
    part: range = range(0)

    @property
    def tree(self) -> type[Config]:
        """All flags of the program, of which `config` may have some."""
        return self.more.tree() if self.more else type(self.config)


def parser(
    tree: type[Config] = Config, extra_args_provider: ExtraArgsProvider | None = None
) -> Parser:
    """All flags of `tree`, those too that a feature reads of another program (help leaves those
    out), and those that `extra_args_provider` adds to the parser of argparse."""
    return build_parser(
        tree,
        prog="pretrain_gpt.py",
        description=DESCRIPTION,
        foreign_flags=functools.partial(foreign_flags, tree),
        extra_args_provider=extra_args_provider,
        named=NamedFlags(
            "--model",
            "the flags of a published architecture, such as llama3-8b; --help models lists all",
            lambda name: _named_models().named_model(name).words,
            "models",
            lambda: _named_models().listing(),
        ),
    )


def _named_models() -> ModuleType:
    from megatron.config import named_models

    return named_models


def foreign_flags(tree: type[Config]) -> ForeignFlags:
    """The flags that an extension of the program reads without a field."""
    for owner in typing.get_type_hints(tree).values():
        if issubclass(owner, Extension) and (flags := owner.foreign_flags()):
            return flags
    return ForeignFlags()


def read(
    argv: Sequence[str],
    environ: Mapping[str, str],
    script: Script = NO_SCRIPT,
    tree: type[Config] = Config,
    more: More | None = None,
) -> CommandLine:
    """The checked command line of this process; `environ` says which rank of how many it is, `tree`
    has the flags (`config.tree.with_features`), and `more` those that are read where these do not
    suffice. Where the `script` has its own data, flags need not name any, and files that they name
    are the script's affair.

    Problems go to stderr of rank 0, one line each, and the process exits with 2; --help exits with
    0.
    """
    flags = parser(tree, script.extra_args_provider)
    parsed = parse(flags, argv)
    if more and more.is_needed(parsed):
        return read(argv, environ, script, more.tree())
    launch, wrong = launcher.read(environ)
    wrong += launcher.rendezvous_problems(environ)
    if parsed.help:
        if launch.rank == 0:
            print(flags.help(parsed.topic), end="", flush=True)
        raise SystemExit(0)
    if parsed.version:
        if launch.rank == 0:
            print(version_line(flags.prog), flush=True)
        raise SystemExit(0)
    if parsed.explain is not None:
        from megatron import explain

        raise SystemExit(explain.main(parsed.explain) if launch.rank == 0 else 0)
    line, problems = _checked(tree, flags, parsed, launch, script)
    if wrong or problems:
        refuse([*wrong, *problems], launch)
    return replace(line, more=more, words=argv)


def judge(
    argv: Sequence[str],
    world_size: int,
    tree: type[Config] = Config,
    extra_args_provider: ExtraArgsProvider | None = None,
) -> tuple[list[str], list[str]]:
    """(notes, problems) of a command line on `world_size` ranks, as a dry run would say them."""
    line, problems = planned(argv, world_size, tree, extra_args_provider)
    return line.notes, problems


def planned(
    argv: Sequence[str],
    world_size: int,
    tree: type[Config] = Config,
    extra_args_provider: ExtraArgsProvider | None = None,
) -> tuple[CommandLine, list[str]]:
    """A command line as a dry run on `world_size` ranks would read it, and its problems."""
    flags = parser(tree, extra_args_provider)
    parsed = parse(flags, [*argv, "--dry-run", "--world-size", str(world_size)])
    return _checked(tree, flags, parsed, launcher.read({})[0])


def refuse(problems: list[str], launch: launcher.LaunchInfo) -> NoReturn:
    """Print the problems of a command line and exit with code 2.

    Rank 0 prints them, and a rank of each other node after a wait, in which the launcher ends it if
    rank 0 had problems too.
    """
    if launch.rank:
        time.sleep(0.0 if launch.local_rank is None else log.PEERS_WAIT)
    if launch.rank == 0 or launch.local_rank == 0:
        speaker = f"rank {launch.rank}: " if launch.rank else ""
        lines = error_lines(problems).splitlines(keepends=True)
        log.last_words("".join(f"{speaker}{line}" for line in lines))
    raise SystemExit(2)


def _checked(
    tree: type[Config],
    flags: Parser,
    parsed: Parsed,
    launch: launcher.LaunchInfo,
    script: Script = NO_SCRIPT,
) -> tuple[CommandLine, list[str]]:
    from megatron.config.checks import rules as check

    own_flags = flags_of(tree)
    foreign = {name: value for name, value in parsed.typed.items() if name not in own_flags}
    typed = {name: value for name, value in parsed.typed.items() if name not in foreign}
    of_foreign: list[str] = []
    accepted: list[str] = []
    if foreign or parsed.ignored:
        typed, of_foreign, accepted = flags.foreign_flags.read_as(
            flags, typed, foreign, parsed.ignored
        )
    saved = FromCheckpoint()
    if typed.get("use_checkpoint_args") and "load" in typed and not parsed.unread_file:
        from megatron.config.checkpoint_args import take

        take(typed, saved, tree)
    defaults = flags.extra.defaults if flags.extra else {}
    config = config_from(tree, {**defaults, **saved.values, **typed})
    if parsed.name and config.data.vocab_size is None and config.data.tokenizer == "NullTokenizer":
        typed["vocab_size"] = _named_models().named_model(parsed.name).vocab_size
        config = config_from(tree, {**defaults, **saved.values, **typed})
    world_size = config.training.world_size if config.training.dry_run else None
    world_size = max(1, world_size or launch.world_size)
    judged, of_script = _as_of_script(config, script)
    explicit = set(typed)
    if judged is not config:
        from megatron.config.own_script import SOURCES

        explicit -= set(SOURCES)
    # What an @FILE that cannot be read would have said is not missing.
    refused = [] if parsed.unread_file else check.problems(judged, world_size, explicit)
    unread = tuple(
        _IN_PLACE_OF.get(flag.name, f"{flag.spelling} is missing")
        for flag in flags.flags
        if flag.name in parsed.broken | saved.lost
    )
    problems = [
        *parsed.problems,
        *of_foreign,
        *saved.problems,
        *of_script,
        *(text for text in refused if not text.startswith(unread) and text not in saved.problems),
    ]
    notes = [*parsed.notes, *accepted, *saved.notes]
    if parsed.name and config.training.dry_run:
        notes.append(f"--model {parsed.name}: {_named_models().named_model(parsed.name).flags}")
    if not problems:
        given = {*explicit, *defaults, *saved.changed}
        config, of_needs = _without_what_lacks_its_need(config, script, world_size, given)
        judged = _as_of_script(config, script)[0]
        problems = check.problems(judged, world_size, explicit) if of_needs else []
        notes += of_needs + ([] if problems else check.notes(judged, world_size, explicit))
    c = config.checkpoint
    save, load, snapshots = (
        path if is_url(path) else None for path in (c.save, c.load, c.snapshot_dir)
    )
    config = replace(config, checkpoint=staged(c))
    extra = flags.extra.namespace if flags.extra else None
    words = [shlex.join(flag) for flag in flags.extra.words] if flags.extra else []
    return CommandLine(
        config,
        typed,
        foreign,
        notes,
        world_size,
        launch.rank,
        extra,
        words,
        script,
        save,
        load,
        snapshots,
    ), problems


def _without_what_lacks_its_need(
    config: Config, script: Script, world_size: int, given: Set[str]
) -> tuple[Config, list[str]]:
    """The configuration in which given flags without effect have their defaults, and what is said
    of them. A script's own model may read those of the model."""
    from megatron.config.checks.declared import without_effect

    if script.model_provider or not script.complete:
        own = flags_of(type(config))
        given = {name for name in given if own[name].group != "model"}
    taken_back, notes = without_effect(_as_of_script(config, script)[0], world_size, given)
    return config_from(type(config), {**values_of(config), **taken_back}), notes


def _as_of_script(config: Config, script: Script) -> tuple[Config, list[str]]:
    """(the configuration as the rules see it, what is wrong) where a script has its own model or
    data."""
    if script.complete and script.model_provider is None and script.datasets_provider is None:
        return config, []
    from megatron.config.own_script import judged_as

    return judged_as(config, script)
