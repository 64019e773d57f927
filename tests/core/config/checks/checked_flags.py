"""A small command line and what the checks say of it with other flags."""

from megatron.arguments import config_from, flags_of, parse
from megatron.config import command_line
from megatron.config.checks import rules as check
from megatron.config.checks.declared import without_effect
from megatron.features.registry import RunConfig

PARSER = command_line.parser(RunConfig)
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data "
    "--vocab-size 100"
)


def checked(
    flags: str | list[str], world_size: int = 1, base: str = BASE, drop: str = ""
) -> tuple[list, list]:
    """(problems, notes) of the base with `flags` added and the flags named in `drop` taken out."""
    words = flags.split() if isinstance(flags, str) else flags
    parsed = parse(PARSER, [*base.split(), *words])
    assert not parsed.problems, parsed.problems
    typed = {
        name: value
        for name, value in parsed.typed.items()
        if flags_of(RunConfig)[name].spelling not in drop.split()
    }
    config = config_from(RunConfig, typed)
    problems = check.problems(config, world_size, typed)
    if problems:
        return problems, []
    taken_back, lines = without_effect(config, world_size, typed)
    config = config_from(RunConfig, {**typed, **taken_back})
    return [], lines + check.notes(config, world_size, typed)
