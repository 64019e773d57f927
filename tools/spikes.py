#!/usr/bin/env python
"""Loss spikes after the fact: where they are in a log, which documents were read there, and the flags of a restart.

    python tools/spikes.py analyze LOG... [--load DIR] [--plot FILE.svg]
    python tools/spikes.py docs --iteration N RUN
    python tools/spikes.py docs --iteration N -- FLAGS OF THE RUN

LOG is what a run printed (Megatron's lines or AuroraGPT's, with whatever else is in it) or its --metrics-file; several are
read one after the other, as the runs followed each other. RUN is what --save named.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.data import suspicion  # noqa: E402
from megatron.data.whereabouts import pieces  # noqa: E402
from megatron.training import log_reader  # noqa: E402
from megatron.training.log_reader import History, Record  # noqa: E402
from megatron.training.spike_events import Event, find_events, log_interval  # noqa: E402
from tools import inspect_data  # noqa: E402

HEAD = 16       # tokens shown
NONE, FOUND, UNREADABLE = 0, 10, 2
_DIRECTORY = re.compile(r"iter_(\d{7,})")


class Unreadable(ValueError):
    """What was given cannot be read; its text says what and why."""


def read(paths: Sequence[str]) -> History:
    """The history of these files. Raises Unreadable."""
    records: list[Record] = []
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError as error:
            raise Unreadable(f"{path}: cannot be read ({error.strerror or error})") from None
        try:
            is_metrics = text.lstrip().startswith('{"')
            found = list(log_reader.read_metrics(text.splitlines(), path)) if is_metrics else log_reader.read_text(text)
        except ValueError as error:
            raise Unreadable(str(error)) from None
        if not found:
            raise Unreadable(f"{path}: no iteration line of a training log is in it ('iteration N/M | ...')")
        records += found
    return log_reader.joined(records)


def checkpoints(directory: str | None) -> list[int]:
    """The iterations there are checkpoints of. Raises Unreadable."""
    if directory is None:
        return []
    try:
        names = [path.name for path in Path(directory).iterdir()]
    except OSError as error:
        raise Unreadable(f"--load {directory}: cannot be read ({error.strerror or error})") from None
    return sorted(int(match[1]) for name in names if (match := _DIRECTORY.fullmatch(name)))


def restart(event: Event, directory: str | None, saved: Sequence[int]) -> str:
    """The flags of the run that leaves the event out."""
    before = [iteration for iteration in saved if iteration < event.start]
    skip = f"--train-range-to-skip {event.start} {event.end}"
    if before:
        return f"--load {directory} --ckpt-step {before[-1]} {skip}"
    if directory is None:
        return f"--load DIR --ckpt-step {event.start - 1} {skip}    (or any checkpoint before it)"
    return f"{skip}    (from the start: {directory} has no checkpoint before iteration {event.start})"


def described(event: Event, history: History, directory: str | None, saved: Sequence[int]) -> str:
    """An event for a reader."""
    total = next((r.train_iters for r in reversed(history.records) if r.train_iters), None)
    at = next(r for r in history.records if r.iteration == event.peak)
    count = event.end - event.start + 1
    size = f"{count} iterations"
    if at.global_batch_size:
        size += f", {count * at.global_batch_size:,} samples"
        if at.consumed_samples and "consumed_tokens" in at.numbers:
            tokens = at.numbers["consumed_tokens"] / at.consumed_samples * at.global_batch_size * count
            size += f", {tokens:,.0f} tokens"
    if total:
        size += f", {100 * count / total:.2g} % of the run"
    norm = "" if event.grad_norm is None else f", grad norm {event.grad_norm:.3g} ({event.finding.ratio:.2g} x trend)"
    where = f"iteration {event.first}" if event.first == event.last else f"iterations {event.first} to {event.last}"
    return (f"{event.kind} spike at {where}, worst at {event.peak}: loss {event.loss:.4f} ({event.finding.excess:+.3f}, "
            f"{event.finding.loss_z:.1f} sigma){norm}\n  leave out {event.start} to {event.end} ({size}):\n"
            f"  {restart(event, directory, saved)}")


def analyze(argv: Sequence[str]) -> int:
    """Find the spikes of a run. Exit codes: 0 none, 10 found, 2 unreadable."""
    parser = argparse.ArgumentParser(prog="spikes.py analyze", description=analyze.__doc__, allow_abbrev=False)
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log or metrics file; several of one run in their order")
    parser.add_argument("--load", metavar="DIR", help="the run's checkpoints, to name the one to restart from")
    parser.add_argument("--json", action="store_true", help="events as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw loss, gradient norm and events (.svg, .png or .pdf)")
    args = parser.parse_args(argv)
    try:
        history, saved = read(args.logs), checkpoints(args.load)
        events = find_events(history.records)
        if args.plot:
            draw(args.plot, history, events, saved)
    except Unreadable as error:
        print(f"error: {error}", file=sys.stderr)
        return UNREADABLE
    if args.json:
        rows = [{**dataclasses.asdict(e), "restart": restart(e, args.load, saved)} for e in events]
        print(json.dumps(_without_nan({"joins": history.joins, "events": rows}), indent=1))
        return FOUND if events else NONE
    trained = [r for r in history.records if r.trained]
    interval = log_interval(history.records)
    print(f"{len(trained)} records of iterations {history.records[0].iteration} to {history.records[-1].iteration}"
          + (f", one every {interval}: events are localised to {interval} iterations" if interval > 1 else "")
          + (f"; restarted at {', '.join(map(str, history.joins))}" if history.joins else ""))
    for event in events:
        print(described(event, history, args.load, saved))
    if not events:
        print("no spike")
    return FOUND if events else NONE


def _without_nan(value: object) -> object:
    """JSON has no NaN: such numbers are written as strings."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def draw(path: str, history: History, events: Sequence[Event], saved: Sequence[int]) -> None:
    """Draw the run. Raises Unreadable where that cannot be."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unreadable(f"--plot {path}: needs matplotlib; pip install '.[plot]'") from None
    trained = [r for r in history.records if r.trained]
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    x = [r.iteration for r in trained]
    top.plot(x, [r.loss for r in trained], color="#1f4e79", linewidth=1)
    top.set_ylabel("loss (nats a token)")
    with_norm = [r for r in trained if r.grad_norm is not None]
    bottom.semilogy([r.iteration for r in with_norm], [r.grad_norm for r in with_norm], color="#666666", linewidth=1)
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("iteration")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        for number, event in enumerate(events):
            axes.axvspan(event.start - 0.5, event.end + 0.5, color="#d62728", alpha=0.25, linewidth=0,
                         label=None if number or axes is bottom else "leave out")
        for number, (first, last) in enumerate(_skipped(history.records)):
            axes.axvspan(first - 0.5, last + 0.5, color="#2ca02c", alpha=0.2, linewidth=0,
                         label=None if number or axes is bottom else "skipped")
    for event in events:
        top.annotate(f"{event.peak}", (event.peak, event.loss), textcoords="offset points", xytext=(4, 4), fontsize=8)
    if saved:
        bottom.plot(saved, [0.02] * len(saved), "^", color="#2ca02c", markersize=5, transform=bottom.get_xaxis_transform(),
                    label="checkpoint")
        bottom.legend(loc="upper right", frameon=False, fontsize=8)
    if top.get_legend_handles_labels()[0]:
        top.legend(loc="upper right", frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise Unreadable(f"--plot {path}: cannot be written ({error})") from None


def _skipped(records: Sequence[Record]) -> list[tuple[int, int]]:
    """The bands of iterations that were skipped by wish."""
    bands: list[tuple[int, int]] = []
    for r in records:
        if r.trained or not (r.user_skipped or r.skipped):
            continue
        count = max(1, r.user_skipped)
        if bands and bands[-1][1] == r.iteration - count:
            bands[-1] = (bands[-1][0], r.iteration)
        else:
            bands.append((r.iteration - count + 1, r.iteration))
    return bands


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A run of tokens that an iteration reads, and how it stands out. `bytes` are where it lies in `<dataset>.bin`."""

    score: float
    reason: str
    dataset: str
    document: int
    offset: int
    tokens: int
    bytes: tuple[int, int] | None
    sample: int
    dp_rank: int
    micro_batch: int
    head: str


