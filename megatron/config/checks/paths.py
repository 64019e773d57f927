"""Rules about data, tokenizer and files: which flags name them, and what is missing on this
machine. Reads no content but lists of paths.
"""

from __future__ import annotations

import difflib
import glob
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron import optional
from megatron.config.checkpoint import CheckpointConfig, is_url, staged
from megatron.config.checks import tokenizer as check_tokenizer
from megatron.config.checks.tokenizer import BYTE_VOCAB_SIZE
from megatron.config.data import DataConfig
from megatron.config.tokenizer import TOKENIZER_FILES
from megatron.config.tree import Config
from megatron.small_files import parse_json, read_text

SPLITS = ("train", "valid", "test")
EPOCHS = "epochs:"


def problems(config: Config) -> list[str]:
    """What is wrong with the flags themselves, whatever files there are."""
    d = config.data
    return [*_sources(d), *_order(d), *_validation(d), *_split(config), *_tokenizer(d), *_blends(d)]


def missing(config: Config) -> list[str]:
    """What a real run would not find on this machine."""
    d = config.data
    c = config.checkpoint
    found = []
    if not any(_given(d).values()):
        found.append(
            "no data: give --train-data-path FOLDER, or --dummy-data internlm [data-missing]"
            if d.packed_samples
            else (
                "no data: give --data-path PREFIX (written by tools/preprocess_data.py), or "
                "--mock-data [data-missing]"
            )
        )
    elif sum(_given(d).values()) == 1:
        found += _corpora(d)
    found += [*_tokenizer_files(d), *([] if is_url(c.load) else _checkpoint(c))]
    for flag, path in (
        ("--staging-dir" if is_url(c.save) else "--save", staged(c).save),
        (
            "--staging-dir" if is_url(c.snapshot_dir) else "--snapshot-dir",
            staged(c).snapshot_dir if c.snapshot_interval else None,
        ),
        ("--data-cache-path", d.data_cache_path),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--wandb-save-dir", config.logging.wandb_save_dir or None),
    ):
        if path is not None:
            found += _directory_to_write(flag, path)
    found += [
        f"--eval-tasks {path}: no such file; give the YAML file of a task [eval-task-unreadable]"
        for path in config.training.eval_tasks
        if not os.path.isfile(path)
    ]
    for flag, path in (
        ("--metrics-file", config.logging.metrics_file),
        ("--data-ledger", config.logging.data_ledger),
        ("--control-file", c.control_file),
    ):
        if path is not None and os.path.isdir(path):
            found.append(
                f"{flag} {path}: is a directory; give the name of a file [path-is-a-directory]"
            )
        elif path is not None and not os.path.isdir(os.path.dirname(path) or "."):
            found.append(
                f"{flag} {path}: there is no directory {os.path.dirname(path)}; make it, or give "
                "another path [directory-missing]"
            )
    return found


def _given(d: DataConfig) -> dict[str, bool]:
    per_split = {f"--{name}-data-path": getattr(d, f"{name}_data_path") for name in SPLITS}
    named = [flag for flag, value in per_split.items() if value]
    return {
        "--data-path": bool(d.data_path),
        "--data-args-path": d.data_args_path is not None,
        "--per-split-data-args-path": d.per_split_data_args_path is not None,
        " ".join(named) or "--train-data-path": bool(named),
        "--mock-data": d.mock_data,
        "--dummy-data": d.dummy_data is not None,
    }


def _order(d: DataConfig) -> Iterator[str]:
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


def _validation(d: DataConfig) -> Iterator[str]:
    if d.multiple_validation_sets and not (d.valid_data_path or d.per_split_data_args_path):
        yield (
            "--multiple-validation-sets: name the sets, each with its own data, by "
            "--valid-data-path A B ... or --per-split-data-args-path [validation-sets-not-named]"
        )
    for flag, words in _read_blends(d):
        if (
            not isinstance(words, str)
            and ("valid" in flag)
            and blend_problem(words) is None
            and (_prefixes(words) is not words)
        ):
            if d.multiple_validation_sets:
                yield (
                    f"{flag}: sets with validations of their own have no weights "
                    "(--multiple-validation-sets); drop them [validation-weights-without-meaning]"
                )
            elif d.full_validation:
                yield (
                    f"{flag}: --full-validation reads all of the data once, so weights have no "
                    "meaning; drop them [validation-weights-without-meaning]"
                )


