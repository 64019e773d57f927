"""Flags of saving and loading checkpoints."""

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from megatron.arguments import Needs, arg
from megatron.config.run_directory import slots


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Save and load checkpoints."""

    save: str | None = arg(None, per_run=True)
    """directory to save checkpoints in"""

    overwrite_newer_checkpoints: bool = arg(False, per_run=True, needs="save")
    """where --save holds checkpoints of another history, rename them to iter_XXXXXXX.other-history,
    which nothing loads, instead of an error"""

    save_interval: int | None = arg(
        None, minimum=1, per_run=True, needs="save", alias=("--persistent-save-interval",)
    )
    """iterations between checkpoints; without it one is saved at the end"""

    load: str | None = arg(None, per_run=True)
    """directory (or iter_XXXXXXX inside one) to resume from"""

    ckpt_step: int | None = arg(None, requires="load", minimum=0, per_run=True)
    """load the checkpoint of this iteration instead of the newest"""

    finetune: bool = arg(False, per_run=True, needs="load")
    """load only the weights and start from iteration 0"""

    no_load_optim: bool = arg(False, needs="load")
    """do not load optimizer and scheduler state"""

    no_load_rng: bool = arg(
        False,
        no_effect="there is no random state to load: masks follow from seed, iteration and rank",
    )
    """accepted for compatibility: there is no RNG state to load (dropout masks depend on seed,
    iteration and rank)"""

    no_save_optim: bool = arg(False, needs="save")
    """do not save optimizer state"""

    no_save_rng: bool = arg(
        False,
        no_effect="there is no random state to save: masks follow from seed, iteration and rank",
    )
    """accepted for compatibility: there is no RNG state to save"""

    use_checkpoint_args: bool = arg(False, requires="load", per_run=True)
    """take architecture and tokenizer flags from the checkpoint"""

    exit_on_missing_checkpoint: bool = arg(False, needs="load")
    """exit if --load has no checkpoint, instead of starting from initial values"""

    staging_dir: str = arg("staging", per_run=True)
    """with --save, --load or --snapshot-dir in an object store (s3://bucket/path): local directory
    in which checkpoints are written before upload and to which they are downloaded; a directory
    that all ranks share"""

    async_save: bool = arg(False, per_run=True, needs="save")
    """asynchronous checkpointing: a background process writes the checkpoint from a copy in shared
    memory, as large as the rank's part of the checkpoint"""

    keep_last: int | None = arg(None, minimum=1, needs="save")
    """after each save, remove all but the N newest checkpoints"""

    keep_every: int | None = arg(None, minimum=1, needs="keep_last")
    """with --keep-last: never remove checkpoints of iterations that are multiples of N"""

    snapshot_interval: int | None = arg(None, minimum=1, needs="save")
    """iterations between snapshots, of which the last two are kept; a resume loads the newest
    snapshot or checkpoint"""

    snapshot_dir: str | None = arg(
        None, needs=Needs("--save or --load", lambda v: v["save"] or v["load"])
    )
    """directory or object-store URL (s3://bucket/path) of the two snapshots (default:
    SAVE/snapshots)"""

    non_persistent_ckpt_type: str = arg("global", choices=("global", "local"))
    """local: parts on the nodes' disks"""

    non_persistent_local_ckpt_dir: str | None = arg(
        None, needs=("non_persistent_ckpt_type", "local")
    )
    """directory of local copies on each node; %n is its number"""

    replication: bool = arg(False, requires=("non_persistent_ckpt_type", "local"))
    """mirror local copies on other ranks"""

    replication_jump: int | None = arg(None, needs=("non_persistent_ckpt_type", "local"), minimum=1)
    """mirrors are this many ranks apart (default: ranks of a node)"""

    replication_factor: int = arg(2, needs=("non_persistent_ckpt_type", "local"), minimum=1)
    """ranks that hold a rank's part, with it"""

    control_file: str | None = arg(None)
    """file read in each iteration: 'save' or 'stop' (save and exit) now, or N or -N: save or stop
    at iteration N; reset to 0 when done"""

    def slots_of(self, root: str | Path) -> list[Path]:
        """The two run directories with the snapshots of the run directory `root`."""
        return slots(self.snapshot_dir or Path(root, "snapshots"))


def is_url(path: str | None) -> TypeGuard[str]:
    """Does this name an object store, and no directory?"""
    return path is not None and re.match(r"[a-z][a-z0-9+.-]+://", path) is not None


def staged_name(url: str) -> str:
    """The name of a run directory in an object store below --staging-dir."""
    return "/".join(re.split(r"[:/]+", url.strip("/")))


def staged(c: CheckpointConfig) -> CheckpointConfig:
    """The same with directories below --staging-dir in the place of URLs."""

    def local(path: str | None) -> str | None:
        return os.path.join(c.staging_dir, staged_name(path)) if is_url(path) else path

    return replace(c, save=local(c.save), load=local(c.load), snapshot_dir=local(c.snapshot_dir))


@dataclass
class FromCheckpoint:
    """What --use-checkpoint-args brings. `lost`: flags of files that the checkpoint names and that
    are not there."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    # those of the values that differ from their defaults
    changed: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
