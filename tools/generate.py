#!/usr/bin/env python
"""Continue texts with a trained model: tools/generate.py CHECKPOINT "prompt". Needs the checkpoint
and its vocabulary.

CHECKPOINT is the directory of --save (its newest checkpoint is used) or an iter_XXXXXXX inside it,
written by any number of ranks. Started by torchrun, the processes share the model (tensor
parallelism). The text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from typing import Any

from megatron import launcher, threads
from megatron.arguments import arg
from megatron.inference.generate import LanguageModel, Result
from megatron.inference.sampling import Sampling
from megatron.small_files import parse_json, read_text
from tools.shared.program import added, run_program
from tools.shared.trained_model import ModelOptions, SpeculativeOption

# Each has `problems` of the options, and `run` with (options, the model, what prints text, what
# prints notes), which says whether the options asked for it.
ADDED = added("generate")


@dataclass(frozen=True, kw_only=True)
class Options(SpeculativeOption, ModelOptions):
    """The command line."""

    prompts: tuple[str, ...] = arg((), position="positional", metavar="PROMPT")
    """texts to continue (default: start a document)"""

    prompt_file: str | None = arg(None, metavar="FILE")
    """prompts of a file, one per line; of a .jsonl file, the "prompt" of each line"""

    max_new_tokens: int = arg(100, minimum=1)
    """largest number of tokens to generate"""

    temperature: float = arg(1.0)
    """sampling temperature; 0 always takes the most likely token"""

    top_k: int = arg(0)
    """sample from this many most likely tokens only (0: from all)"""

    top_p: float = arg(1.0)
    """nucleus sampling: sample from the most likely tokens with this total probability"""

    repetition_penalty: float = arg(1.0)
    """above 1: make tokens less likely that have occurred, in the prompt too"""

    seed: int = arg(1234)
    """seed of the sampling; the same seed gives the same text"""

    stop: tuple[str, ...] = arg((), metavar="TEXT")
    """end the text before any of these strings"""

    batch_size: int = arg(8, minimum=1)
    """number of prompts decoded together"""

    json: bool = arg(False)
    """print a JSON object per prompt: prompt, text, finish_reason, tokens"""

    logprobs: int | None = arg(None)
    """with --json: log-probabilities of the tokens and of this many most likely ones"""

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(
            self.temperature, self.top_p, self.seed, self.top_k, self.repetition_penalty
        )

    def problems(self) -> list[str]:
        """Everything that can be found wrong before torch is loaded."""
        problems = [*self.sampling.problems(), *super().problems()]
        if self.logprobs is not None and not (self.json and 0 <= self.logprobs <= 100):
            problems.append(
                f"--logprobs {self.logprobs}: must be from 0 to 100, with --json "
                "[value-out-of-range]"
            )
        if self.prompt_file and not os.path.isfile(self.prompt_file):
            problems.append(f"--prompt-file {self.prompt_file}: no such file [file-not-readable]")
        if self.prompts and self.prompt_file is not None:
            problems.append("PROMPT and --prompt-file: give one of them [flags-exclude-each-other]")
        return [*problems, *(line for each in ADDED for line in each.problems(self))]


def read_prompts(path: str) -> list[str]:
    """The prompts of a file. Raises ValueError naming the line that cannot be read, and OSError."""
    try:
        lines = read_text(path).split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt-file {path}: is not UTF-8 (byte {error.start}); convert it first (iconv -t "
            "UTF-8) [bad-record]"
        ) from None
    if not lines[-1]:
        lines.pop()  # the end of the last line
    prompts = []
    for number, line in enumerate(lines, 1):
        if path.endswith(".jsonl"):
            try:
                line = parse_json(line)["prompt"]
                assert isinstance(line, str)
            except (ValueError, KeyError, TypeError, AssertionError):
                raise ValueError(
                    f'--prompt-file {path}, line {number}: not a JSON object with a "prompt"'
                    " [bad-record]"
                ) from None
        prompts.append(line)
    if not prompts:
        raise ValueError(f"--prompt-file {path}: has no line [input-without-text]")
    return prompts


def run(options: Options) -> None:
    """Load, generate, print. Raises ValueError where that cannot be done."""
    prompts = list(options.prompts) or [""]
    if options.prompt_file:
        prompts = read_prompts(options.prompt_file)
    threads.set_waiting()
    model = LanguageModel(options.open(launcher.world_size(), options.num_speculative_tokens))
    output = sys.stdout if sys.stdout.isatty() else interrupt.data_output()
    show = functools.partial(print, file=output) if launcher.rank() == 0 else _silent
    note = functools.partial(show, file=sys.stderr)
    if any(each.run(options, model.trained, show, note) for each in ADDED):
        return
    results = model.stream(
        prompts,
        options.max_new_tokens,
        options.sampling,
        options.stop,
        options.batch_size,
        options.logprobs,
        note,
        options.num_speculative_tokens,
    )
    if len(prompts) == 1 and not options.json:
        show(prompts[0], end="", flush=True)
        for _, chunk, result in results:
            show(chunk, end="\n" if result.finish_reason else "", flush=True)
        return
    finished: dict[int, Result] = {}
    shown = 0
    for number, _, result in results:
        if result.finish_reason:
            finished[number] = result
        while shown in finished:
            show(_written(options, prompts[shown], finished.pop(shown), shown), flush=True)
            shown += 1


def _silent(*_: Any, **__: Any) -> None:
    """Of the ranks, one prints."""


def _written(options: Options, prompt: str, result: Result, number: int) -> str:
    """A finished text as it is printed where there are several."""
    if not options.json:
        return f"--- prompt {number + 1}\n{prompt}{result.text}"
    return json.dumps(
        {
            "prompt": prompt,
            "text": result.text,
            "finish_reason": result.finish_reason,
            "tokens": result.tokens,
        }
    )


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 it could not be done, 2 a wrong command line, 130 Ctrl-C."""
    bases = (*(each.Flags for each in ADDED), Options)
    options = make_dataclass("Options", (), bases=bases, frozen=True, kw_only=True)
    return run_program(
        options, run, argv, prog="generate.py", description=__doc__ or "", check=Options.problems
    )


if __name__ == "__main__":
    sys.exit(interrupt.run(main, sys.argv[1:]))
