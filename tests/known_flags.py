"""Loaded by the server of `tests.forkrun`: a rank that is forked from it reads a command line without
collecting the flags of all dataclasses, and those of Megatron, again."""

from megatron.arguments import flags_of
from megatron.config.command_line import foreign_flags
from megatron.config.tree import Config
from megatron.features.own import OwnConfig
from megatron.features.registry import RunConfig

for tree in (Config, OwnConfig, RunConfig):
    flags_of(tree)
    foreign_flags(tree)
