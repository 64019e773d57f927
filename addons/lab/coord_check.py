"""Check that with --use-mup what a model learns in a step does not depend on its width: train
models of several widths for a few steps with and without it, and print how far activations move.

The batch is the same in every step, bytes of --text. Step 0 shows the mean size of activations
before training, later steps the mean size of their change since then. `slope` is the exponent of
the width that fits the last step: 0 is flat.

--transfer finds the best learning rate of each width instead. Rates are two to a doubling. A width
starts with the rate that was best for the width before (the first: in the middle), and goes on
until two rates on either side of its best are measured.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron import small_files
from megatron.arguments import arg
from tools.shared.program import run_program

if TYPE_CHECKING:
    import torch
    from torch import nn

    from megatron.training.run import Run

PLAYS = Path("runs/quickstart/data/shakespeare.jsonl")
HEADS = 4
BATCH, LENGTH = 8, 64
MODEL = (
    f"--num-layers 2 --num-attention-heads {HEADS} --seq-length {LENGTH} "
    f"--max-position-embeddings {LENGTH} --hidden-dropout 0 --attention-dropout 0 "
    f"--weight-decay 0 --micro-batch-size {BATCH} --tokenizer-type ByteTokenizer --mock-data "
    "--num-workers 0 --eval-iters 0 --device cpu"
).split()
LAST = 0.1  # of the steps of a run, whose mean loss counts
TYPES = ("embedding", "attention", "MLP", "residual", "logits")
# By type, by step, by width.
Table = dict[str, list[list[float]]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    text: Path = arg(PLAYS, parse=Path, metavar="FILE")
    """file whose bytes the models are trained on"""

    widths: tuple[int, ...] = arg((64, 128, 256, 512))
    """hidden sizes, multiples of 8"""

    base_width: int = arg(64, minimum=HEADS)
    """width at which muP is the usual model"""

    steps: int = arg(4, minimum=1)
    """updates of each model"""

    lr: float = arg(2**-9, above=0)
    """learning rate, without --transfer"""

    seeds: int = arg(2, minimum=1)
    """number of seeds, over which the mean is taken"""

    bound: float = arg(0.3, above=0)
    """largest slope that is flat"""

    transfer: bool = arg(False)
    """find the best learning rate of each width, from --lr-min to --lr-max"""

    lr_min: float = arg(2**-14, above=0)
    """least learning rate of --transfer"""

    lr_max: float = arg(2**-2, above=0)
    """largest one; each is the one before times root 2"""

    decoupled: bool = arg(False)
    """with muP: --decoupled-lr equal to each learning rate of --transfer"""

    runs: Path | None = arg(None, parse=Path, metavar="FILE")
    """with --transfer: JSON lines of finished runs, which are not done again"""

    output: str | None = arg(None)
    """picture to write: .png, .svg or .pdf; needs matplotlib"""

    flags: tuple[str, ...] = arg((), position="after --", metavar="-- FLAGS")
    """more flags of pretrain_gpt.py for every model (--mup-...: with muP alone)"""


def build(options: Options, width: int, mup: bool, seed: int, flags: Sequence[str]) -> Run:
    """A model of this width with its optimizer, in this process. Raises SystemExit where its
    command line is refused."""
    import torch

    from megatron import log
    from megatron.config import command_line
    from megatron.config.plan.plan import make_plan
    from megatron.features.registry import RunConfig
    from megatron.parallel.context import ParallelContext
    from megatron.timers import Timers
    from megatron.training import build, preflight
    from megatron.training.launch.initialize import Runtime

    base = f"--use-mup --mup-base-hidden-size {options.base_width}"
    head = f"--mup-base-head-dim {options.base_width / HEADS}"
    words = [*MODEL, "--hidden-size", str(width), "--seed", str(seed), *flags]
    words += [*f"{base} {head}".split(), *options.flags] if mup else usual(options.flags)
    line = command_line.read(words, {}, tree=RunConfig)
    log.show_details(False)
    config = line.config
    tokenizer = preflight.build_tokenizer(config)
    plan = make_plan(config, 1, tokenizer.vocab_size)
    runtime = Runtime(torch.device("cpu"), ParallelContext(config.parallel, 1, 0), 1, 0)
    return build.build_run(config, plan, runtime, Timers(), tokenizer)


def usual(flags: Sequence[str]) -> list[str]:
    """The flags that a model without muP has, too."""
    typed: list[str] = []
    mup = False
    for word in flags:
        mup = word.startswith("--mup-") if word.startswith("--") else mup
        typed += [] if mup else [word]
    return typed


def batches(file: Path, seed: int, fixed: bool) -> Iterator[torch.Tensor]:
    """Samples [b, s+1] of bytes of `file`, at random places; always the same ones if `fixed`."""
    import torch

    text = torch.frombuffer(bytearray(small_files.read_bytes(file)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    starts = None
    while True:
        if starts is None or not fixed:
            starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator).tolist()
        yield torch.stack([text[start : start + LENGTH + 1].long() for start in starts])


def train(run: Run, samples: Iterator[torch.Tensor], steps: int) -> list[float]:
    """The losses of so many steps."""
    import pretrain_gpt
    from megatron.training.batch import MicroBatch
    from megatron.training.step import train_step

    rows = (MicroBatch(sample) for sample in samples)
    losses = []
    for step in range(1, steps + 1):
        result = train_step(run, pretrain_gpt.forward_step, rows, step)
        run.advance(result)
        losses.append(result.loss or math.inf)
    return losses


class Sizes:
    """Mean sizes of activations by type in each forward pass of `run`, and of their changes since
    the first one."""

    def __init__(self, run: Run):
        self.values: dict[str, list[list[float]]] = {name: [] for name in TYPES}
        self._first: list[torch.Tensor] = []
        self._calls = 0
        (model,) = run.model
        layers = list(model.decoder.layers.values())
        assert model.embedding is not None and model.output_layer is not None
        modules: dict[str, list[nn.Module]] = {
            "embedding": [model.embedding],
            "attention": [layer.self_attention for layer in layers if layer.mixing],
            "MLP": [layer.mlp for layer in layers if layer.feeding],
            "residual": layers[-1:],
            "logits": [model.output_layer],
        }
        self._number = sum(map(len, modules.values()))
        for name, of_type in modules.items():
            for module in of_type:
                module.register_forward_hook(lambda *args, name=name: self._see(name, args[2]))

    def _see(self, name: str, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        step, micro_batch = divmod(self._calls, self._number)
        if step == 0:
            self._first.append(x.detach().clone())
        size = x.detach() if step == 0 else x.detach() - self._first[micro_batch]
        self.values[name] += [[]] * (step + 1 - len(self.values[name]))
        self.values[name][step] = [*self.values[name][step], float(size.abs().mean())]
        self._calls += 1

    def means(self, name: str) -> list[float]:
        """By step, over the modules of this type."""
        return [sum(step) / len(step) for step in self.values[name]]


def measure(options: Options, mup: bool) -> Table:
    """Train all widths; the sizes are means over the seeds."""
    flags = ["--lr", str(options.lr), "--lr-decay-style", "constant"]
    flags += ["--train-iters", str(options.steps + 1)]
    table: Table = {name: [[] for _ in range(options.steps + 1)] for name in TYPES}
    for width in options.widths:
        sizes_of_seeds = []
        for seed in range(1, options.seeds + 1):
            run = build(options, width, mup, seed, flags)
            sizes = Sizes(run)
            train(run, batches(options.text, seed, fixed=True), options.steps + 1)
            sizes_of_seeds.append(sizes)
        for name in TYPES:
            for step, values in enumerate(
                zip(*(s.means(name) for s in sizes_of_seeds), strict=True)
            ):
                table[name][step].append(sum(values) / len(values))
    return table


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """The exponent p of the least-squares fit values ~ widths^p."""
    return float(np.polyfit(np.log2(widths), np.log2(np.maximum(values, 1e-30)), 1)[0])


def print_table(options: Options, title: str, table: Table) -> None:
    """One line per type and step."""
    print(f"\n{title}\n{'':<16}" + "".join(f"{f'width {w}':>12}" for w in options.widths))
    for name, steps in table.items():
        for step, values in enumerate(steps):
            end = f"  slope {slope(options.widths, values):+.2f}" if step == len(steps) - 1 else ""
            numbers = "".join(f"{value:>12.3g}" for value in values)
            print(f"{f'{name}, step {step}':<16}{numbers}{end}")


TITLES = {False: "without muP", True: "with --use-mup"}


def check(options: Options) -> None:
    """Measure and print. Raises ValueError where something is not flat with muP."""
    tables = {mup: measure(options, mup) for mup in (False, True)}
    for mup, table in tables.items():
        print_table(options, TITLES[mup], table)
    if options.output:
        draw_coordinates(options, tables)
    print(f"\nflat: a slope of at most {options.bound:g} after {options.steps} steps")
    apart = {}
    for mup, table in tables.items():
        slopes = {name: slope(options.widths, steps[-1]) for name, steps in table.items()}
        bent = {name: p for name, p in slopes.items() if abs(p) > options.bound}
        apart[mup] = ", ".join(f"{name} {p:+.2f}" for name, p in bent.items())
        print(f"{TITLES[mup]:<16}{f'not flat: {apart[mup]}' if bent else 'flat'}")
    if apart[True]:
        raise ValueError(f"with --use-mup not flat: {apart[True]} [mup-not-flat]")


def rates(options: Options) -> list[float]:
    """The learning rates of --transfer."""
    count = round(2 * math.log2(options.lr_max / options.lr_min)) + 1
    return [options.lr_min * 2 ** (number / 2) for number in range(count)]


# Mean loss by index in rates(), for each width.
Losses = dict[int, dict[int, float]]


def transfer(options: Options) -> None:
    """Find the best learning rate of each width with and without muP, and print all losses."""
    trials = Trials(options)
    losses: dict[bool, Losses] = {False: {}, True: {}}
    start = dict.fromkeys(losses, len(rates(options)) // 2)
    for width in options.widths:
        for mup, by_width in losses.items():
            by_width[width] = descend(trials, width, mup, start[mup])
            start[mup] = best(by_width[width])
    for mup, by_width in losses.items():
        print_losses(options, TITLES[mup], by_width)
    if options.output:
        draw_transfer(options, losses)


def best(losses: dict[int, float]) -> int:
    """The index of the least loss."""
    return min(losses, key=losses.__getitem__)


def descend(trials: Trials, width: int, mup: bool, start: int) -> dict[int, float]:
    """Losses of the rates around `start`, and on until there are two on either side of the best."""
    last = len(rates(trials.options)) - 1
    losses: dict[int, float] = {}
    centre = start
    while near := [
        i for i in range(max(0, centre - 2), min(last, centre + 2) + 1) if i not in losses
    ]:
        losses |= {i: trials.mean(width, mup, i) for i in near}
        centre = best(losses)
    return dict(sorted(losses.items()))


class Trials:
    """Losses of runs, each of which is trained once, be it by a process before."""

    def __init__(self, options: Options):
        self.options = options
        self._text = hashlib.sha256(small_files.read_bytes(options.text)).hexdigest()[:12]
        self._losses: dict[str, float] = {}
        if options.runs and options.runs.exists():
            for line in small_files.read_text(options.runs).splitlines():
                run = json.loads(line)
                loss = run.pop("loss")
                self._losses[json.dumps(run)] = loss

    def mean(self, width: int, mup: bool, index: int) -> float:
        """Over the seeds."""
        seeds = range(1, self.options.seeds + 1)
        loss = sum(self._loss(width, mup, index, seed) for seed in seeds) / len(seeds)
        print(f"{TITLES[mup]}, width {width}, lr {rates(self.options)[index]:.3g}: {loss:.4f}")
        sys.stdout.flush()
        return loss

    def _loss(self, width: int, mup: bool, index: int, seed: int) -> float:
        options, lr = self.options, rates(self.options)[index]
        run: dict[str, Any] = {
            "text": self._text,
            "width": width,
            "mup": mup,
            "lr": lr,
            "seed": seed,
            "steps": options.steps,
        }
        run |= {"base_width": options.base_width, "flags": list(options.flags)}
        if mup and options.decoupled:
            run["decoupled"] = True
        name = json.dumps(run)
        if name not in self._losses:
            self._losses[name] = final_loss(options, width, mup, lr, seed)
            if options.runs:
                with options.runs.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(run | {"loss": self._losses[name]}) + "\n")
        return self._losses[name]


def final_loss(options: Options, width: int, mup: bool, lr: float, seed: int) -> float:
    """The mean over the last steps of a run."""
    warm_up = str(max(1, options.steps // 10))
    flags = ["--lr", str(lr), "--lr-decay-style", "linear", "--lr-warmup-iters", warm_up]
    flags += ["--train-iters", str(options.steps), "--no-check-for-nan-in-loss-and-grad"]
    if mup and options.decoupled:
        flags += ["--decoupled-lr", str(lr)]
    run = build(options, width, mup, seed, flags)
    losses = train(run, batches(options.text, seed, fixed=False), options.steps)
    count = max(1, int(options.steps * LAST))
    return sum(losses[-count:]) / count


def print_losses(options: Options, title: str, of_widths: Losses) -> None:
    """One line per learning rate, and the best of each width."""
    print(f"\n{title}: loss\n{'learning rate':<16}", end="")
    print("".join(f"{f'width {width}':>12}" for width in of_widths))
    for index in sorted(set().union(*of_widths.values())):
        numbers = [losses.get(index) for losses in of_widths.values()]
        cells = "".join(f"{'' if n is None else format(n, '.4f'):>12}" for n in numbers)
        print(f"{rates(options)[index]:<16.3g}{cells}".rstrip())
    chosen = [best(losses) for losses in of_widths.values()]
    print(f"{'best':<16}" + "".join(f"{rates(options)[i]:>12.3g}" for i in chosen))
    print(f"{'grid steps':<16}" + "".join(f"{i - chosen[0]:>+12d}" for i in chosen))


def draw_coordinates(options: Options, tables: dict[bool, Table]) -> None:
    """A panel for each type, without muP above and with it below: a line for each step."""
    from megatron.analysis import plots

    assert options.output is not None
    matplotlib = plots.load_matplotlib("--output")
    figure = matplotlib.figure.Figure(figsize=(13, 5.4), layout="constrained")
    grid = figure.subplots(2, len(TYPES), sharex=True, sharey="col")
    for row, (mup, table) in enumerate(tables.items()):
        for column, (name, steps) in enumerate(table.items()):
            axes = grid[row][column]
            for step, values in enumerate(steps):
                color = "#999999" if step == 0 else plots.RUNS[(step - 1) % len(plots.RUNS)]
                label = "size before training" if step == 0 else f"change after step {step}"
                axes.plot(options.widths, values, "o-", color=color, label=label, markersize=3)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xticks(options.widths, [str(width) for width in options.widths])
            p = slope(options.widths, steps[-1])
            axes.set_title(f"{name}, slope {p:+.2f}", fontsize=10)
            axes.grid(alpha=0.25)
        grid[row][0].set_ylabel(TITLES[mup])
    for axes in grid[-1]:
        axes.set_xlabel("width")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    plots.save_figure(figure, options.output, "--output")


def draw_transfer(options: Options, of_widths: dict[bool, Losses]) -> None:
    """Loss over learning rate, a line for each width: without muP on the left, with it right."""
    from megatron.analysis import plots

    assert options.output is not None
    matplotlib = plots.load_matplotlib("--output")
    figure = matplotlib.figure.Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, (mup, by_width) in zip(panels, of_widths.items(), strict=True):
        for number, (width, losses) in enumerate(by_width.items()):
            color = plots.RUNS[number % len(plots.RUNS)]
            x = [rates(options)[index] for index in losses]
            axes.plot(x, losses.values(), "o-", color=color, label=f"{width}", markersize=3)
            least = best(losses)
            axes.plot(rates(options)[least], losses[least], "*", color=color, markersize=13)
        axes.set_xscale("log", base=2)
        axes.set_title(TITLES[mup])
        axes.set_xlabel("learning rate")
        axes.grid(alpha=0.25)
        axes.legend(title="width", frameon=False)
    panels[0].set_ylabel("loss")
    plots.save_figure(figure, options.output, "--output")


def problems(options: Options) -> list[str]:
    """What is wrong with the options together, one line each."""
    from megatron.analysis.plots import picture_problems

    lines = picture_problems(options.output)
    if not options.text.is_file():
        fetch = ""
        if options.text == PLAYS:
            fetch = f": python tools/fetch_quickstart_data.py --text-only {PLAYS.parent} fetches it"
        lines.append(f"--text {options.text}: no such file{fetch} [file-not-readable]")
    elif options.text.stat().st_size <= LENGTH + 1:
        lines.append(
            f"--text {options.text}: needs more than {LENGTH + 1} bytes [value-out-of-range]"
        )
    for width in (*options.widths, options.base_width):
        if width < 1 or width % (2 * HEADS):
            lines.append(f"width {width}: must be a multiple of {2 * HEADS} [value-out-of-range]")
    if len(set(options.widths)) < 2:
        lines.append("--widths: at least two are needed [value-out-of-range]")
    if options.lr_max <= options.lr_min:
        lines.append(
            f"--lr-max {options.lr_max:g}: must be above --lr-min {options.lr_min:g} "
            "[value-out-of-range]"
        )
    return lines


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 flat with muP (or --transfer done), 1 not flat, 2 wrong flags."""
    return run_program(
        Options,
        lambda options: transfer(options) if options.transfer else check(options),
        argv,
        prog="coord_check.py",
        description=__doc__ or "",
        check=problems,
    )
