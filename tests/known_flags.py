"""Loaded by the server of `tests.forkrun`: a rank that is forked from it reads a command line without
collecting the flags of all dataclasses again, a tenth of a small run."""

from megatron.arguments import flags_of
from megatron.features.registry import RunConfig

flags_of(RunConfig)
