"""Rules about the files of data that flags name: blends, and which pairs are missing on this
machine. Reads no content but lists of paths."""

import difflib
import glob
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron import object_stores
from megatron.config.checkpoint import is_url
from megatron.config.checks.listing import as_number, listing, text_lines
from megatron.config.data import DataConfig
from megatron.small_files import parse_json

SPLITS = ("train", "valid", "test")
EPOCHS = "epochs:"


def validation(d: DataConfig) -> Iterator[str]:
    """What is wrong with the names of validation data."""
    for flag, words in read_blends(d):
        if (
            not isinstance(words, str)
            and ("valid" in flag)
            and blend_problem(words) is None
            and (prefixes_in(words) is not words)
        ):
            if d.multiple_validation_sets:
                yield (
                    f"{flag}: --multiple-validation-sets evaluates each set by itself, so weights "
                    "have no meaning; drop them [validation-weights-without-meaning]"
                )
            elif d.full_validation:
                yield (
                    f"{flag}: --full-validation reads all of the data once, so weights have no "
                    "meaning; drop them [validation-weights-without-meaning]"
                )


def read_blends(d: DataConfig) -> list[tuple[str, list[str] | str]]:
    """(flag, its words, or what is wrong with the file that should hold them)."""
    blends: list[tuple[str, list[str] | str]] = []
    for name in ("data_path", *(f"{split}_data_path" for split in SPLITS)):
        if getattr(d, name) is not None:
            blends.append(
                ("--" + name.replace("_", "-"), [str(word).strip() for word in getattr(d, name)])
            )
    if d.data_args_path is not None:
        lines = text_lines(d.data_args_path)
        words = blend_words(lines) if isinstance(lines, list) else lines
        blends.append((f"--data-args-path {d.data_args_path}", words))
    if d.per_split_data_args_path is not None:
        flag = f"--per-split-data-args-path {d.per_split_data_args_path}"
        found = split_words(d.per_split_data_args_path)
        if isinstance(found, str):
            return [*blends, (flag, found)]
        blends += [(f"{flag}, {name}", words) for name, words in found.items()]
    return blends


def blend_words(lines: Sequence[str]) -> list[str]:
    """What the lines of a file of weights and prefixes say. Where every line is `WEIGHT PREFIX
    CORPUS`, as in AuroraGPT's lists, names of corpora are omitted, and the .bin of prefixes."""
    rows = [line.split() for line in lines if line.strip()]
    if rows and all(len(row) == 3 and as_number(row[0]) is not None for row in rows):
        rows = [[weight, prefix.removesuffix(".bin")] for weight, prefix, _ in rows]
    return [word for row in rows for word in row]


def split_words(path: str) -> dict[str, list[str] | str] | str:
    """The words of each split in the file of --per-split-data-args-path, {"train": [...], "valid":
    "...", ...}, or what is wrong with them, or with the file."""
    lines = text_lines(path)
    if isinstance(lines, str):
        return lines
    try:
        blends = parse_json("\n".join(lines))
    except json.JSONDecodeError as error:
        return (
            f'is not JSON ({error}); write {{"train": [...], "valid": [...], "test": [...]}} '
            "[blend-file-malformed]"
        )
    if not isinstance(blends, dict) or not blends or not set(blends) <= set(SPLITS):
        return (
            "must be an object with the keys train, valid, test (some may be omitted) "
            "[blend-file-malformed]"
        )
    words: dict[str, list[str] | str] = {}
    for name, items in blends.items():
        items = items.split() if isinstance(items, str) else items
        if items is None:
            continue
        if isinstance(items, list) and all(isinstance(item, str | int | float) for item in items):
            words[name] = [str(item).strip() for item in items]
        else:
            words[name] = (
                "must be a list of weights and prefixes, or one string of them "
                "[blend-file-malformed]"
            )
    return words


