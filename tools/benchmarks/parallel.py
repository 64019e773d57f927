#!/usr/bin/env python
"""Race layouts of the same training step on the CPU: ranks of one thread each against one rank, as
gloo connects them.

A layout is a number of ranks and flags of pretrain_gpt.py; its ranks are processes that this
program starts and that run the whole iteration (data, step, log line). The layouts take turns, one
step each, the order moving on every round; ranks that have no turn sleep. Before any clock runs the
losses of all layouts must agree. A speed-up is the median over the rounds of (seconds of one rank /
seconds of the layout) in the same round, with its smallest and largest value: the noise of the
machine. "two apart" are two independent runs of one rank at the same time: the most that two cores
of this machine can give. --compare-with adds the same layouts of another checkout of this
repository, each with a speed-up against its own one rank, and a column with the ratio between the
checkouts. --peer adds megatron-core's GPT of the same shape, on one rank and tensor-parallel on
two, with a speed-up against its own one rank; that needs megatron-core, the rest torch and numpy
only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent / "step")]

import torch  # noqa: E402
from checkouts import check_names, checkout_name, commit_of, parse_checkout  # noqa: E402
from processes import Refused, Worker, WorkerFailed, make_job  # noqa: E402
from settings import DEFAULT, environment_of  # noqa: E402
from sizes import Size, parse_size  # noqa: E402

ONE = "one rank"
APART = "two apart"
PEER = "megatron-core"
DEFAULT_SIZE = (
    "peers:layers=4,hidden=256,heads=4,ffn=688,seq=256,micro_batch=4,micro_batches=4,"
    "vocab=50304,family=llama"
)
TP = "--tensor-model-parallel-size"
SP = "--sequence-parallel"
PP = "--pipeline-model-parallel-size"
DEFAULT_LAYOUTS = (
    f"tp2=2 {TP} 2",
    f"tp2+sp=2 {TP} 2 {SP}",
    "dp2=2",
    f"pp2=2 {PP} 2 --decoder-last-pipeline-num-layers 1",
)
# Speed-ups to reach on two cores: the best of megatron-core and picotron on this shape.
GOALS = {"tp2": 1.85, "dp2": 1.80, "pp2": 1.15}
TOLERANCE = 1e-5  # of losses in the warm-up steps, relative
SECONDS = 300.0  # of silence after which a rank counts as hung


@dataclass(frozen=True)
class Layout:
    """One way to share the work: `ranks` processes with these flags, or (`apart`) so many runs of
    one rank."""

    name: str
    ranks: int = 1
    flags: tuple[str, ...] = ()
    apart: bool = False
    peer: bool = False
    tree: Path = ROOT

    @property
    def base(self) -> str:
        """The layout of one rank that its speed-up is against."""
        return PEER if self.peer else in_checkout(ONE, self.tree)


def in_checkout(name: str, tree: Path) -> str:
    """The name of a layout of that checkout."""
    return name if tree == ROOT else f"{name}, {checkout_name(tree)}"


def parse_layout(text: str) -> Layout:
    """`NAME=RANKS FLAGS...`. Raises ValueError on another form."""
    name, equals, rest = text.partition("=")
    words = shlex.split(rest)
    if not name or not equals or not words or not words[0].isdecimal() or int(words[0]) < 1:
        raise ValueError(f"{text!r} is not NAME=RANKS FLAGS..., as in 'tp2=2 {TP} 2'")
    return Layout(name, int(words[0]), tuple(words[1:]))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launcher(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set for that rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def peer() -> Any:
    """The module of megatron-core's contestant, whose import takes seconds that only --peer shall
    cost."""
    return importlib.import_module("peer")


class Ranks:
    """The processes of one layout. Raises Refused or WorkerFailed wherever one of them does not
    answer as it should."""

    def __init__(self, layout: Layout, size: Size, dtype: str):
        self.layout = layout
        port = free_port()
        self._workers = []
        try:
            for rank in range(layout.ranks):
                job = make_job(
                    "megatron-core" if layout.peer else "ours",
                    size,
                    dtype=dtype,
                    tree=layout.tree,
                    flags=layout.flags,
                    launcher={} if layout.apart else launcher(rank, layout.ranks, port),
                )
                environment = environment_of(DEFAULT, os.environ, threads=1)
                self._workers.append(Worker(f"{layout.name}: rank {rank}", job, environment))
            self.parameters = max(facts["parameters"] for facts in self._answers())
        except BaseException:
            self.end()
            raise

    def _answers(self) -> list[Any]:
        """The next answer of each rank, once all have answered."""
        answers: dict[int, Any] = {}
        refusals: list[str] = []
        while len(answers) < len(self._workers):
            waiting = {
                worker.pipe: rank
                for rank, worker in enumerate(self._workers)
                if rank not in answers
            }
            ready = wait(list(waiting), SECONDS)
            if not ready:
                raise WorkerFailed(
                    f"{self.layout.name}: no answer from its ranks for {SECONDS:.0f} s"
                )
            for rank in (waiting[pipe] for pipe in ready):
                try:
                    answers[rank] = self._workers[rank].receive()
                except Refused as refusal:
                    refusals.append(str(refusal))
                    answers[rank] = None
        if refusals:
            raise Refused(" ".join(filter(None, refusals)))
        return [answers[rank] for rank in range(len(self._workers))]

    def step(self) -> tuple[float, float]:
        """(seconds of the slowest rank, for one step's tokens, loss) of one step."""
        for worker in self._workers:
            worker.send("step")
        answers = self._answers()
        seconds = max(seconds for seconds, _ in answers)
        return seconds / self.layout.ranks if self.layout.apart else seconds, answers[0][1]

    def end(self) -> None:
        """Stop the processes."""
        for worker in self._workers:
            worker.end()


@dataclass
class Race:
    """Seconds of every timed step by layout, losses of all steps, and layouts that were refused,
    with the reason."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def speed_ups(self, name: str, base: str = ONE) -> list[float]:
        """How many times as fast as one rank, round by round."""
        return [
            one / mine for one, mine in zip(self.seconds[base], self.seconds[name], strict=True)
        ]


def race(layouts: Sequence[Layout], size: Size, dtype: str, rounds: int, warmup: int) -> Race:
    """Start everybody, compare the losses of the warm-up steps, then take turns. Raises
    WorkerFailed."""
    result = Race()
    running = {}
    try:
        for layout in layouts:
            try:
                running[layout.name] = Ranks(layout, size, dtype)
                result.parameters[layout.name] = running[layout.name].parameters
            except Refused as refusal:
                result.refused[layout.name] = str(refusal)
        for step in range(warmup):
            losses = {name: ranks.step()[1] for name, ranks in running.items()}
            for name in (
                layout.name for layout in layouts if layout.name in losses and not layout.peer
            ):
                loss = losses[name]
                if not abs(loss - losses[ONE]) <= TOLERANCE * abs(losses[ONE]):
                    raise WorkerFailed(
                        f"{name}: the loss of step {step + 1} is {loss:.6f}, that of one rank "
                        f"{losses[ONE]:.6f}: they do not train the same model, so times say nothing"
                    )
        names = list(running)
        for done in range(rounds):
            for name in names[done % len(names) :] + names[: done % len(names)]:
                seconds, loss = running[name].step()
                result.seconds.setdefault(name, []).append(seconds)
                result.losses.setdefault(name, []).append(loss)
    finally:
        for ranks in running.values():
            ranks.end()
    return result


def table(result: Race, layouts: Sequence[Layout], size: Size) -> list[str]:
    """One row a layout: times, tokens in a second, speed-up with its spread, what a goal says."""
    others = list(dict.fromkeys(layout.tree for layout in layouts if layout.tree != ROOT))
    ratios = [f"x {checkout_name(tree)}" for tree in others]
    rows = [
        (
            "",
            "ranks",
            "step ms",
            "best ms",
            "tok/s",
            "speed-up",
            "smallest",
            "largest",
            *ratios,
            "goal",
        )
    ]
    for layout in layouts:
        if layout.name in result.refused:
            cells = ["-"] * (6 + len(others))
            rows.append((layout.name, str(layout.ranks), *cells, "refused, see below"))
            continue
        seconds = result.seconds[layout.name]
        ups = result.speed_ups(layout.name, layout.base)
        middle = statistics.median(ups)
        goal = GOALS.get(layout.name)
        verdict = "" if goal is None else f"{goal:.2f} {'reached' if middle >= goal else 'missed'}"
        rows.append(
            (
                layout.name,
                str(layout.ranks),
                f"{1e3 * statistics.median(seconds):.1f}",
                f"{1e3 * min(seconds):.1f}",
                f"{size.tokens / statistics.median(seconds):.0f}",
                f"{middle:.2f}",
                f"{min(ups):.2f}",
                f"{max(ups):.2f}",
                *(checkout_ratio(result, layout, tree) for tree in others),
                verdict,
            )
        )
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(rows[0]) - 1
    return [
        "  "
        + "  ".join(
            cell.ljust(width[i]) if i in (0, last) else cell.rjust(width[i])
            for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def checkout_ratio(result: Race, layout: Layout, tree: Path) -> str:
    """How many times as fast as the same layout of that checkout, the median over the rounds; empty
    for others' rows."""
    other = in_checkout(layout.name, tree)
    if layout.tree != ROOT or other not in result.seconds:
        return ""
    pairs = zip(result.seconds[other], result.seconds[layout.name], strict=True)
    return f"{statistics.median(theirs / mine for theirs, mine in pairs):.2f}"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [OPTION ...]", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--layout",
        action="append",
        type=_read(parse_layout),
        metavar="'NAME=RANKS FLAGS...'",
        help="a layout to compare with one rank and two apart; may be repeated (default: tp2, "
        "tp2+sp, dp2, pp2)",
    )
    parser.add_argument(
        "--size",
        type=_read(parse_size),
        default=DEFAULT_SIZE,
        metavar="SIZE",
        help="as of train_step.py (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--flags",
        default="",
        metavar="'FLAGS...'",
        help="flags of pretrain_gpt.py for every layout",
    )
    parser.add_argument(
        "--peer", action="store_true", help="megatron-core too (fp32 and family=llama only)"
    )
    parser.add_argument(
        "--compare-with",
        action="append",
        type=_read(parse_checkout),
        default=[],
        metavar="DIR",
        help="another checkout of this repository (86e72bf or later, C++ built), whose layouts "
        "take turns with these; may be repeated",
    )
    parser.add_argument(
        "--rounds", type=_read(_count), default=5, help="timed steps of each layout (default: 5)"
    )
    parser.add_argument(
        "--warmup",
        type=_read(_count),
        default=2,
        help="steps before, whose losses are compared (default: 2)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    return parser


def _read(reader: Any) -> Any:
    """An argparse type that shows what the reader's ValueError says."""

    def read(text: str) -> Any:
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of steps, 1 or more")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Race the layouts; 1 if a rank fails or layouts disagree."""
    options = build_parser().parse_args(argv)
    size = options.size
    more = tuple(shlex.split(options.flags))
    layouts = [
        Layout(ONE),
        Layout(APART, 2, apart=True),
        *(options.layout or map(parse_layout, DEFAULT_LAYOUTS)),
    ]
    layouts = [replace(layout, flags=(*layout.flags, *more)) for layout in layouts]
    try:
        check_names(options.compare_with)
    except ValueError as error:
        print(f"error: --compare-with: {error}", file=sys.stderr)
        return 2
    layouts += [
        replace(layout, name=in_checkout(layout.name, tree), tree=tree)
        for tree in options.compare_with
        for layout in layouts
    ]
    if options.peer:
        if reason := peer().missing(size, options.dtype):
            print(f"error: --peer: {reason}", file=sys.stderr)
            return 2
        layouts += [Layout(PEER, peer=True), Layout(f"{PEER} tp2", 2, peer=True)]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    print(
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, {platform.machine()} "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, load {load}, one "
        "thread a rank"
    )
    for tree in options.compare_with:
        print(f"{checkout_name(tree)}: commit {commit_of(tree)}; this one: {commit_of(ROOT)}")
    print(
        f"{size.name} {options.dtype}: {size.family}, {size.layers} layers, hidden {size.hidden}, "
        f"ffn {size.ffn_size}, {size.heads} heads, sequence {size.seq}, vocabulary {size.vocab}; "
        f"{size.micro_batches} x {size.micro_batch} samples = {size.tokens} tokens per step; "
        f"{options.rounds} rounds",
        flush=True,
    )
    try:
        result = race(layouts, size, options.dtype, options.rounds, options.warmup)
    except WorkerFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    for base in dict.fromkeys(layout.base for layout in layouts):
        if base in result.refused:
            print(f"error: {base}: {result.refused[base]}", file=sys.stderr)
            return 2
    print("\n".join(table(result, layouts, size)))
    for name, reason in result.refused.items():
        print(f"{name} is refused: {reason}")
    if options.json:
        report = {
            "size": asdict(size),
            "dtype": options.dtype,
            "load": load,
            **asdict(result),
            "speed_up": {
                layout.name: statistics.median(result.speed_ups(layout.name, layout.base))
                for layout in layouts
                if layout.name in result.seconds
            },
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