def suspects(reading: inspect_data.Reading, iteration: int) -> list[Suspect]:
    """The pieces of documents that an iteration reads, the most suspicious first."""
    found, measures = [], []
    for sample, dp_rank, micro_batch in reading.batch(iteration, reading.samplers()):
        tokens, at = reading.tokens(sample), 0
        for piece in pieces(reading.dataset, sample):
            ids = tokens[at:at + piece.length]
            at += piece.length
            known = bool(len(ids)) and 0 <= int(ids.min()) and int(ids.max()) < reading.tokenizer.vocab_size
            text = reading.tokenizer.detokenize(ids.tolist()) if known else None
            measures.append(suspicion.measure(ids, text))
            place = None if piece.first_byte is None else (piece.first_byte, piece.end_byte)
            head = str(ids[:HEAD].tolist()) if text is None else text[:6 * HEAD]
            found.append((piece, place, sample, dp_rank, micro_batch, head))
    ranked = [Suspect(s.score, s.reason, piece.prefix, piece.document, piece.offset, piece.length, place, *rest)
              for s, (piece, place, *rest) in zip(suspicion.rank(measures), found, strict=True)]
    return sorted(ranked, key=lambda one: -one.score)


def docs(argv: Sequence[str]) -> int:
    """The documents that an iteration reads, those first that are least like the others. Exit codes: 0, 2 unreadable."""
    words = list(argv)
    flags = words[words.index("--") + 1:] if "--" in words else None
    parser = argparse.ArgumentParser(prog="spikes.py docs", description=docs.__doc__, allow_abbrev=False)
    parser.add_argument("run", nargs="?", help="directory of a run (--save), or an iter_XXXXXXX in it")
    parser.add_argument("--iteration", type=int, required=True, help="as on its log line")
    parser.add_argument("--world-size", type=int, help="number of ranks (default: the run's; with flags: 1)")
    parser.add_argument("--top", type=int, default=10, help="so many documents (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="all of them, as JSON")
    args = parser.parse_args(words[:words.index("--")] if flags is not None else words)
    try:
        with contextlib.redirect_stdout(io.StringIO()):     # what training would log of its data
            reading = inspect_data.open_run(args, flags, args.iteration)
            if not 1 <= args.iteration <= reading.plan.train_iters:
                raise ValueError(f"--iteration {args.iteration}: the run has the iterations 1 to {reading.plan.train_iters}")
            found = suspects(reading, args.iteration)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return UNREADABLE
    if args.json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
        return 0
    print(f"iteration {args.iteration} reads {len(found)} pieces of documents")
    for one in found[:args.top]:
        print(f"{one.score:5.1f}  {one.dataset} document {one.document}, tokens {one.offset} .. {one.offset + one.tokens}"
              f"{'' if one.bytes is None else f', bytes {one.bytes[0]} .. {one.bytes[1]}'} (sample {one.sample}, rank "
              f"{one.dp_rank}, micro-batch {one.micro_batch}): {one.reason}")
        print(f"       {json.dumps(one.head, ensure_ascii=False)}")
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done or nothing found, 10 spikes found, 2 a wrong command line or what cannot be read."""
    commands = {"analyze": analyze, "docs": docs}
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    help_wanted = argv[:1] in (["-h"], ["--help"])
    print(__doc__, end="", file=sys.stdout if help_wanted else sys.stderr)
    return 0 if help_wanted else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
