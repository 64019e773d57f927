"""Runs of one process that are built and not trained, from flags or from fields; loads nothing
optional."""

from dataclasses import replace

import torch

from megatron.arguments import config_from, parse_typed
from megatron.config import command_line
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config
from megatron.features.registry import RunConfig
from megatron.parallel.context import ParallelContext
from megatron.timers import Timers
from megatron.training.build import build_run, make_tokenizer
from megatron.training.launch.initialize import Runtime
from megatron.training.run import Run
from tests.runs import SMALL, with_flags

RUNTIME = Runtime(torch.device("cpu"), ParallelContext(config_from(Config, {}).parallel), 1, 0)
NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "211"]


def config_of(*flags: str) -> Config:
    """The small model with these flags, on synthetic data; plain numbers unless they name a
    tokenizer."""
    plain = [word for word in SMALL if word not in NUMBERS] + ["--mock-data", "--train-iters", "10"]
    words = with_flags(plain if "--tokenizer-type" in flags else plain + NUMBERS, *flags)
    return config_from(RunConfig, parse_typed(command_line.parser(RunConfig), words))


def built(*flags: str, device: str = "cpu", world: int = 1) -> Run:
    """The run of these flags, its model and optimizer made on a device; the last rank of `world`,
    which then is a group already."""
    config = config_of(*flags)
    tokenizer = make_tokenizer(config)
    plan = make_plan(config, world, tokenizer.vocab_size)
    runtime = replace(RUNTIME, device=torch.device(device))
    if world > 1:
        ctx = ParallelContext(config.parallel, world, world - 1)
        runtime = Runtime(torch.device(device), ctx, world, world - 1)
    return build_run(config, plan, runtime, Timers(), tokenizer)
