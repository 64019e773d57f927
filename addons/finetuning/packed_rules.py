"""Rules of --packed-samples: what has no meaning with it, and which folders it can read."""

import os
from collections.abc import Iterator, Sequence

from megatron.config.checks.data_paths import (
    EPOCHS,
    blend_problem,
    missing_data,
    missing_pair,
    prefixes_in,
    read_blends,
)
from megatron.config.checks.facts import Facts
from megatron.config.checks.paths import data_flags, has_files
from megatron.training.feature import features_of

# Flags that cannot be combined with --packed-samples, the value that disables them, what to do.
_APART = (
    ("mock_data", False, "it is one long text; --dummy-data generates samples"),
    (
        "data_path",
        None,
        "it would be split, and packed data are read whole; give --train-data-path, and for "
        "validation --valid-data-path",
    ),
    (
        "data_args_path",
        None,
        "it would be split, and packed data are read whole; give --train-data-path",
    ),
    ("data_order", "megatron", "packed rows have an order of their own; omit it"),
    (
        "eval_micro_batch_size",
        None,
        "a row has the tokens of --micro-batch-size samples in validation too; omit it",
    ),
    ("reset_position_ids", False, "positions restart with each sample anyway; omit it"),
    ("reset_attention_mask", False, "attention stays inside each sample anyway; omit it"),
    ("eod_mask_loss", False, "the last token of a sample has no label anyway; omit it"),
)


def problems(f: Facts) -> Iterator[str]:
    """One line for each."""
    yield from _combinations(f)
    yield from _weights(f)
    if not f["dry_run"]:
        yield from _missing(f)


def _combinations(f: Facts) -> Iterator[str]:
    for name, off, why in _APART:
        if f[name] != off:
            yield (
                f"{f.flags[name].spelling}: cannot be combined with --packed-samples: {why} "
                "[flag-not-with-packed-samples]"
            )
    if f["dataloader_type"] == "cyclic":
        yield (
            "--dataloader-type cyclic: packed rows are shuffled each epoch anyway; omit it "
            "[flag-not-with-packed-samples]"
        )
    if f["pack_into_one"] and f["pad_samples"]:
        yield (
            "--pack-into-one and --pad-samples: two ways to fill a row; omit one of them "
            "[flags-exclude-each-other]"
        )

    if f.config.kernels.cuda_graphs:
        graphs = f.say("enable_cuda_graph" if f["enable_cuda_graph"] else "cuda_graph_impl")
        yield (
            f"{graphs} and --packed-samples: each micro-batch has samples of other lengths; change "
            "one of them [cuda-graph-cannot-hold]"
        )


def _weights(f: Facts) -> Iterator[str]:
    for flag, words in read_blends(f.config.data):
        if isinstance(words, str) or blend_problem(words) or words[0].startswith(EPOCHS):
            continue  # it says that itself
        if prefixes_in(words) is not words:
            yield (
                f"{flag} {words[0]}: with --packed-samples each file is drawn from as often as it "
                "has rows; drop the weights [packed-data-with-weights]"
            )


def _missing(f: Facts) -> Iterator[str]:
    """What a real run would not find on this machine."""
    d = f.config.data
    named = sum(data_flags(d).values())
    if not named:
        yield "no data: give --train-data-path FOLDER, or --dummy-data [data-missing]"
    if named != 1 or not has_files(d):
        return
    indices = [form.index for feature in features_of(f.config) for form in feature.sample_formats]

    def missing(flag: str, word: str, words: int) -> Iterator[str]:
        found = word_problems(flag, word, indices)
        yield from missing_pair(flag, word, words) if found is None else found

    yield from missing_data(d, missing)


def word_problems(flag: str, word: str, indices: Sequence[str]) -> list[str] | None:
    """What is wrong with a word of a data flag that is a directory, or a file of a format whose
    second file has one of `indices` behind its name; None if it is neither, but a prefix or a
    pattern."""
    if not os.path.isdir(word) or os.path.isfile(word + ".idx"):
        file = word.removesuffix(".bin") + ".bin"
        return [] if any(os.path.isfile(file + end) for end in indices) else None
    files = [
        os.path.join(path, name)
        for path, _, names in os.walk(word, followlinks=True)
        for name in names
        if name.endswith(".bin")
    ]
    if not files:
        return [
            f"{flag}: {word} holds no .bin; give a folder with one directory per subset "
            "(FOLDER/SUBSET/X.bin), or a prefix written by tools/preprocess_data.py "
            "[packed-folder-without-data]"
        ]
    bare = sorted(
        path
        for path in files
        if not any(map(os.path.isfile, [path[:-4] + ".idx", *(path + end for end in indices)]))
    )
    second = " or ".join([".idx", *(f".bin{end}" for end in indices)])
    return [
        f"{flag}: {path} has no {second} next to it; copy it too, or make both again "
        "[packed-meta-missing]"
        for path in bare[:3]
    ]
