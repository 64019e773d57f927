#!/usr/bin/env python
"""Race layouts of the same training step on the CPU: ranks of one thread each against one rank, as gloo connects them.

A layout is a number of ranks and flags of pretrain_gpt.py; its ranks are processes that this program starts and that run
the whole iteration (data, step, log line). The layouts take turns, one step each, the order moving on every round; ranks
that have no turn sleep. Before any clock runs the losses of all layouts must agree. A speed-up is the median over the
rounds of (seconds of one rank / seconds of the layout) in the same round, with its smallest and largest value: the noise
of the machine. "two apart" are two runs of one rank at the same time that have nothing to say to each other: what two cores
of this machine can give at best. --peer adds megatron-core's GPT of the same shape, on one rank and tensor-parallel on two,
its speed-up being against its own one rank; that needs megatron-core, the rest torch and numpy only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import platform
import shlex
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as pretrain_gpt.py does
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch  # noqa: E402
from contestants import Ours  # noqa: E402
from sizes import Size, parse_size  # noqa: E402

ONE, APART, PEER = "one rank", "two apart", "megatron-core"
DEFAULT_SIZE = "peers:layers=4,hidden=256,heads=4,ffn=688,seq=256,micro_batch=4,micro_batches=4,vocab=50304,family=llama"
TP, SP, PP = "--tensor-model-parallel-size", "--sequence-parallel", "--pipeline-model-parallel-size"
DEFAULT_LAYOUTS = (f"tp2=2 {TP} 2", f"tp2+sp=2 {TP} 2 {SP}", "dp2=2", f"pp2=2 {PP} 2 --decoder-last-pipeline-num-layers 1")
# Speed-ups to reach on two cores: the best of megatron-core and picotron on this shape.
GOALS = {"tp2": 1.85, "dp2": 1.80, "pp2": 1.15}
TOLERANCE = 1e-5       # of losses in the warm-up steps, relative
SECONDS = 300.0        # of silence after which a rank counts as hung


@dataclass(frozen=True)
class Layout:
    """One way to share the work: `ranks` processes with these flags, or (`apart`) so many runs of one rank."""
    name: str
    ranks: int = 1
    flags: tuple[str, ...] = ()
    apart: bool = False
    peer: bool = False

    @property
    def base(self) -> str:
        """The layout of one rank that its speed-up is against."""
        return PEER if self.peer else ONE


class Refused(ValueError):
    """The command line of a layout is not accepted; the text says why."""


class RankFailed(RuntimeError):
    """A rank raised, died or hung; the text says how."""


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


def peer() -> Any:
    """The module of megatron-core's contestant, whose import takes seconds that only --peer shall cost."""
    return importlib.import_module("peer")


def rank_main(rank: int, layout: Layout, size: Size, dtype: str, port: int, pipe: Connection) -> None:
    """The body of one rank: build, then one step and its (seconds, loss) for each message, until None comes."""
    if not layout.apart:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(layout.ranks), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(port))
    torch.set_num_threads(1)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runner = (peer().MegatronCore(size, os.environ) if layout.peer else
                      Ours(size, dtype, "cpu", layout.flags, os.environ))
        pipe.send(("ready", sum(p.numel() for p in runner.parameters())))
        while pipe.recv() is not None:
            start = time.perf_counter()
            loss = runner.step()
            pipe.send(("step", (time.perf_counter() - start, loss)))
    except SystemExit:
        pipe.send(("refused", said.getvalue()))
    except BaseException:
        pipe.send(("failed", f"{said.getvalue()}{traceback.format_exc()}"))
    pipe.poll(None)        # stay: a neighbour may still talk to this rank


class Ranks:
    """The processes of one layout. Raises Refused or RankFailed wherever one of them does not answer as it should."""

    def __init__(self, layout: Layout, size: Size, dtype: str):
        self.layout = layout
        port = free_port()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "megatron.training.loop"])
        self._pipes, self._processes = [], []
        for rank in range(layout.ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=rank_main, daemon=True, args=(rank, layout, size, dtype, port, theirs))
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        try:
            self.parameters = max(self._answers())
        except BaseException:
            self.end()
            raise

    def _answers(self) -> list[Any]:
        """What each rank says, once all have spoken."""
        found: dict[int, Any] = {}
        refusals: list[str] = []
        while len(found) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = wait(list(waiting), SECONDS)
            if not ready:
                raise RankFailed(f"{self.layout.name}: nothing heard of its ranks for {SECONDS:.0f} s")
            for pipe in ready:
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise RankFailed(f"{self.layout.name}: rank {waiting[pipe]} died") from None
                if kind == "failed":
                    raise RankFailed(f"{self.layout.name}: rank {waiting[pipe]} failed:\n{value}")
                if kind == "refused":
                    refusals.append(value.strip())
                found[waiting[pipe]] = value
        if refusals:
            raise Refused(" ".join(text.removeprefix("error: ") for text in filter(None, refusals)))
        return [found[rank] for rank in range(len(self._pipes))]

    def step(self) -> tuple[float, float]:
        """(seconds of the slowest rank, for one step's tokens, loss) of one step."""
        for pipe in self._pipes:
            pipe.send("step")
        answers = self._answers()
        seconds = max(seconds for seconds, _ in answers)
        return seconds / self.layout.ranks if self.layout.apart else seconds, answers[0][1]

    def end(self) -> None:
        """Stop the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@dataclass
class Race:
    """Seconds of every timed step by layout, losses of all steps, and layouts that were refused, with the reason."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def speed_ups(self, name: str, base: str = ONE) -> list[float]:
        """How many times as fast as one rank, round by round."""
        return [one / mine for one, mine in zip(self.seconds[base], self.seconds[name], strict=True)]


