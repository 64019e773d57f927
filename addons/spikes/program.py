"""Find loss spikes in the logs of a run, the documents read there, and the flags of a restart that
skips them. See docs/features/spikes.md.

LOG is what a run printed in any --log-format (with whatever else is in it), its --metrics-file or
its --tensorboard-dir; several are read one after the other, as the runs followed each other. RUN is
what --save named, or `--` and the flags of the run.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence

from megatron.analysis.run_reader import RecordedRun, checkpoints, read_run
from megatron.features.registry import READERS
from megatron.features.spikes.detector import LEAST
from tools.shared.program import Command, complain, run_command

from .events import Event, find_events, log_interval, not_judged
from .no_nan import without_nan
from .options import AnalyzeOptions, DocsOptions, ReplayOptions, VerifyOptions
from .picture import draw

NO_SPIKES = 0
SPIKES_FOUND = 10
UNREADABLE = 2


def restart(events: Sequence[Event], directory: str | None, saved: Sequence[int]) -> str:
    """The flags of the run that leaves these events out."""
    start = events[0].start
    skip = "--train-range-to-skip " + " ".join(f"{event.start} {event.end}" for event in events)
    before = [iteration for iteration in saved if iteration < start]
    if directory and before:
        return f"--load {shlex.quote(directory)} --ckpt-step {before[-1]} {skip}"
    if start == 1:
        return f"{skip}    (from the start)"
    if directory is None:
        return f"--load DIR --ckpt-step {start - 1} {skip}    (or any checkpoint before it)"
    return f"{skip}    (from the start: {directory} has no checkpoint before iteration {start})"


def cost(event: Event, run: RecordedRun) -> dict[str, float]:
    """The cost of skipping an event: iterations and, as far as the log says, samples,
    tokens, percent of the run."""
    total = next((r.train_iters for r in reversed(run.records) if r.train_iters), None)
    peak = next(r for r in run.records if r.iteration == event.peak)
    count = event.end - event.start + 1
    figures: dict[str, float] = {"iterations": count}
    if peak.global_batch_size:
        figures["samples"] = count * peak.global_batch_size
        if peak.consumed_samples and "consumed_tokens" in peak.numbers:
            figures["tokens"] = round(
                peak.numbers["consumed_tokens"] / peak.consumed_samples * figures["samples"]
            )
    return figures | ({"percent": 100 * count / total} if total else {})


def described(event: Event, run: RecordedRun, directory: str | None, saved: Sequence[int]) -> str:
    """An event for a reader."""
    size = ", ".join(
        f"{value:.2g} % of the run" if name == "percent" else f"{value:,} {name}"
        for name, value in cost(event, run).items()
    )
    norm = (
        ""
        if event.grad_norm is None
        else f", grad norm {event.grad_norm:.3g} ({event.finding.ratio:.2g} x trend)"
    )
    where = (
        f"iteration {event.first}"
        if event.first == event.last
        else f"iterations {event.first} to {event.last}"
    )
    return (
        f"{event.kind} spike at {where}, worst at {event.peak}: loss {event.loss:.4f} "
        f"({event.finding.excess:+.3f}, {event.finding.loss_z:.1f} sigma){norm}\n  skip "
        f"{event.start} to {event.end} ({size}):\n"
        f"  {restart([event], directory, saved)}"
    )


def analyze(args: AnalyzeOptions) -> int:
    """Find the spikes of a run. Exit codes: 0 none, 10 found, 2 unreadable."""
    try:
        run = read_run(*args.logs, readers=READERS)
        saved = checkpoints(args.load)
        events = find_events(run.records)
        if args.plot:
            draw(args.plot, run, events, saved)
    except ValueError as error:
        complain(error)
        return UNREADABLE
    interval = log_interval(run.records)
    blind = not_judged(run.records)
    if args.json:
        rows = [
            {
                **dataclasses.asdict(e),
                "cost": cost(e, run),
                "restart": restart([e], args.load, saved),
            }
            for e in events
        ]
        report = {
            "joins": list(run.joins),
            "log_interval": interval,
            "not_judged": blind,
            "events": rows,
        }
        if events:
            report["restart"] = restart(events, args.load, saved)
        print(json.dumps(without_nan(report), indent=1))
        return SPIKES_FOUND if events else NO_SPIKES
    trained = [r for r in run.records if r.trained]
    print(
        f"{len(trained)} records of iterations {run.records[0].iteration} to "
        f"{run.records[-1].iteration}"
        + (
            f", one every {interval}: events are localised to +-{interval} iterations"
            if interval > 1
            else ""
        )
        + (f"; restarted at {', '.join(map(str, run.joins))}" if run.joins else "")
    )
    if blind:
        shown = ", ".join(f"{first} to {last}" for first, last in blind)
        print(
            f"not judged: iterations {shown} (a value is compared with at least {LEAST} before it)"
        )
    for event in events:
        print(described(event, run, args.load, saved))
    if len(events) > 1:
        print(f"all {len(events)} in one restart:\n  {restart(events, args.load, saved)}")
    if not events:
        print("no spike")
    return SPIKES_FOUND if events else NO_SPIKES


def docs(options: DocsOptions) -> int:
    """See addons/spikes/docs.py."""
    from . import docs

    return docs.docs(options)


def replay(options: ReplayOptions) -> int:
    """See addons/spikes/replay.py, which loads torch."""
    from . import replay

    return replay.replay(options)


def verify(options: VerifyOptions) -> int:
    """See addons/spikes/verify.py, which loads torch."""
    from . import verify

    return verify.verify(options)


COMMANDS = {
    "analyze": Command(
        "find the loss spikes in logs, and print the flags of a restart that skips them; exit "
        "code 10 if there are any",
        AnalyzeOptions,
        analyze,
    ),
    "docs": Command(
        "list the documents that an iteration reads, the most unusual first; or the iterations "
        "that read a document",
        DocsOptions,
        docs,
        DocsOptions.problems,
    ),
    "replay": Command(
        "compute the losses of some iterations' samples at a checkpoint (forward only), and show "
        "which stand out and why",
        ReplayOptions,
        replay,
        ReplayOptions.problems,
    ),
    "verify": Command(
        "check by its data ledger that a run skipped what it was asked to skip, and nothing else; "
        "exit code 1 if it did not",
        VerifyOptions,
        verify,
        VerifyOptions.problems,
    ),
}


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done or nothing found, 10 spikes found, 1 found wrong by `verify`, 2 a wrong
    command line or what cannot be read."""
    return run_command(COMMANDS, argv, prog="spikes.py", description=__doc__ or "")
