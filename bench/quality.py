"""Steps to quality: how many steps Muon needs for the validation loss that Adam ends with.

    python -m bench.quality
    python -m bench.quality --size 7M
    python -m bench.quality --size 30M

Fixed beforehand: the quickstart's model (1 million parameters) or one of 8 layers of width 256 (7
million), the quickstart's text and tokenizer, 300 steps of 4 x 128 tokens, warm-up over a tenth,
linear decay to 0, momenta as usual. The learning rate of both optimizers is tuned over the same
grid, with a seed of its own; while the best of either is at an end, the grids of both grow by a
point there. Then the weight decay, at that rate. The best setting runs with further seeds. Goal:
the mean loss of Adam's over these seeds, on all validation data. Muon's steps to it are
interpolated (loss over log steps) between runs of all of the steps, half, and a quarter, an eighth
... while all seeds are better than the goal, each with its whole schedule; the interval is a
bootstrap over seeds.

Each finished run is a line of runs.jsonl in the folder: started again, it does what is missing.
results.json has all runs and figures, quality.png the picture. One process with one thread.

--size 30M (9 layers of width 512) is an illustration, from which no ratio follows: one run of 100
steps of each optimizer with the setting that is best at 7M, and their training losses.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron.analysis.log_reader import Record
from megatron.analysis.plots import RUNS, draw_curves, load_matplotlib, save_figure
from megatron.analysis.run_reader import RecordedRun
from megatron.arguments import arg
from tools.shared.program import complain, read

ROOT = Path(__file__).resolve().parents[1]
OPTIMIZERS = {
    "adam": ("--optimizer", "adam", "--adam-beta1", "0.9", "--adam-beta2", "0.95"),
    "muon": (
        *("--optimizer", "muon", "--muon-momentum", "0.95", "--muon-use-nesterov"),
        *("--muon-extra-scale-factor", "0.2", "--muon-coefficient-type", "simple"),
        *("--adam-beta1", "0.9", "--adam-beta2", "0.95"),
    ),
}
QUICKSTART = "@examples/quickstart/gpt.args"
SIZES = {
    "1M": (QUICKSTART,),
    "7M": tuple(f"{QUICKSTART} --num-layers 8 --hidden-size 256 --num-attention-heads 8".split()),
    "30M": tuple(f"{QUICKSTART} --num-layers 9 --hidden-size 512 --num-attention-heads 8".split()),
}
RATES = {
    size: tuple(least * 2**k for k in range(4)) for size, least in (("1M", 0.004), ("7M", 0.002))
}
WEIGHT_DECAYS = (0.1, 0.5)
TUNING_SEED = 1000
DRAWS = 10_000
ILLUSTRATION = 100  # steps of --size 30M
SMOOTH = 10  # steps over which its curves are averaged


class Trial(NamedTuple):
    """One run."""

    optimizer: str
    lr: float
    weight_decay: float
    steps: int
    seed: int


Loss = Callable[[Trial], float]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    size: Literal["1M", "7M", "30M"] = arg("1M")
    """parameters of the model"""

    folder: Path = arg(Path("runs/quality"), parse=Path, metavar="DIR")
    """where everything is written: the text in data, all else in a folder of the size"""

    steps: int = arg(300, minimum=10)
    """training steps"""

    seeds: int = arg(5, minimum=2)
    """seeds of the best setting"""


class Trainer:
    """The final validation losses of runs, which are trained unless their line is in runs.jsonl."""

    def __init__(self, folder: Path, size: str) -> None:
        self.data = folder / "data"
        self.folder = folder / size
        self.folder.mkdir(parents=True, exist_ok=True)
        self.size = size
        self.file = self.folder / "runs.jsonl"
        self.file.touch()
        runs = map(json.loads, self.file.read_text(encoding="utf-8").splitlines())
        self.runs = {Trial(*(run[name] for name in Trial._fields)): run for run in runs}

    def loss(self, trial: Trial) -> float:
        """Final validation loss, nats per token."""
        if trial not in self.runs:
            run = trial._asdict() | self.train(trial)
            with self.file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(run) + "\n")
            self.runs[trial] = run
            print(json.dumps(run), flush=True)
        return self.runs[trial]["loss"]

    def train(self, trial: Trial) -> dict[str, Any]:
        """Train it: its final validation loss and CPU seconds, at 30M its training losses. Raises
        CalledProcessError where the program fails."""
        data, metrics = self.data, self.folder / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        flags = {
            "--data-path": data / "shakespeare_text_document",
            "--vocab-file": data / "vocab.json",
            "--merge-file": data / "merges.txt",
            "--split": "97,3,0",
            "--global-batch-size": 4,
            "--lr": trial.lr,
            "--min-lr": 0,
            "--lr-decay-style": "linear",
            "--lr-warmup-iters": trial.steps // 10,
            "--weight-decay": trial.weight_decay,
            "--train-iters": trial.steps,
            "--eval-interval": trial.steps,
            "--seed": trial.seed,
            "--hang-timeout-seconds": 0,  # beside other work a step may take long
            "--metrics-file": metrics,
        }
        words = [str(word) for flag in flags.items() for word in flag]
        words += ["--full-validation", *OPTIMIZERS[trial.optimizer]]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        call("pretrain_gpt.py", *SIZES[self.size], *words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        run = {"loss": rows[-1]["lm_loss"], "cpu_seconds": round(seconds, 1)}
        if self.size == "30M":
            run["losses"] = [round(row["lm_loss"], 4) for row in rows if "split" not in row]
        return run

    def prepare(self) -> None:
        """The quickstart's text, tokenizer and token ids."""
        data = self.data
        text, prefix = data / "shakespeare.jsonl", data / "shakespeare"
        files = ["--vocab-file", data / "vocab.json", "--merge-file", data / "merges.txt"]
        call("tools/fetch_quickstart_data.py", "--text-only", data)
        sizes = ["--vocab-size", 2048, "--output-dir", data, "--overwrite"]
        call("tools/train_tokenizer.py", "--input", text, *sizes)
        kind = ["--tokenizer-type", "GPT2BPETokenizer", *files, "--append-eod", "--overwrite"]
        call("tools/preprocess_data.py", "--input", text, "--output-prefix", prefix, *kind)


