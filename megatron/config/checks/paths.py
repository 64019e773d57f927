"""Rules about data, tokenizer and files: which flags name them, and what is missing on this
machine. Reads no content but lists of paths.
"""

import errno
import math
import os
import re
from collections.abc import Iterator

from megatron import launcher, object_stores
from megatron.config.checkpoint import CheckpointConfig, is_url, staged, staged_name
from megatron.config.checks import tokenizer as check_tokenizer
from megatron.config.checks.listing import as_number
from megatron.config.data import DataConfig
from megatron.config.tree import Config
from megatron.small_files import UnsafeName, safe_name

SPLITS = ("train", "valid", "test")


def problems(config: Config) -> list[str]:
    """What is wrong with the flags themselves, whatever files there are."""
    d = config.data
    lines = [*_unsafe_urls(config.checkpoint), *_sources(d)]
    if not has_files(d):
        return [*lines, *_split(config), *check_tokenizer.flag_problems(d)]
    from megatron.config.checks import data_paths

    lines += data_paths.validation(d)
    return [*lines, *_split(config), *check_tokenizer.flag_problems(d), *data_paths.blends(d)]


def missing(config: Config) -> list[str]:
    """What a real run would not find on this machine."""
    d = config.data
    c = config.checkpoint
    knows = config.of_features
    lines = []
    if not any(data_flags(d).values()) and not any(group.names_data for group in knows):
        lines.append(
            "no data: give --data-path PREFIX (written by tools/preprocess_data.py), or "
            "--mock-data [data-missing]"
        )
    elif not config.packed and sum(data_flags(d).values()) == 1 and has_files(d):
        from megatron.config.checks.data_paths import missing_data

        lines += missing_data(d)
    lines += _tokenizer_files(d)
    if c.load is not None and not is_url(c.load):
        from megatron.config.checks import load_paths

        lines += load_paths.problems(c.load, c, knows)
    for flag, path in (
        ("--staging-dir" if is_url(c.save) else "--save", staged(c).save),
        (
            "--staging-dir" if is_url(c.snapshot_dir) else "--snapshot-dir",
            staged(c).snapshot_dir if c.snapshot_interval else None,
        ),
        ("--data-cache-path", d.data_cache_path),
        ("--object-storage-cache-path", d.object_storage_cache_path),
    ):
        if path is not None:
            lines += directory_to_write(flag, path)
    if c.non_persistent_ckpt_type == "local" and c.non_persistent_local_ckpt_dir:
        flag = "--non-persistent-local-ckpt-dir"
        lines += filter(None, [_too_long(flag, c.non_persistent_local_ckpt_dir)])
    for flag, path in (
        ("--metrics-file", config.logging.metrics_file),
        ("--control-file", c.control_file),
    ):
        if path is not None:
            lines += file_to_write(flag, path)
    lines += [
        f"{flag} {url}: {object_stores.MISSING}"
        for flag, url in _urls(c).items()
        if not object_stores.is_installed()
    ]
    for group in knows:
        lines += group.missing()
    return lines


def _urls(c: CheckpointConfig) -> dict[str, str]:
    """The flags of checkpoints that name a place in an object store."""
    urls = {"--save": c.save, "--load": c.load, "--snapshot-dir": c.snapshot_dir}
    return {flag: url for flag, url in urls.items() if is_url(url)}


def _unsafe_urls(c: CheckpointConfig) -> Iterator[str]:
    for flag, url in _urls(c).items():
        try:
            safe_name(staged_name(url), flag, below=True)
        except UnsafeName as error:
            yield str(error)


def data_flags(d: DataConfig) -> dict[str, bool]:
    """The flags that name data, and which of them do."""
    per_split = {f"--{name}-data-path": getattr(d, f"{name}_data_path") for name in SPLITS}
    split_flags = [flag for flag, value in per_split.items() if value]
    return {
        "--data-path": bool(d.data_path),
        "--data-args-path": d.data_args_path is not None,
        "--per-split-data-args-path": d.per_split_data_args_path is not None,
        " ".join(split_flags) or "--train-data-path": bool(split_flags),
        "--mock-data": d.mock_data,
        "--dummy-data": d.dummy_data is not None,
    }


def has_files(d: DataConfig) -> bool:
    """Is any path of data named?"""
    return any(value for flag, value in data_flags(d).items() if "-path" in flag)


