"""Rules of --load: is there a checkpoint, and of this suite?"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator

from megatron.config.checkpoint import CheckpointConfig, is_url
from megatron.config.checks.listing import listing
from megatron.config.run_directory import FINAL, MANIFEST, TRACKER
from megatron.config.tree import FeatureFlags


def problems(load: str, c: CheckpointConfig, groups: Iterable[FeatureFlags]) -> Iterator[str]:
    """What is wrong with the directory of --load."""
    if not os.path.lexists(load) and not _same_path(load, c.save):
        yield (
            f"--load {load}: there is no such directory; give one with checkpoints, give --save "
            "the same directory (then a first run starts from random weights), or omit --load "
            "[checkpoint-directory-missing]"
        )
        return
    if os.path.exists(load) and not os.path.isdir(load):
        yield (
            f"--load {load}: is a file; give the directory that holds the iter_XXXXXXX "
            "directories [path-is-a-file]"
        )
        return
    if problem := of_another_suite(load, groups):
        yield problem
        return
    iterations = sorted(int(m[1]) for n in listing(load) if (m := FINAL.fullmatch(n)))
    if c.ckpt_step is not None and not os.path.isdir(os.path.join(load, f"iter_{c.ckpt_step:07d}")):
        have = (
            f"there are {', '.join(map(str, iterations[-6:]))}" if iterations else "there is none"
        )
        yield (
            f"--ckpt-step {c.ckpt_step}: {load} has no checkpoint of that iteration; {have} "
            "[checkpoint-step-missing]"
        )
    elif not _may_hold_checkpoint(load, c):
        if c.exit_on_missing_checkpoint:
            yield (
                f"--load {load}: no checkpoint there, and --exit-on-missing-checkpoint is given; "
                "omit that to start from random weights [checkpoint-missing]"
            )
        elif names := _not_of_first_run(load, c):
            yield (
                f"--load {load}: holds {', '.join(names[:4])}{', ...' * (len(names) > 4)} and no "
                "complete checkpoint; give the directory that --save named, or neither --load nor "
                "this --save to start from random weights [no-good-checkpoint]"
            )


def _may_hold_checkpoint(load: str, c: CheckpointConfig) -> bool:
    """Whether `load` has a complete checkpoint or snapshot, or one that is elsewhere."""
    if is_url(c.snapshot_dir) or c.non_persistent_ckpt_type == "local":
        return True
    aside = re.compile(r"\.iter_\d{7,}\.old-[0-9a-f]{8}")
    folders = [load]
    folders += [os.path.join(load, n) for n in listing(load) if aside.fullmatch(n)]
    folders += [
        os.path.join(root, name)
        for root in (load, *map(str, c.slots_of(load)))
        for name in listing(root)
        if FINAL.fullmatch(name)
    ]
    return any(os.path.isfile(os.path.join(folder, MANIFEST)) for folder in folders)


def _not_of_first_run(load: str, c: CheckpointConfig) -> list[str]:
    """What `load` holds and no run leaves that ended before its first checkpoint."""
    names = listing(load)
    if not _same_path(load, c.save):
        return names
    return [n for n in names if n == TRACKER or FINAL.fullmatch(n)]


def _same_path(first: str, second: str | None) -> bool:
    return second is not None and os.path.realpath(first) == os.path.realpath(second)


def of_another_suite(load: str, groups: Iterable[FeatureFlags | type[FeatureFlags]]) -> str | None:
    """The problem of a --load that only the converter can read: without this, training would find
    no checkpoint and start from random weights. `groups`: of features, or their classes."""
    command = _converter_command(load, groups)
    return command and (
        f"--load {load}: not a checkpoint of this suite; convert it: python "
        f"tools/convert_checkpoint.py {command}, then give --load DIR "
        "[checkpoint-of-another-suite]"
    )


def _converter_command(
    load: str, groups: Iterable[FeatureFlags | type[FeatureFlags]]
) -> str | None:
    from megatron.config.load_order import newest

    first = newest(load)
    if first is None and os.path.isfile(os.path.join(load, "config.json")):
        return f"hf-import {shlex.quote(load)} DIR"
    folders = [str(first)] if first else [os.path.join(load, "release"), load]
    names = [n for folder in folders for n in listing(folder)]
    if any(re.fullmatch(r"mp_rank_\d+(_\d+)*|\.metadata|metadata\.json", n) for n in names):
        return f"megatron-import {shlex.quote(load)} DIR"
    if "latest" in listing(load) or any(n.endswith("_model_states.pt") for n in listing(load)):
        return f"deepspeed-import {shlex.quote(load)} DIR"
    if first is None:
        return next(filter(None, (group.converter_command(load) for group in groups)), None)
    return None