def _sources(d: DataConfig) -> Iterator[str]:
    given = [flag for flag, value in _given(d).items() if value]
    if len(given) > 1:
        yield (
            f"{' and '.join(given)}: each names the data of the run; give only one of them "
            "[two-data-sources]"
        )


def _split(config: Config) -> Iterator[str]:
    d = config.data
    if d.split is None:
        return
    per_split = [
        flag
        for flag, value in _given(d).items()
        if value and "-data-" in flag and flag not in ("--data-path", "--data-args-path")
    ]
    if per_split:
        yield (
            f"--split {d.split}: has no meaning with {per_split[0]}, which names the data of each "
            "split; omit it [split-with-data-per-split]"
        )
    words = [word for word in re.split(r"[,/\s]+", d.split.strip()) if word]
    shares = [_number(word) for word in words]
    if (
        not 1 <= len(shares) <= 3
        or not all(s is not None and 0 <= s < math.inf for s in shares)
        or not sum(shares)
    ):
        yield (
            f"--split {d.split}: give the shares of train, validation and test, as in --split "
            "949,50,1 [split-malformed]"
        )
    elif shares[0] == 0 and not config.training.skip_train:
        yield (
            f"--split {d.split}: leaves no data for training; the first share must be greater "
            "than 0 [split-without-training-data]"
        )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _tokenizer(d: DataConfig) -> Iterator[str]:
    kind = d.tokenizer
    if kind in TOKENIZER_FILES:
        if kind == "TikTokenizer":
            yield from check_tokenizer.tiktoken_problems(
                d.vocab_size, d.tiktoken_num_special_tokens, d.tiktoken_special_tokens
            )
        if kind == "ByteTokenizer" and d.vocab_size not in (None, BYTE_VOCAB_SIZE):
            yield (
                f"--vocab-size {d.vocab_size}: ByteTokenizer has {BYTE_VOCAB_SIZE} ids (256 bytes "
                "and the end of a document); omit --vocab-size [vocab-size-not-that-of-tokenizer]"
            )
        return
    yield check_tokenizer.unknown_type(kind)


def _tokenizer_files(d: DataConfig) -> Iterator[str]:
    kind = d.tokenizer
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


