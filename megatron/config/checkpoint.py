"""What is saved, when, and what is loaded. Knows no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = arg(None, help="directory to save checkpoints in")
    save_interval: int | None = arg(
        None,
        alias=("--persistent-save-interval",),
        help="iterations between checkpoints, needed with --save",
    )
    load: str | None = arg(None, help="directory (or iter_XXXXXXX inside one) to resume from")
    ckpt_step: int | None = arg(None, help="load this iteration instead of the newest", dump=False)
    finetune: bool = arg(False, help="load the weights alone and start from iteration 0")
    no_load_optim: bool = arg(False, help="do not load optimizer and scheduler")
    no_load_rng: bool = arg(
        False,
        help="do not load random state (there is none to load: masks are a function of "
        "seed and iteration)",
    )
    no_save_optim: bool = arg(False, help="do not save the optimizer")
    no_save_rng: bool = arg(False, help="do not save random state (there is none)")
    use_checkpoint_args: bool = arg(
        False, help="take the architecture and the tokenizer from the checkpoint's args"
    )
    exit_on_missing_checkpoint: bool = arg(
        False, help="exit when --load finds nothing, instead of a random start"
    )
    staging_dir: str = arg(
        "staging",
        help="with --save, --load or --snapshot-dir in an object store (s3://bucket/path): the "
        "directory of a local disk (of one that all ranks share) in which checkpoints are written "
        "and fetched; a process uploads them",
        dump=False,
    )
    async_save: bool = arg(
        False,
        help="training goes on while another process writes the checkpoint from a copy in shared "
        "memory, which takes as much memory as a rank saves",
        dump=False,
    )
    keep_last: int | None = arg(
        None, help="after each save, remove checkpoints but the N newest", dump=False
    )
    keep_every: int | None = arg(
        None, help="with --keep-last: multiples of N iterations are never removed", dump=False
    )
    snapshot_interval: int | None = arg(
        None,
        help="iterations between snapshots, of which the last two are kept; a resume "
        "takes the newest of snapshots and checkpoints",
        dump=False,
    )
    snapshot_dir: str | None = arg(
        None,
        help="directory of the two snapshots, or their place in an object store "
        "(s3://bucket/path); default: SAVE/snapshots",
        dump=False,
    )
    control_file: str | None = arg(
        None,
        help="file that is read in each step: 'save' or 'stop' (save, and leave) now, or "
        "-N or N: the same at iteration N; it is set to 0 when that is done",
        dump=False,
    )


def is_url(path: str | None) -> bool:
    """Does this name an object store, and no directory?"""
    return path is not None and re.match(r"[a-z][a-z0-9+.-]+://", path) is not None


def staged(c: CheckpointConfig) -> CheckpointConfig:
    """The same with directories below --staging-dir in the place of URLs."""

    def local(path: str | None) -> str | None:
        return (
            os.path.join(c.staging_dir, *re.split(r"[:/]+", path.strip("/")))
            if is_url(path)
            else path
        )

    return replace(c, save=local(c.save), load=local(c.load), snapshot_dir=local(c.snapshot_dir))