def _sources(d: DataConfig) -> Iterator[str]:
    flags = [flag for flag, value in data_flags(d).items() if value]
    if len(flags) > 1:
        yield (
            f"{' and '.join(flags)}: each names the data of the run; give only one of them "
            "[two-data-sources]"
        )
    if d.data_order == "epoch" and d.dataloader_type == "cyclic":
        yield (
            "--data-order epoch: has its own order in each epoch, --dataloader-type cyclic would "
            "shuffle it again; omit one of the two [flags-exclude-each-other]"
        )
    if d.data_order == "epoch" and d.mock_data:
        yield (
            "--data-order epoch: --mock-data has Megatron's order only; omit one of the two "
            "[flags-exclude-each-other]"
        )
    if d.multiple_validation_sets and not (d.valid_data_path or d.per_split_data_args_path):
        yield (
            "--multiple-validation-sets: name the sets, each with its own data, by "
            "--valid-data-path A B ... or --per-split-data-args-path [validation-sets-not-named]"
        )


def _split(config: Config) -> Iterator[str]:
    d = config.data
    if d.split is None:
        return
    per_split = [
        flag
        for flag, value in data_flags(d).items()
        if value and "-data-" in flag and flag not in ("--data-path", "--data-args-path")
    ]
    if per_split:
        yield (
            f"--split {d.split}: has no meaning with {per_split[0]}, which names the data of each "
            "split; omit it [split-with-data-per-split]"
        )
    words = [word for word in re.split(r"[,/\s'\"]+", d.split.strip()) if word]
    numbers = [as_number(word) for word in words]
    shares = [n for n in numbers if n is not None and 0 <= n < math.inf]
    if not 1 <= len(numbers) <= 3 or len(shares) < len(numbers) or not sum(shares):
        yield (
            f"--split {d.split}: give the shares of train, validation and test, as in --split "
            "949,50,1 [split-malformed]"
        )
    elif shares[0] == 0 and not config.training.skip_train:
        yield (
            f"--split {d.split}: leaves no data for training; the first share must be greater "
            "than 0 [split-without-training-data]"
        )


def _tokenizer_files(d: DataConfig) -> Iterator[str]:
    kind = d.tokenizer or ""
    yield from check_tokenizer.file_problems(d, kind)
    if kind == "NullTokenizer" and d.vocab_size is None:
        synthetic = "--mock-data" if d.mock_data else "--dummy-data" if d.dummy_data else None
        why = (
            f"the synthetic text of {synthetic}"
            if synthetic and d.tokenizer_type is None
            else "NullTokenizer"
        )
        yield (
            f"--vocab-size is missing: {why} needs the number of ids, as in --vocab-size 50257 "
            "[flag-missing]"
        )


def _too_long(flag: str, path: str) -> str | None:
    """The problem of a path that no file system takes, or not with the names of a checkpoint behind
    it."""
    name = os.fsencode(os.path.abspath(path))
    if len(name) <= 3_800 and max(map(len, name.split(b"/"))) <= 255:
        return None
    return (
        f"{flag} {path}: a part of it has more than 255 bytes, or all of it more than 3800; give a "
        "shorter path [path-too-long]"
    )


def file_to_write(flag: str, path: str) -> Iterator[str]:
    """A file that can be made or written: in a directory that exists."""
    if problem := _too_long(flag, path):
        yield problem
    elif os.path.isdir(path):
        yield f"{flag} {path}: is a directory; give the name of a file [path-is-a-directory]"
    elif not os.path.isdir(os.path.dirname(path) or "."):
        yield (
            f"{flag} {path}: there is no directory {os.path.dirname(path)}; make it, or give "
            "another path [directory-missing]"
        )


def directory_to_write(flag: str, path: str) -> Iterator[str]:
    """A directory that can be made or written: the nearest existing parent must be a writable
    directory."""
    parent = os.path.abspath(path)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if problem := _too_long(flag, path):
        yield problem
    elif not os.path.isdir(parent):
        yield (
            f"{flag} {path}: {parent} is not a directory; give another path [path-not-a-directory]"
        )
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield (
            f"{flag} {path}: {parent} cannot be written to; give another path, or change its "
            "permissions [path-not-writable]"
        )
    elif reason := _refusal(parent):
        yield (
            f"{flag} {path}: no directory can be made in {parent} ({reason}); give another path "
            "[path-not-writable]"
        )


def _refusal(folder: str) -> str | None:
    """Why no directory can be made in `folder`, which the permissions allow: it is in /proc, or
    this user is root on NFS. A full or failing disk may recover."""
    if launcher.rank() not in (0, launcher.world_size() - 1):  # which write there
        return None
    probe = os.path.join(folder, f".writable-{os.getpid()}")
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError as error:
        passing = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EEXIST)
        return None if error.errno in passing else error.strerror
    return None
