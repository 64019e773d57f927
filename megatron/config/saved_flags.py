"""The `args` file of a checkpoint: the flags that differ from their defaults as they would be typed
(`pretrain_gpt.py @FILE` repeats the run), those of features and of a script's own last, and, in a
comment, the values of all but the script's.

A later release may have other defaults or lack a flag: the values say what the checkpoint is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.arguments import (
    Flag,
    build_parser,
    config_from,
    flags_of,
    parse,
)
from megatron.config.args_text import FEATURES, OF_SCRIPT, VALUES
from megatron.config.tree import Config
from megatron.problems import Problems
from megatron.small_files import read_text

# Checkpoints of version 0.1.0 and before have no values: what their defaults were, where ours are
# others now.
OLD_DEFAULTS: dict[str, Any] = {}
# Flags that have got a default: null in a file of a program that had none.
NULL_BEFORE = {"muon_momentum"}
# Flags of features that were the core's: in older files they stand among its flags.
ONCE_CORE = ("--packed-samples", "--pack-into-one", "--pad-samples", "--min-sample-length")


@dataclass(frozen=True)
class SavedFlags:
    """What a checkpoint was trained with. `unknown`: flags that were given and that this program
    does not have."""

    config: Config
    unknown: Sequence[str] = ()

    @property
    def notes(self) -> list[str]:
        """A line where flags are unknown."""
        if not self.unknown:
            return []
        return [
            f"the checkpoint was saved with {', '.join(self.unknown)}, which this program does not "
            "have; what they did is not done [saved-flag-unknown]"
        ]


def read(path: Path, tree: type[Config] = Config) -> SavedFlags:
    """The flags in the file, those of features as far as `tree` has them. Raises Problems where it
    is damaged, or has values that this program does not take."""
    from megatron.args_file import read_words

    words = read_words(path)
    if any(word.startswith("@") for word in words):
        raise Problems(
            [
                f"{path}: includes another file, which no checkpoint of this suite does "
                "[checkpoint-args-damaged]"
            ]
        )
    parser = build_parser(tree, prog="args", description="")
    parsed = parse(parser, words)
    unknown = {
        line: line.split()[2].rstrip(";")
        for line in parsed.problems
        if line.endswith("[flag-unknown]")
    }
    text = read_text(path, "utf-8-sig")
    values = _values(path, text, tree)
    passed = tuple(f"{s}: " for flag in parser.flags if _may_be_added(flag) for s in flag.spellings)
    problems = [
        line
        for line in parsed.problems
        if line not in unknown
        and not (line.startswith(passed) and line.endswith("[value-not-a-choice]"))
    ]
    if problems:
        raise Problems([f"{path}: {line}" for line in problems])
    saved = {**OLD_DEFAULTS, **parsed.typed} if values is None else values
    missing = [
        flag.spelling
        for name, flag in flags_of(Config).items()
        # a converted checkpoint has a model, and no --lr
        if flag.group == "model" and flag.missing and saved.get(name) is None
    ]
    if missing:
        raise Problems(
            [
                f"{path}: has no {', '.join(missing)}; the checkpoint is damaged: use another one "
                "[checkpoint-args-damaged]"
            ]
        )
    passed_over = text.partition(FEATURES)[2] or text.partition(OF_SCRIPT)[2]
    of_features = [*ONCE_CORE, *passed_over.partition(VALUES)[0].replace("=", " ").split()]
    return SavedFlags(
        config_from(tree, saved), [flag for flag in unknown.values() if flag not in of_features]
    )


def _values(path: Path, text: str, tree: type[Config]) -> Mapping[str, Any] | None:
    """All values, of the flags that this program has; None in a file of an older checkpoint."""
    rows = [row for row in text.splitlines() if row.startswith(VALUES)]
    if not rows:
        return None
    flags = flags_of(tree)
    try:
        table = json.loads(rows[-1].removeprefix(VALUES))
        return {name: _value(flags[name], v) for name, v in table.items() if name in flags}
    except (ValueError, AttributeError, RecursionError, TypeError) as error:
        raise Problems(
            [
                f"{path}: {type(error).__name__} {error}; the checkpoint is damaged: use another "
                "one [checkpoint-args-damaged]"
            ]
        ) from None


def _may_be_added(flag: Flag) -> bool:
    """May a value that is none of its choices be one that a feature of the other program adds? Then
    it is passed over."""
    return flag.per_run and flag.choices is not None


def _value(flag: Flag, value: Any) -> Any:
    """A value as JSON has it, as the field has it. Raises ValueError."""
    if _may_be_added(flag) and type(value) is str and value not in (flag.choices or ()):
        return flag.default
    if value is None and (flag.default is None or flag.name in NULL_BEFORE):
        return flag.default
    if flag.kind in ("switch", "off"):
        if type(value) is not bool:
            raise ValueError(f"{flag.spelling}: {value!r} is not true or false")
        return value
    if flag.kind == "list":
        words = value if isinstance(value, list) else [value]
        return flag.convert([str(word) for word in words]) if words else ()
    return flag.convert([str(value)])
