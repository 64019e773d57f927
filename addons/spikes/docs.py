"""`tools/spikes.py docs`: what an iteration read, the most suspicious first; and when a document is
read.

With --order loss it asks a
checkpoint of the run.
"""

from __future__ import annotations

import dataclasses
import json

from tools.shared.program import complain
from tools.shared.run_data import Reading, find_document, open_run, show_samples

from .no_nan import without_nan
from .options import DocsOptions
from .suspects import Suspect, batch_rows, height, neighbours, suspects, usual


def docs(args: DocsOptions) -> int:
    """The documents that an iteration reads, those first that are least like the others; or the
    iterations that read a document. Exit codes: 0, 2 unreadable."""
    try:
        if args.order == "loss" and (args.doc is not None or args.run is None):
            raise ValueError("--order loss: needs --iteration and a run, whose checkpoints it asks")
        reading = open_run(args.run, args.flags, args.iteration, args.world_size)
        if args.doc is not None:
            shown = find_document(reading, args.doc, args.prefix)
        else:
            ranked, state = _ranked(reading, args)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    if args.doc is not None:
        print(json.dumps(shown)) if args.json else show_samples(shown)
    elif args.json:
        print(
            json.dumps(without_nan([dataclasses.asdict(suspect) for suspect in ranked]), indent=1)
        )
    else:
        print(
            f"iteration {args.iteration} reads {len(ranked)} pieces of documents"
            + (f"; losses in nats per token at {state}" if state else "")
        )
        for suspect in ranked[: args.top]:
            first = f"{suspect.score:5.1f}"
            if state:
                first = "  -  " if suspect.loss is None else f"{suspect.loss:5.2f}"
            print(
                f"{first}  {suspect.line()} (sample {suspect.sample}, rank {suspect.dp_rank}, "
                f"micro-batch {suspect.micro_batch}): {suspect.reason}\n       "
                f"{json.dumps(suspect.head, ensure_ascii=False)}"
            )
    return 0


def _ranked(reading: Reading, args: DocsOptions) -> tuple[list[Suspect], str]:
    """The suspects in the order asked for, and the checkpoint that was."""
    iteration = args.iteration
    assert iteration is not None, "problems() refuses neither --iteration nor --doc"
    read = batch_rows(reading, iteration, args.microbatch, args.dp_rank)
    baseline = usual(reading, neighbours(reading, iteration, iteration))
    if args.run is None or args.order == "suspicion":
        return sorted(suspects(reading, read, baseline), key=lambda suspect: -suspect.score), ""
    # torch, which takes longer to load than all the rest
    from .replay import check_replayable, state_before

    check_replayable(reading)
    state = state_before(args.run, iteration, args.ckpt_step)
    ranked = suspects(reading, read, baseline, state.losses)
    return sorted(ranked, key=lambda suspect: -height(suspect.loss)), state.directory
