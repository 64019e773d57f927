"""The flags a checkpoint was saved with, compared with those of this run."""

from __future__ import annotations

from megatron import log, optional
from megatron.arguments import build_parser, config_from, flags_of, parse_typed, values_of
from megatron.checkpoint import store
from megatron.checkpoint.filesystem import ForeignCheckpoint
from megatron.checkpoint.state import differences
from megatron.checkpoint.store import Checkpoint
from megatron.config import architecture
from megatron.config.tree import Config
from megatron.training.checkpointing.resume_checks import architecture_problem


def saved_config(found: Checkpoint) -> Config:
    """The configuration a checkpoint was saved with, from its `args` file."""
    parser = build_parser(Config, prog="args", description="")
    path = found.directory / store.ARGS
    words = optional.load("megatron.args_file").read_words(path)
    if any(word.startswith("@") for word in words):
        raise ForeignCheckpoint(
            f"{path} includes another file, which no checkpoint of this suite does "
            "[checkpoint-args-damaged]"
        )
    return config_from(Config, parse_typed(parser, words))


def check_architecture(saved: Config, now: Config, strict: bool) -> None:
    """Raise ValueError for flags that make it another model; print every other difference."""
    wrong = architecture.differences(saved.model, now.model)
    if wrong and strict:
        raise ValueError(architecture_problem(wrong))
    said = {field for one in wrong for field in one.fields}
    compared = [
        name for name, flag in flags_of(Config).items() if not flag.per_run and name not in said
    ]
    rest = differences(values_of(saved), values_of(now), compared)
    for name, old, new in [*((one.name, one.saved, one.now) for one in wrong), *rest]:
        log.print_rank_0(f" differs from the checkpoint: {name} was {old}, is {new}")
