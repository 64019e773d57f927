#!/usr/bin/env python
"""Continue a text with a trained model: tools/generate.py CHECKPOINT "prompt". Needs the checkpoint and its vocabulary.

CHECKPOINT is the directory that --save named (its newest checkpoint is taken) or an iter_XXXXXXX inside it, written by
any number of ranks. The text goes to stdout, all else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", help="directory of a run, or an iter_XXXXXXX in it")
    parser.add_argument("prompt", nargs="?", default="", help="text to continue (default: the start of a document)")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="tokens at most (default: 100)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token (default: 1.0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens that hold this share")
    parser.add_argument("--seed", type=int, default=1234, help="the same seed gives the same text (default: 1234)")
    parser.add_argument("--ckpt-step", type=int, help="this iteration instead of the newest")
    parser.add_argument("--vocab-file", help="where vocab.json is now (default: where training found it)")
    parser.add_argument("--merge-file", help="where merges.txt is now")
    parser.add_argument("--tokenizer-model", help="where the model file of another tokenizer is now")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto, CUDA if any")
    return parser


def readable(prompt: Sequence[int], tokens: Iterable[int], detokenize: Callable[[Iterable[int]], str]) -> Iterator[str]:
    """The text of `tokens` piece by piece; a piece waits until its bytes are whole characters."""
    ids, shown = list(prompt), detokenize(prompt)
    for token in tokens:
        ids.append(token)
        text = detokenize(ids)
        if not text.endswith("\ufffd"):
            yield text[len(shown):]
            shown = text
    yield detokenize(ids)[len(shown):]


def run(options: argparse.Namespace) -> None:
    """Load, generate, print. Raises ValueError where that cannot be done."""
    from megatron.training.generate import Sampling, generate
    from megatron.training.trained_model import open_trained_model

    sampling = Sampling(options.temperature, options.top_p, options.seed)
    problems = sampling.problems()
    if options.max_new_tokens < 1:
        problems.append(f"--max-new-tokens {options.max_new_tokens}: must be at least 1")
    if problems:
        raise ValueError("\nerror: ".join(problems))
    files = {name: getattr(options, name) for name in ("vocab_file", "merge_file", "tokenizer_model")}
    with contextlib.redirect_stdout(sys.stderr):
        trained = open_trained_model(options.checkpoint, options.ckpt_step, {k: v for k, v in files.items() if v},
                                     options.device)
        print(f"loaded {trained.directory} (iteration {trained.iteration})")
    tokenizer = trained.tokenizer
    prompt = [int(token) for token in tokenizer.tokenize(options.prompt)] if options.prompt else []
    print(options.prompt, end="", flush=True)
    tokens = generate(trained.model, prompt or [tokenizer.eod], options.max_new_tokens, sampling, tokenizer.eod)
    for piece in readable(prompt, tokens, tokenizer.detokenize):
        print(piece, end="", flush=True)
    print()


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 it could not be done, 2 a wrong command line, 130 Ctrl-C."""
    options = build_parser().parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as pretrain_gpt.py does, before torch loads
    from megatron.checkpoint.disk import CheckpointError

    try:
        run(options)
    except (ValueError, OSError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
