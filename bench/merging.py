"""Merged checkpoints against a decay of the learning rate, after the same tokens.

    python -m bench.merging
    python -m bench.merging --size 7M --seeds 1 --lr 0.002

The quickstart's model (1 million parameters) or one of 8 layers of width 256 (7 million), the
quickstart's text and tokenizer, batches of 4 x 128 tokens. For each seed one run keeps the learning
rate after its warm-up to the end. Another one goes on from it where a fifth of the steps is left
and decays the rate to 0 over them (WSD, linear). Of the first one's last checkpoints, which are of
the same fifth of the steps, tools/merge_checkpoints.py makes the weighted means that stand for a
linear, a cosine and a 1 - sqrt decay (Tian et al. 2025, arXiv:2507.17634). All are compared on all
validation data; the spread is the standard deviation over seeds.

Each finished seed is a line of runs.jsonl in the folder: started again, it does what is missing.
results.json has all losses. One process with one thread.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.quality import SIZES, Trainer, call
from megatron.arguments import arg
from tools.shared.program import complain, read

MODEL = "@examples/quickstart/model.args"
BATCH = 4
TOKENS = BATCH * 128  # of a step
WEIGHTS = ("linear", "cosine", "1-sqrt")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    folder: Path = arg(Path("runs/merging"), parse=Path, metavar="DIR")
    """where everything is written"""

    size: Literal["1M", "7M"] = arg("1M")
    """parameters of the model"""

    steps: int = arg(20_000, minimum=100)
    """training steps of 512 tokens"""

    seeds: int = arg(3, minimum=1)
    """seeds"""

    window: int = arg(8, minimum=2)
    """checkpoints that are merged"""

    lr: float = arg(0.004, above=0)
    """learning rate"""

    @property
    def interval(self) -> int:
        """Steps between checkpoints."""
        return self.steps // 5 // self.window

    @property
    def start(self) -> int:
        """The step from which on the rate decays: the oldest checkpoint merged is one interval
        behind it."""
        return self.last - self.window * self.interval

    @property
    def last(self) -> int:
        """The last step: a multiple of the interval."""
        return self.steps // self.interval * self.interval


class Study:
    """The validation losses of each seed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = options.folder.resolve()
        trainer = Trainer(self.folder, options.size)
        self.data = trainer.data
        if not (self.data / "shakespeare_text_document.idx").exists():
            trainer.prepare()
        self.file = self.folder / f"runs_{options.size}_{options.steps}.jsonl"
        self.file.touch()

    def losses(self) -> list[dict[str, float]]:
        """Of each seed the loss by name, trained unless its line is there. Raises
        CalledProcessError where a program fails."""
        lines = map(json.loads, self.file.read_text(encoding="utf-8").splitlines())
        done = {line["seed"]: line for line in lines}
        for seed in range(1, self.options.seeds + 1):
            if seed not in done:
                done[seed] = {"seed": seed} | self.one(seed)
                with self.file.open("a", encoding="utf-8") as lines_of_seeds:
                    lines_of_seeds.write(json.dumps(done[seed]) + "\n")
                print(json.dumps(done[seed]), flush=True)
        names = ("constant", "decay", *WEIGHTS)
        return [{name: line[name] for name in names} for line in done.values()]

    def one(self, seed: int) -> dict[str, float]:
        """The losses of a seed, and the seconds it took."""
        o = self.options
        began = time.monotonic()
        saves = self.folder / f"seed_{seed}"
        shutil.rmtree(saves, ignore_errors=True)
        run = {"--seed": seed, "--train-iters": o.last, "--eval-interval": o.last}
        constant = {"--lr": o.lr, "--lr-warmup-iters": o.last // 20, "--lr-decay-style": "constant"}
        kept = {"--save": saves / "constant", "--save-interval": o.interval}
        found = {"constant": self.train(run | constant | kept)}
        branch = {"--load": saves / "constant", "--ckpt-step": o.start, "--lr-decay-style": "WSD"}
        branch |= {"--lr-wsd-decay-style": "linear", "--lr-wsd-decay-iters": o.last - o.start}
        branch |= {"--lr-decay-iters": o.last, "--min-lr": 0}
        override = "--override-opt-param-scheduler"
        found["decay"] = self.train(run | constant | branch, override)
        for weights in WEIGHTS:
            merged = saves / weights
            words = ["--save", merged, "--merge-window", o.window, "--merge-weights", weights]
            call("tools/merge_checkpoints.py", saves / "constant", *words)
            found[weights] = self.train(run | {"--load": merged, "--lr": o.lr}, "--skip-train")
        shutil.rmtree(saves, ignore_errors=True)
        return found | {"seconds": round(time.monotonic() - began)}

    def train(self, flags: Mapping[str, object], *more: str) -> float:
        """Run it; its last validation loss, nats per token."""
        metrics = self.folder / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        data = {
            "--data-path": self.data / "shakespeare_text_document",
            "--vocab-file": self.data / "vocab.json",
            "--merge-file": self.data / "merges.txt",
            "--global-batch-size": BATCH,
            "--hang-timeout-seconds": 0,  # beside other work a step may take long
            "--metrics-file": metrics,
        }
        words = [str(word) for flag in (data | dict(flags)).items() for word in flag]
        size = SIZES[self.options.size][1:]
        call("pretrain_gpt.py", MODEL, *size, *words, "--full-validation", *more)
        rows = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
        return [row["lm_loss"] for row in rows if row.get("split") == "validation"][-1]


def summary(losses: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of each loss, and of its distance from the decay's of
    the same seed."""
    found = {}
    for name in losses[0]:
        values = [of_seed[name] for of_seed in losses]
        above = [of_seed[name] - of_seed["decay"] for of_seed in losses]
        found[name] = {
            "mean": statistics.mean(values),
            "deviation": deviation(values),
            "above_decay": statistics.mean(above),
            "deviation_above_decay": deviation(above),
        }
    return found


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds; of one seed there is none."""
    return statistics.stdev(values) if len(values) > 1 else None


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 measured, 1 a program failed, 2 a wrong command line."""
    options = read(Options, argv, prog="merging.py", description=__doc__ or "")
    try:
        study = Study(options)
        losses = study.losses()
    except subprocess.CalledProcessError as error:
        complain(error)
        return 1
    found = summary(losses)
    facts = {"date": time.strftime("%Y-%m-%d"), "tokens": options.last * TOKENS}
    facts |= {"steps": options.last, "decayed": options.last - options.start}
    with (study.folder / "results.json").open("w", encoding="utf-8") as output:
        json.dump({**facts, "mean": found, "losses": losses}, output, indent=1)
    print(f"{options.last:,} steps, {options.last * TOKENS / 1e6:.2f}M tokens, {len(losses)} seeds")
    for name, of in found.items():
        mean, above = (
            f"{of[value]:.4f}" + ("" if of[spread] is None else f" ({of[spread]:.4f})")
            for value, spread in (("mean", "deviation"), ("above_decay", "deviation_above_decay"))
        )
        print(f"{name:>9}: {mean}, above the decay {above}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
