#!/usr/bin/env python
"""Tokens per second of decoding with the cache, next to transformers' generate with the same
weights: tools/benchmarks/generate.py CHECKPOINT --hf EXPORT.

CHECKPOINT is a run directory and EXPORT the directory that `tools/convert_checkpoint.py hf-export`
writes of it (or that it was imported from). Each measurement is a process of its own; the two sides
take turns, and the ratio of each turn is printed, then the median. Greedy decoding in fp32 on the
CPU after a prompt of random tokens. Also printed: what token 900 costs compared with token 100.
Needs transformers, except with --no-transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PROMPT = 16
FAR = (100, 900)
AROUND = 25  # tokens before and after whose median is the cost of a token


def prompts(batch: int, vocab: int) -> list[list[int]]:
    """The same random prompts on both sides."""
    return [[(7919 * (row + 1) * (i + 3)) % vocab for i in range(PROMPT)] for row in range(batch)]


def decode_here(checkpoint: str, batch: int, new: int) -> dict:
    """Seconds of this suite, after one short warm-up, and the tokens of the first prompt."""
    from megatron.inference.engine import Engine, Request
    from megatron.inference.load_model import open_trained_model
    from megatron.inference.sampling import Sampling

    trained = open_trained_model(checkpoint, device="cpu")
    engine = Engine(trained.model, batch, PROMPT + new)
    ids = prompts(batch, trained.tokenizer.vocab_size)
    greedy = Sampling(temperature=0.0)
    for _ in engine.run([Request(prompt, 4, greedy) for prompt in ids]):
        pass
    first = []
    times = [time.perf_counter()]
    for number, _, token in engine.run([Request(prompt, new, greedy) for prompt in ids]):
        if number == 0:
            first.append(token.id)
            times.append(time.perf_counter())
    seconds = time.perf_counter() - times[0]
    steps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return {"seconds": seconds, "tokens": first, "steps": steps}


def decode_transformers(export: str, batch: int, new: int) -> dict:
    """The same of transformers' generate."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    ids = torch.tensor(prompts(batch, model.config.vocab_size))

    def generate(count: int) -> torch.Tensor:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )

    generate(4)
    start = time.perf_counter()
    found = generate(new)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": found[0, PROMPT:].tolist(), "steps": []}


def measured(side: str, path: str, batch: int, new: int) -> dict:
    """The result of a process of its own."""
    words = [sys.executable, __file__, path, "--worker", side]
    words += ["--batch-sizes", str(batch), "--new-tokens", str(new)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {side}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def cost_at(steps: list[float], token: int) -> float:
    """Median seconds of the tokens around this one."""
    return statistics.median(steps[token - AROUND : token + AROUND])


def compare(options: argparse.Namespace) -> None:
    """Print the rates of both sides and their ratio, a line per turn."""
    for batch in options.batch_sizes:
        ratios = []
        for turn in range(options.turns):
            ours = measured("here", options.checkpoint, batch, options.new_tokens)
            rate = batch * options.new_tokens / ours["seconds"]
            line = f"batch {batch}, turn {turn + 1}: {rate:.1f} tokens/s"
            if not options.no_transformers:
                theirs = measured("transformers", options.hf, batch, options.new_tokens)
                ratios.append(theirs["seconds"] / ours["seconds"])
                same = "same tokens" if ours["tokens"] == theirs["tokens"] else "OTHER TOKENS"
                rate = batch * options.new_tokens / theirs["seconds"]
                line += f"; transformers {rate:.1f}; ratio {ratios[-1]:.2f}; {same}"
            print(line, flush=True)
        if ratios:
            print(f"batch {batch}: median ratio {statistics.median(ratios):.2f}", flush=True)
    if options.far:
        steps = measured("here", options.checkpoint, 1, FAR[1] + AROUND)["steps"]
        near, far = (cost_at(steps, token) for token in FAR)
        print(
            f"token {FAR[0]}: {1e3 * near:.1f} ms, token {FAR[1]}: {1e3 * far:.1f} ms, "
            f"ratio {far / near:.2f}"
        )


def main(argv: list[str]) -> int:
    """Exit codes: 0 measured, 1 a process failed, 2 a wrong command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="run directory")
    parser.add_argument("--hf", help="the same model as a directory of transformers")
    parser.add_argument("--no-transformers", action="store_true", help="measure this suite only")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], help="sequences")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each side")
    parser.add_argument("--no-far", dest="far", action="store_false", help="omit token 900")
    parser.add_argument("--worker", choices=("here", "transformers"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        decode = decode_here if options.worker == "here" else decode_transformers
        print(json.dumps(decode(options.checkpoint, options.batch_sizes[0], options.new_tokens)))
        return 0
    if not options.hf and not options.no_transformers:
        parser.error("give --hf EXPORT, or --no-transformers")
    compare(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