def call(program: str, *words: object) -> None:
    """Run a program of this checkout with one thread."""
    command = [sys.executable, program, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def tuned(loss: Loss, steps: int, grid: Sequence[float]) -> tuple[list[float], dict[str, Trial]]:
    """The rates tried, those of `grid` first, and the best run of each optimizer."""
    rates = list(grid)
    while True:
        best = {
            optimizer: min(
                (Trial(optimizer, rate, WEIGHT_DECAYS[0], steps, TUNING_SEED) for rate in rates),
                key=loss,
            )
            for optimizer in OPTIMIZERS
        }
        ends = {trial.lr for trial in best.values()} & {rates[0], rates[-1]}
        if not ends:
            break
        if rates[0] in ends:
            rates = [rates[0] / 2, *rates]
        if rates[-1] in ends:
            rates = [*rates, rates[-1] * 2]
    return rates, {
        optimizer: min((trial._replace(weight_decay=decay) for decay in WEIGHT_DECAYS), key=loss)
        for optimizer, trial in best.items()
    }


def measure(loss: Loss, steps: int, seeds: int, grid: Sequence[float]) -> dict[str, Any]:
    """Tune from the rates `grid` on, run the seeds, and compare."""
    rates, best = tuned(loss, steps, grid)
    adam: list[float] = []
    muon: dict[int, list[float]] = {steps: [], steps // 2: []}
    for seed in range(1, seeds + 1):
        adam.append(loss(best["adam"]._replace(seed=seed)))
        for length, losses in muon.items():
            losses.append(loss(best["muon"]._replace(steps=length, seed=seed)))
    while max(muon[least := min(muon)]) < statistics.mean(adam) and least > 1:
        trial = best["muon"]._replace(steps=least // 2)
        muon[least // 2] = [loss(trial._replace(seed=seed)) for seed in range(1, seeds + 1)]
    return {
        "steps": steps,
        "rates": rates,
        "best": {name: trial._asdict() for name, trial in best.items()},
        "adam": {steps: adam},
        "muon": muon,
        "mean": {"adam": statistics.mean(adam), "muon": statistics.mean(muon[steps])},
        "deviation": {"adam": statistics.stdev(adam), "muon": statistics.stdev(muon[steps])},
        "ratio": steps_to(statistics.mean(adam), means(muon)) / steps,
        "interval": interval(adam, muon),
    }


def illustrate(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Train each optimizer once with the setting that is best at 7M after `steps`, which is tuned
    first unless it was."""
    _, best = tuned(Trainer(trainer.folder.parent, "7M").loss, steps, RATES["7M"])
    best = {name: trial._replace(steps=ILLUSTRATION, seed=1) for name, trial in best.items()}
    return {
        "best": {name: trial._asdict() for name, trial in best.items()},
        "mean": {name: trainer.loss(trial) for name, trial in best.items()},
    }


def means(losses: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Mean loss by steps."""
    return {steps: statistics.mean(values) for steps, values in losses.items()}


def steps_to(goal: float, losses: Mapping[int, float]) -> float:
    """Steps after which the loss, interpolated over log steps, is `goal`; beyond the runs, the
    nearest line goes on."""
    points = sorted(losses.items())
    pairs = list(zip(points, points[1:], strict=False))
    (a, high), (b, low) = next((pair for pair in pairs if pair[1][1] <= goal), pairs[-1])
    return float(a * (b / a) ** ((high - goal) / (high - low)))


def interval(adam: Sequence[float], muon: Mapping[int, Sequence[float]]) -> list[float]:
    """The central 95 % of the ratio over seeds drawn with replacement, Adam's and Muon's apart."""
    draw = random.Random(0)
    ratios = []
    for _ in range(DRAWS):
        goal = statistics.fmean(draw.choices(adam, k=len(adam)))
        chosen = draw.choices(range(len(adam)), k=len(adam))
        losses = {
            steps: statistics.fmean(values[seed] for seed in chosen)
            for steps, values in muon.items()
        }
        ratios.append(steps_to(goal, losses) / max(muon))
    ratios.sort()
    return [ratios[round(share * (DRAWS - 1))] for share in (0.025, 0.975)]


def curve(run: Mapping[str, Any]) -> RecordedRun:
    """The training losses of a run, to be drawn."""
    name = f"{run['optimizer'].capitalize()}, learning rate {run['lr']:g}"
    losses = enumerate(run["losses"], 1)
    return RecordedRun(name, [Record(iteration, loss=loss) for iteration, loss in losses])


def draw(path: Path, result: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """Left the tuning, right the loss of the best settings over steps. Raises ValueError."""
    matplotlib = load_matplotlib(f"--folder {path.parent}")
    figure = matplotlib.figure.Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for optimizer, color in zip(OPTIMIZERS, RUNS, strict=False):
        name = optimizer.capitalize()
        for decay, line, mark in zip(WEIGHT_DECAYS, ("-", ""), (".", "x"), strict=True):
            points = sorted(
                (run["lr"], run["loss"])
                for run in runs
                if (run["optimizer"], run["weight_decay"], run["seed"])
                == (optimizer, decay, TUNING_SEED)
            )
            label = f"{name}, weight decay {decay:g}"
            left.plot(*zip(*points, strict=True), color=color, ls=line, marker=mark, label=label)
        for steps, losses in sorted(result[optimizer].items()):
            right.plot([steps] * len(losses), losses, ".", color=color, alpha=0.5)
        average = sorted(means(result[optimizer]).items())
        right.plot(*zip(*average, strict=True), color=color, marker="_", label=f"{name}, mean")
    right.axhline(result["mean"]["adam"], color=RUNS[0], linestyle=":", linewidth=1)
    crossing = result["ratio"] * result["steps"]
    right.axvline(
        crossing, color=RUNS[1], linestyle=":", linewidth=1, label=f"{crossing:.0f} steps"
    )
    for axes, title, ticks in (
        (left, "learning rate", result["rates"]),
        (right, "training steps", sorted(result["muon"])),
    ):
        axes.set_xlabel(title)
        axes.set_ylabel("final validation loss")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    save_figure(figure, str(path), "--folder")


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 measured, 1 a program failed, 2 a wrong command line."""
    options = read(Options, argv, prog="quality.py", description=__doc__ or "")
    trainer = Trainer(options.folder.resolve(), options.size)
    try:
        if not (trainer.data / "shakespeare_text_document.idx").exists():
            trainer.prepare()
        picture = trainer.folder / "quality.png"
        if options.size == "30M":
            result = illustrate(trainer, options.steps)
            load_matplotlib(f"--folder {options.folder}")
            draw_curves(str(picture), [curve(run) for run in trainer.runs.values()], SMOOTH)
        else:
            result = measure(trainer.loss, options.steps, options.seeds, RATES[options.size])
            draw(picture, result, list(trainer.runs.values()))
    except (subprocess.CalledProcessError, ValueError) as error:
        complain(error)
        return 1
    runs = list(trainer.runs.values())
    spent = sum(run["cpu_seconds"] for run in runs) / 60
    facts = {"date": time.strftime("%Y-%m-%d"), "cpu_minutes": round(spent, 1)}
    with (trainer.folder / "results.json").open("w", encoding="utf-8") as output:
        json.dump({**facts, **result, "runs": runs}, output, indent=1)
    for name, trial in result["best"].items():
        setting = f"lr {trial['lr']:g}, weight decay {trial['weight_decay']:g}"
        print(f"{name}: {setting}: loss {result['mean'][name]:.4f}")
    if "ratio" in result:
        low, high = result["interval"]
        deviations = " and ".join(f"{value:.4f}" for value in result["deviation"].values())
        print(f"standard deviations {deviations} ({options.seeds} seeds)")
        ratio = f"{result['ratio']:.3f} of Adam's ({low:.3f} to {high:.3f})"
        print(f"Muon's steps to Adam's loss: {ratio}")
    print(f"{len(runs)} runs, {spent:.0f} CPU minutes; {trainer.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
