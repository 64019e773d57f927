#!/usr/bin/env python
"""Continue a text with a trained model: tools/generate.py CHECKPOINT "prompt". Needs the checkpoint
and its vocabulary.

CHECKPOINT is the directory of --save (its newest checkpoint is used) or an iter_XXXXXXX inside it,
written by any number of ranks. The text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron import threads
from megatron.arguments import arg
from megatron.checkpoint.filesystem import MANIFEST, CheckpointError
from megatron.inference.sampling import Sampling
from tools.shared.program import read

FILES = ("vocab_file", "merge_file", "tokenizer_model")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    checkpoint: str = arg(
        place="positional", metavar="CHECKPOINT", help="run directory, or an iter_XXXXXXX in it"
    )
    prompt: str = arg(
        "",
        place="positional",
        metavar="PROMPT",
        help="text to continue (default: start a document)",
    )
    max_new_tokens: int = arg(100, help="largest number of tokens to generate")
    temperature: float = arg(1.0, help="sampling temperature; 0 always takes the most likely token")
    top_p: float = arg(
        1.0, help="nucleus sampling: sample from the most likely tokens with this total probability"
    )
    seed: int = arg(1234, help="seed of the sampling; the same seed gives the same text")
    ckpt_step: int | None = arg(None, help="load this iteration instead of the newest")
    vocab_file: str | None = arg(
        None, metavar="FILE", help="vocab.json (default: the path of training)"
    )
    merge_file: str | None = arg(
        None, metavar="FILE", help="merges.txt (default: the path of training)"
    )
    tokenizer_model: str | None = arg(
        None, metavar="FILE", help="model file of another tokenizer (default: the path of training)"
    )
    device: Literal["auto", "cpu", "cuda", "xpu"] = arg(
        "auto", help="auto: the accelerator, if there is one"
    )

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(self.temperature, self.top_p, self.seed)

    def problems(self) -> list[str]:
        """Everything that can be found wrong before torch is loaded."""
        found = self.sampling.problems()
        if self.max_new_tokens < 1:
            found.append(f"--max-new-tokens {self.max_new_tokens}: must be at least 1")
        if not os.path.exists(self.checkpoint):
            found.append(
                f"CHECKPOINT: {self.checkpoint}: no such directory; give the directory that "
                "--save named, or an iter_XXXXXXX in it"
            )
        elif self.ckpt_step is None and not _holds_a_checkpoint(Path(self.checkpoint)):
            found.append(
                f"CHECKPOINT: {self.checkpoint}: no checkpoint there "
                "(latest_checkpointed_iteration.txt is missing); give the directory that --save "
                "named, or an iter_XXXXXXX in it"
            )
        for name in FILES:
            if (path := getattr(self, name)) and not os.path.exists(path):
                found.append(f"--{name.replace('_', '-')} {path}: no such file")
        return found


def _holds_a_checkpoint(path: Path) -> bool:
    """Is it a run directory, an iter_XXXXXXX, or a copy of one?"""
    names = ("latest_checkpointed_iteration.txt", MANIFEST)
    return path.name.startswith("iter_") or any((path / name).exists() for name in names)


def readable(
    prompt: Sequence[int], tokens: Iterable[int], detokenize: Callable[[Iterable[int]], str]
) -> Iterator[str]:
    """The text of `tokens` piece by piece; a piece waits until its bytes are whole characters."""
    ids = list(prompt)
    shown = detokenize(prompt)
    for token in tokens:
        ids.append(token)
        text = detokenize(ids)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield detokenize(ids)[len(shown) :]


def run(options: Options) -> None:
    """Load, generate, print. Raises ValueError where that cannot be done."""
    threads.set_waiting()
    from megatron.inference.generate import generate
    from megatron.inference.load_model import open_trained_model

    files = {name: getattr(options, name) for name in FILES}
    with contextlib.redirect_stdout(sys.stderr):
        trained = open_trained_model(
            options.checkpoint,
            options.ckpt_step,
            {k: v for k, v in files.items() if v},
            options.device,
        )
        print(f"loaded {trained.directory} (iteration {trained.iteration})")
    tokenizer = trained.tokenizer
    prompt = [int(token) for token in tokenizer.tokenize(options.prompt)] if options.prompt else []
    print(options.prompt, end="", flush=True)
    tokens = generate(
        trained.model,
        prompt or [tokenizer.eod],
        options.max_new_tokens,
        options.sampling,
        tokenizer.eod,
    )
    for piece in readable(prompt, tokens, tokenizer.detokenize):
        print(piece, end="", flush=True)
    print()


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 it could not be done, 2 a wrong command line, 130 Ctrl-C."""
    options = read(
        Options, argv, prog="generate.py", description=__doc__ or "", check=Options.problems
    )
    try:
        run(options)
    except (ValueError, OSError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main, sys.argv[1:]))