def _listing(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _read_blends(d: DataConfig) -> list[tuple[str, list[str] | str]]:
    """(flag, its words, or what is wrong with the file that should hold them)."""
    found: list[tuple[str, list[str] | str]] = []
    for name in ("data_path", *(f"{split}_data_path" for split in SPLITS)):
        if getattr(d, name) is not None:
            found.append(
                ("--" + name.replace("_", "-"), [str(word).strip() for word in getattr(d, name)])
            )
    if d.data_args_path is not None:
        lines = _text(d.data_args_path)
        words = " ".join(lines).split() if isinstance(lines, list) else lines
        found.append((f"--data-args-path {d.data_args_path}", words))
    if d.per_split_data_args_path is not None:
        found += _split_file(d.per_split_data_args_path)
    return found


def _text(path: str) -> list[str] | str:
    """The lines of a file, or why they cannot be read."""
    try:
        return read_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read ({getattr(error, 'strerror', None) or error}) [file-not-readable]"


def _split_file(path: str) -> list[tuple[str, list[str] | str]]:
    flag = f"--per-split-data-args-path {path}"
    lines = _text(path)
    if isinstance(lines, str):
        return [(flag, lines)]
    try:
        blends = parse_json("\n".join(lines))
    except json.JSONDecodeError as error:
        return [
            (
                flag,
                (
                    f'is no JSON ({error}); write {{"train": [...], "valid": [...], "test": '
                    "[...]} [blend-file-malformed]"
                ),
            )
        ]
    if not isinstance(blends, dict) or not blends or not set(blends) <= set(SPLITS):
        return [
            (
                flag,
                (
                    "must be an object with the keys train, valid, test (some may be omitted) "
                    "[blend-file-malformed]"
                ),
            )
        ]
    found: list[tuple[str, list[str] | str]] = []
    for name, items in blends.items():
        items = items.split() if isinstance(items, str) else items
        if items is None:
            continue
        if not isinstance(items, list) or not all(
            isinstance(item, str | int | float) for item in items
        ):
            found.append(
                (
                    f"{flag}, {name}",
                    (
                        "must be a list of weights and prefixes, or one string of them "
                        "[blend-file-malformed]"
                    ),
                )
            )
        else:
            found.append((f"{flag}, {name}", [str(item).strip() for item in items]))
    return found


def blend_problem(words: Sequence[str]) -> str | None:
    """What is wrong with the words of a blend, or None. Grammar: Megatron-LM's, as
    megatron-core reads it, and `epochs:2` where a weight may stand."""
    if not words or not all(words):
        return "names no data; give a prefix, or pairs of weight and prefix [blend-malformed]"
    if any(word.startswith(EPOCHS) for word in words):
        for word in words[::2]:
            count = _number(word.removeprefix(EPOCHS)) if word.startswith(EPOCHS) else None
            if count is None or not 0 < count < math.inf or len(words) % 2:
                return (
                    f"{word} stands where epochs are expected; give pairs such as epochs:2 PREFIX "
                    "[blend-malformed]"
                )
        return None
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        return None
    for word, weight in zip(words[::2], weights, strict=True):
        if weight is None:
            return (
                f"{word} stands where a weight is expected; give pairs of weight and prefix "
                "[blend-malformed]"
            )
        if not 0 < weight < math.inf:
            return (
                f"the weight {word} must be a positive number; omit data that is not wanted "
                "[blend-malformed]"
            )
    return None


def _prefixes(words: Sequence[str]) -> Sequence[str]:
    weighted = _number(words[0]) is not None or words[0].startswith(EPOCHS)
    return words[1::2] if weighted and len(words) % 2 == 0 else words


def _blends(d: DataConfig) -> Iterator[str]:
    for flag, words in _read_blends(d):
        wrong = None if isinstance(words, str) else blend_problem(words)
        if wrong:
            yield f"{flag}: {wrong}"
        elif not isinstance(words, str) and words[0].startswith(EPOCHS) and d.data_order != "epoch":
            yield (
                f"{flag} {words[0]}: epochs are kept by --data-order epoch only; add it, or give "
                "weights [epochs-need-data-order-epoch]"
            )
        elif d.packed_samples and not isinstance(words, str) and _prefixes(words) is not words:
            yield (
                f"{flag} {words[0]}: with --packed-samples each file is drawn from as often as it "
                "has rows; drop the weights [packed-data-with-weights]"
            )


def _corpora(d: DataConfig) -> Iterator[str]:
    for flag, words in _read_blends(d):
        if isinstance(words, str):
            yield f"{flag}: {words}"
        elif blend_problem(words) is None:
            prefixes = _prefixes(words)
            numbers = [
                p for p in prefixes if _number(p) is not None and not os.path.exists(p + ".idx")
            ]
            if numbers and len(words) > 1:
                yield (
                    f"{flag}: {' and '.join(numbers)} where a prefix is expected; give a weight "
                    "for every prefix, or for none [blend-malformed]"
                )
                prefixes = [p for p in prefixes if p not in numbers]
            for prefix in prefixes:
                found = None
                if d.packed_samples:
                    packed = optional.load("megatron.config.checks.packed")
                    found = packed.word_problems(flag, prefix)
                yield from _corpus(flag, prefix, len(words)) if found is None else found


def _corpus(flag: str, prefix: str, words: int) -> Iterator[str]:
    lost = [end for end in (".idx", ".bin") if not os.path.isfile(prefix + end)]
    if not lost or (len(lost) == 2 and _several(prefix)):
        return
    shown = f"{flag} {prefix}" if words == 1 else f"{flag}: {prefix}"
    stem, end = os.path.splitext(prefix)
    if end in (".bin", ".idx") and all(os.path.isfile(stem + e) for e in (".idx", ".bin")):
        yield f"{shown}: give the prefix without {end}: {stem} [data-prefix-with-extension]"
    elif end in (".json", ".jsonl", ".txt", ".gz", ".zst", ".xz") and os.path.isfile(prefix):
        yield (
            f"{shown}: is text; tools/preprocess_data.py makes the .bin and .idx files that "
            "training reads [data-not-preprocessed]"
        )
    elif len(lost) == 1:
        yield (
            f"{shown}: {prefix}{lost[0]} is missing, the other half of the pair is there; "
            "preprocess again, or copy it too [data-pair-incomplete]"
        )
    else:
        yield (
            f"{shown}: there is no {prefix}.idx and .bin"
            + _near_prefixes(prefix)
            + " [data-not-found]"
        )


def _several(word: str) -> bool:
    """Is it a directory or a pattern with pairs? (megatron/data/blend/paths.py says which.)"""
    if os.path.isdir(word):
        return any(name.endswith(".idx") for _, _, names in os.walk(word) for name in names)
    stem, end = os.path.splitext(word)
    found = glob.iglob((stem if end in (".idx", ".bin") else word) + ".idx", recursive=True)
    return glob.has_magic(word) and (
        next(found, None) is not None
        or any(path.endswith(".idx") for path in glob.iglob(word, recursive=True))
    )


def _near_prefixes(prefix: str) -> str:
    """Prefixes in the same directory, the nearest first; or that there is no such directory."""
    folder, name = os.path.split(prefix)
    if not os.path.isdir(folder or "."):
        return f"; there is no directory {folder} (paths start at {os.getcwd()})"
    here = set(_listing(folder or "."))
    known = sorted(n[:-4] for n in here if n.endswith(".idx") and n[:-4] + ".bin" in here)
    close = difflib.get_close_matches(name, known, 3, 0.4) or known[:3]
    if not close:
        return (
            f"; {folder or 'the current directory'} holds no data set "
            "(tools/preprocess_data.py makes them)"
        )
    return f"; there is {' and '.join(os.path.join(folder, n) for n in close)}"


def _checkpoint(c: CheckpointConfig) -> Iterator[str]:
    if c.load is None:
        return
    if not os.path.lexists(c.load) and not _same_path(c.load, c.save):
        yield (
            f"--load {c.load}: there is no such directory; give that of a checkpoint, give --save "
            "the same directory (then a first run starts from random weights), or omit --load "
            "[checkpoint-directory-missing]"
        )
        return
    if os.path.exists(c.load) and not os.path.isdir(c.load):
        yield (
            f"--load {c.load}: is a file; give the directory that holds the iter_XXXXXXX "
            "directories [path-is-a-file]"
        )
        return
    if command := _of_another_suite(c.load):
        yield (
            f"--load {c.load}: is no checkpoint of this suite; make one of it first: python "
            f"tools/convert_checkpoint.py {command}, then give --load DIR "
            "[checkpoint-of-another-suite]"
        )
        return
    here = sorted(int(n[5:]) for n in _listing(c.load) if re.fullmatch(r"iter_\d{7,}", n))
    if c.ckpt_step is not None and not os.path.isdir(
        os.path.join(c.load, f"iter_{c.ckpt_step:07d}")
    ):
        have = f"there are {', '.join(map(str, here[-6:]))}" if here else "there is none"
        yield (
            f"--ckpt-step {c.ckpt_step}: {c.load} has no checkpoint of that iteration; {have} "
            "[checkpoint-step-missing]"
        )
    elif (
        c.exit_on_missing_checkpoint
        and newest_checkpoint(c.load) is None
        and not here
        and not is_url(c.snapshot_dir)
        and not any(
            _listing(os.path.join(c.snapshot_dir or os.path.join(c.load, "snapshots"), slot))
            for slot in "01"
        )
    ):
        yield (
            f"--load {c.load}: no checkpoint there, and --exit-on-missing-checkpoint is given; "
            "omit that to start from random weights [checkpoint-missing]"
        )


def _same_path(one: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def _of_another_suite(load: str) -> str | None:
    """The converter's command for the content of a folder, where that is no checkpoint of ours:
    without this, training would find none and start from random weights."""
    newest = newest_checkpoint(load)
    if newest is None and os.path.isfile(os.path.join(load, "config.json")):
        return f"hf-import {load} DIR"
    if any(
        n.startswith("mp_rank_") for n in _listing(str(newest or os.path.join(load, "release")))
    ):
        return f"megatron-import {load} DIR"
    if newest is None and (step := _internlm_step(load)):
        return (
            f"internlm-import {step} DIR --mlp-weights w2-up (before February 2024) or "
            "w2-down (InternEvo)"
        )
    return None


def _internlm_step(load: str) -> str | None:
    """The folder of a step of InternLM's training: `load`, or the newest in it (LOAD/50)."""
    steps = sorted((n for n in _listing(load) if n.isdecimal()), key=int, reverse=True)
    folders = [load, *(os.path.join(load, n) for n in steps)]
    return next(
        (
            one
            for one in folders
            if any(re.fullmatch(r"model_tp\d+_pp\d+\.pt", n) for n in _listing(one))
        ),
        None,
    )


def newest_checkpoint(load: str, ckpt_step: int | None = None) -> Path | None:
    """The iter_XXXXXXX directory that --load means: itself, that of `ckpt_step`, or the tracker's;
    None if absent."""
    folder = Path(load)
    if re.fullmatch(r"iter_\d{7,}", folder.name) and folder.is_dir() and ckpt_step is None:
        return folder
    name = str(ckpt_step) if ckpt_step is not None else ""
    if ckpt_step is None:
        lines = _text(str(folder / "latest_checkpointed_iteration.txt"))
        name = lines[0].strip() if isinstance(lines, list) and lines else ""
    if not name.isdecimal():
        return None
    found = folder / f"iter_{int(name):07d}"
    return found if found.is_dir() else None


def newest_with_good_args(load: str, ckpt_step: int | None = None) -> Path | None:
    """What newest_checkpoint finds; of a run directory, the newest one up to it whose args are
    those its manifest names.

    A load goes back to an older checkpoint where the newest is damaged, so its flags must not count
    either.
    """
    newest = newest_checkpoint(load, ckpt_step)
    here = _listing(load)
    if (
        ckpt_step is not None
        or newest == Path(load)
        or "latest_checkpointed_iteration.txt" not in here
    ):
        return newest
    names = sorted(
        (n for n in here if re.fullmatch(r"iter_\d{7,}", n)), key=lambda name: -int(name[5:])
    )
    older = (
        Path(load, name)
        for name in names
        if newest is None or int(name[5:]) <= int(newest.name[5:])
    )
    return next((folder for folder in older if _has_good_args(folder)), newest)


def _has_good_args(folder: Path) -> bool:
    return vouched_file(folder, "args") is not None


def vouched_file(folder: Path, name: str) -> bytes | None:
    """The bytes of a file of a checkpoint; None where the manifest does not vouch for them."""
    # nor a pipe, to wait for
    if not (folder / "manifest.json").is_file() or not (folder / name).is_file():
        return None
    try:
        crc32 = json.loads((folder / "manifest.json").read_bytes())["files"][name]["crc32"]
        found = (folder / name).read_bytes()
        return found if f"{zlib.crc32(found):08x}" == crc32 else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _directory_to_write(flag: str, path: str) -> Iterator[str]:
    """A directory that can be made or written: the nearest existing parent must be a writable
    directory."""
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        yield f"{flag} {path}: {there} is not a directory; give another path [path-not-a-directory]"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield (
            f"{flag} {path}: {there} cannot be written to; give another path, or change its "
            "permissions [path-not-writable]"
        )