def blend_problem(words: Sequence[str]) -> str | None:
    """What is wrong with the words of a blend, or None. Grammar: Megatron-LM's, as
    megatron-core reads it, and `epochs:2` where a weight may stand."""
    if not words or not all(words):
        return "names no data; give a prefix, or pairs of weight and prefix [blend-malformed]"
    if any(word.startswith(EPOCHS) for word in words):
        for word in words[::2]:
            count = as_number(word.removeprefix(EPOCHS)) if word.startswith(EPOCHS) else None
            if count is None or not 0 < count < math.inf or len(words) % 2:
                return (
                    f"{word[:200]} stands where epochs are expected; give pairs such as "
                    "epochs:2 PREFIX [blend-malformed]"
                )
        return None
    weights = [as_number(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        return None
    for word, weight in zip(words[::2], weights, strict=True):
        if weight is None:
            return (
                f"{word[:200]} stands where a weight is expected; give pairs of weight and prefix "
                "[blend-malformed]"
            )
        if not 0 < weight < math.inf:
            return (
                f"the weight {word[:200]} must be a positive number; omit data that is not wanted "
                "[blend-malformed]"
            )
    return None


def prefixes_in(words: list[str]) -> list[str]:
    """The prefixes of a blend: `words` itself where it has no weights."""
    weighted = as_number(words[0]) is not None or words[0].startswith(EPOCHS)
    return words[1::2] if weighted and len(words) % 2 == 0 else words


def blends(d: DataConfig) -> Iterator[str]:
    """What is wrong with weights and epochs."""
    for flag, words in read_blends(d):
        wrong = None if isinstance(words, str) else blend_problem(words)
        if wrong:
            yield f"{flag}: {wrong}"
        elif not isinstance(words, str) and words[0].startswith(EPOCHS) and d.data_order != "epoch":
            yield (
                f"{flag} {words[0]}: epochs are kept by --data-order epoch only; add it, or give "
                "weights [epochs-need-data-order-epoch]"
            )
        elif d.object_storage_cache_path is None and not isinstance(words, str):
            yield from (f"{flag}: {no_cache(url)}" for url in list(filter(is_url, words))[:1])


def no_cache(url: str) -> str:
    """The problem of data in an object store without a cache."""
    return (
        f"{url} is read through a cache on this host; give --object-storage-cache-path DIR "
        "[object-storage-cache-missing]"
    )


def missing_data(
    d: DataConfig, missing: Callable[[str, str, int], Iterable[str]] | None = None
) -> Iterator[str]:
    """What the data flags name that is not on this machine, and files of paths that cannot be read.
    `missing` says it of a flag, a word and the number of words; by default words are pairs."""
    for flag, words in read_blends(d):
        if isinstance(words, str):
            yield f"{flag}: {words}"
        elif blend_problem(words) is None:
            prefixes = prefixes_in(words)
            numbers = [
                p for p in prefixes if as_number(p) is not None and not os.path.exists(p + ".idx")
            ]
            if numbers and len(words) > 1:
                yield (
                    f"{flag}: {' and '.join(numbers)} where a prefix is expected; give a weight "
                    "for every prefix, or for none [blend-malformed]"
                )
                prefixes = [p for p in prefixes if p not in numbers]
            for prefix in prefixes:
                if is_url(prefix):
                    if not object_stores.is_installed():
                        yield f"{flag} {prefix}: {object_stores.MISSING}"
                    continue  # the store says so where it is read
                yield from (missing or missing_pair)(flag, prefix, len(words))


def missing_pair(flag: str, prefix: str, words: int) -> Iterator[str]:
    """What is missing of the data set of a prefix, one of the `words` of a flag."""
    lost = [end for end in (".idx", ".bin") if not os.path.isfile(prefix + end)]
    in_parts = os.path.isfile(f"{prefix}.parts/parts.json")  # megatron/data/parts/part_set.py
    if not lost or (len(lost) == 2 and (_several(prefix) or in_parts)):
        return
    shown = f"{flag} {prefix}" if words == 1 else f"{flag}: {prefix}"
    stem, end = os.path.splitext(prefix)
    if end in (".bin", ".idx") and all(os.path.isfile(stem + e) for e in (".idx", ".bin")):
        yield f"{shown}: give the prefix without {end}: {stem} [data-prefix-with-extension]"
    elif end in (".json", ".jsonl", ".txt", ".gz", ".zst", ".xz") and os.path.isfile(prefix):
        yield (
            f"{shown}: a text file; tools/preprocess_data.py converts it to the .bin and .idx "
            "files that training reads [data-not-preprocessed]"
        )
    elif len(lost) == 1:
        yield (
            f"{shown}: {prefix}{lost[0]} is missing, the other file of the pair exists; copy it "
            "too, or preprocess again [data-pair-incomplete]"
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
    indices = glob.iglob((stem if end in (".idx", ".bin") else word) + ".idx", recursive=True)
    return glob.has_magic(word) and (
        next(indices, None) is not None
        or any(path.endswith(".idx") for path in glob.iglob(word, recursive=True))
    )


def _near_prefixes(prefix: str) -> str:
    """Prefixes in the same directory, the nearest first; or that there is no such directory."""
    folder, name = os.path.split(prefix)
    if not os.path.isdir(folder or "."):
        return f"; there is no directory {folder} (paths start at {os.getcwd()})"
    names = set(listing(folder or "."))
    prefixes = sorted(n[:-4] for n in names if n.endswith(".idx") and n[:-4] + ".bin" in names)
    close = difflib.get_close_matches(name, prefixes, 3, 0.4) or prefixes[:3]
    if not close:
        return (
            f"; {folder or 'the current directory'} holds no data set "
            "(tools/preprocess_data.py writes them)"
        )
    return f"; there is {' and '.join(os.path.join(folder, n) for n in close)}"
