"""A trained model that a script's model_provider makes: our GPT with other modules in it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron.args_file import read_words
from megatron.arguments import parse
from megatron.config import command_line
from megatron.config.command_line import CommandLine
from megatron.config.plan.plan import make_plan
from megatron.config.script import Script
from megatron.config.tree import Config
from megatron.data.tokenizers.base import Tokenizer
from megatron.inference.cached_model import CachedModel
from megatron.model.gpt import GPTModel
from megatron.parallel.sharding import sharding_of
from megatron.training import script_args, script_model

TRIED = 8  # tokens with which the cache is tried
CLOSE = 1e-3  # to the largest logit, or 8 steps of its dtype; one that looks at other tokens is not


def build(
    script: Script, config: Config, tokenizer: Tokenizer, args: Path, arguments: dict[str, Any]
) -> GPTModel:
    """What the script's model_provider returns, its parameters without the trained values.
    `args`: the flags of the checkpoint, the script's own among them; `arguments`: of the GPT of the
    flags, whole and on one rank. Raises ValueError for a model that is no GPT of the suite."""
    assert script.model_provider is not None, "asked for by the caller"
    flags = command_line.parser(Config, script.extra_args_provider)
    parse(flags, read_words(args))
    extra = flags.extra.namespace if flags.extra else None
    line = CommandLine(config, {}, {}, [], 1, 0, extra, script=script)
    plan = make_plan(config, 1, arguments["vocab_size"])
    script_args.begin(line, plan, "gloo", tokenizer, 0)
    arguments["chunk"] = plan.chunks(0)[0]
    (model,) = script_model.build(
        script.model_provider, config, arguments["ctx"], arguments["device"], [arguments]
    )
    if not isinstance(model, GPTModel):
        raise ValueError(
            f"--script: its model_provider returned {type(model).__name__}, which has no cache of "
            "keys and values; a GPTModel with other modules in it can be used here, any other "
            "module in your own program: docs/own_scripts.md [own-model]"
        )
    return model


def check_names(model: GPTModel, stored: Iterable[str], directory: str) -> None:
    """Raise ValueError where the model lacks a parameter of the checkpoint."""
    more = {name for name in stored if not name.startswith("optimizer.")}
    more -= {sharding_of(parameter).name for parameter in model.parameters()}
    if more:
        raise ValueError(
            f"{directory} has {min(more)}, which the model of --script has not; give the script "
            "that trained it [own-model]"
        )


@torch.no_grad()
def check_cache(model: GPTModel) -> None:
    """Raise ValueError where the model with a cache, token by token, computes something else than
    without."""
    count = min(TRIED, model.max_positions)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.vocab_size, (1, count), generator=generator).tolist()
    expected = model(torch.tensor(tokens, device=next(model.parameters()).device))[0]
    try:
        cached = CachedModel(copy.deepcopy(model), 1, count)
        logits = [cached.forward([tokens[0][:1]], [0])[0]]
        logits += [cached.forward([[token]], [n])[0] for n, token in enumerate(tokens[0]) if n]
    except (AttributeError, TypeError) as error:
        raise ValueError(_unusable(str(error))) from None
    apart = (torch.stack(logits) - expected).abs().max() / expected.abs().max()
    if not apart <= max(CLOSE, 8 * torch.finfo(expected.dtype).eps):
        raise ValueError(_unusable(f"logits differ by {apart.item():.0%}"))


def _unusable(why: str) -> str:
    return (
        f"--script: with a cache of keys and values the model is not the one that was trained "
        f"({why}): only what works on each token by itself can be replaced, neither attention nor "
        "the forward of the whole model [own-model]"
    )