def race(layouts: Sequence[Layout], size: Size, dtype: str, rounds: int, warmup: int) -> Race:
    """Start everybody, compare the losses of the warm-up steps, then take turns. Raises RankFailed."""
    result, running = Race(), {}
    try:
        for layout in layouts:
            try:
                running[layout.name] = Ranks(layout, size, dtype)
                result.parameters[layout.name] = running[layout.name].parameters
            except Refused as refusal:
                result.refused[layout.name] = str(refusal)
        for step in range(warmup):
            losses = {name: ranks.step()[1] for name, ranks in running.items()}
            for name in (layout.name for layout in layouts if layout.name in losses and not layout.peer):
                loss = losses[name]
                if not abs(loss - losses[ONE]) <= TOLERANCE * abs(losses[ONE]):
                    raise RankFailed(f"{name}: the loss of step {step + 1} is {loss:.6f}, that of one rank "
                                     f"{losses[ONE]:.6f}: they do not train the same model, so times say nothing")
        names = list(running)
        for done in range(rounds):
            for name in names[done % len(names):] + names[:done % len(names)]:
                seconds, loss = running[name].step()
                result.seconds.setdefault(name, []).append(seconds)
                result.losses.setdefault(name, []).append(loss)
    finally:
        for ranks in running.values():
            ranks.end()
    return result


def table(result: Race, layouts: Sequence[Layout], size: Size) -> list[str]:
    """One row a layout: times, tokens in a second, speed-up with its spread, what a goal says."""
    rows = [("", "ranks", "step ms", "best ms", "tok/s", "speed-up", "smallest", "largest", "goal")]
    for layout in layouts:
        if layout.name in result.refused:
            rows.append((layout.name, str(layout.ranks), "-", "-", "-", "-", "-", "-", "refused, see below"))
            continue
        seconds, ups = result.seconds[layout.name], result.speed_ups(layout.name, layout.base)
        middle, goal = statistics.median(ups), GOALS.get(layout.name)
        verdict = "" if goal is None else f"{goal:.2f} {'reached' if middle >= goal else 'missed'}"
        rows.append((layout.name, str(layout.ranks), f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * min(seconds):.1f}",
                     f"{size.tokens / statistics.median(seconds):.0f}", f"{middle:.2f}", f"{min(ups):.2f}",
                     f"{max(ups):.2f}", verdict))
    width = [max(len(row[i]) for row in rows[:-1] or rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width[i]) if i in (0, 8) else cell.rjust(width[i])
                             for i, cell in enumerate(row)).rstrip() for row in rows]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(usage="%(prog)s [OPTION ...]", description=__doc__, allow_abbrev=False)
    parser.add_argument("--layout", action="append", type=_read(parse_layout), metavar="'NAME=RANKS FLAGS...'",
                        help="a layout besides one rank and two apart; may be repeated (default: tp2, tp2+sp, dp2, pp2)")
    parser.add_argument("--size", type=_read(parse_size), default=DEFAULT_SIZE, metavar="SIZE",
                        help="as of train_step.py (default: %(default)s)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--flags", default="", metavar="'FLAGS...'", help="flags of pretrain_gpt.py for every layout")
    parser.add_argument("--peer", action="store_true", help="megatron-core too (fp32 and family=llama only)")
    parser.add_argument("--rounds", type=_read(_count), default=5, help="timed steps of each layout (default: 5)")
    parser.add_argument("--warmup", type=_read(_count), default=2, help="steps before, whose losses are compared "
                                                                        "(default: 2)")
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
    size, more = options.size, tuple(shlex.split(options.flags))
    layouts = [Layout(ONE), Layout(APART, 2, apart=True), *(options.layout or map(parse_layout, DEFAULT_LAYOUTS))]
    layouts = [replace(layout, flags=(*layout.flags, *more)) for layout in layouts]
    if options.peer:
        if reason := peer().missing(size, options.dtype):
            print(f"error: --peer: {reason}", file=sys.stderr)
            return 2
        layouts += [Layout(PEER, peer=True), Layout(f"{PEER} tp2", 2, peer=True)]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, {platform.machine()} "
          f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, load {load}, one thread a rank")
    print(f"{size.name} {options.dtype}: {size.family}, {size.layers} layers, hidden {size.hidden}, ffn {size.ffn_size}, "
          f"{size.heads} heads, sequence {size.seq}, vocabulary {size.vocab}; {size.micro_batches} x {size.micro_batch} "
          f"samples = {size.tokens} tokens a step; {options.rounds} rounds", flush=True)
    try:
        result = race(layouts, size, options.dtype, options.rounds, options.warmup)
    except RankFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    if ONE in result.refused:
        print(f"error: {result.refused[ONE]}", file=sys.stderr)
        return 2
    print("\n".join(table(result, layouts, size)))
    for name, reason in result.refused.items():
        print(f"{name} is refused: {reason}")
    if options.json:
        report = {"size": asdict(size), "dtype": options.dtype, "load": load, **asdict(result),
                  "speed_up": {layout.name: statistics.median(result.speed_ups(layout.name, layout.base))
                               for layout in layouts if layout.name in result.seconds}}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
