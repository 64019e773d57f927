"""Rules of --packed-samples: what has no meaning beside it. Knows no torch and no file."""
from __future__ import annotations

from collections.abc import Iterator

from megatron.config.facts import Facts

# Flags that cannot stand beside --packed-samples, the value that leaves them off, and why.
_APART = (
    ("mock_data", False, "is one long text; --dummy-data internlm makes up samples"),
    ("data_path", None, "would be split, and packed folders are read whole; name them by --train-data-path, and those of "
                        "validation by --valid-data-path"),
    ("data_args_path", None, "would be split, and packed folders are read whole; name them by --train-data-path"),
    ("data_order", "megatron", "packed rows have an order of their own; leave it out"),
    ("multiple_validation_sets", False, "is not supported with packed rows; validate one set at a time"),
    ("reset_position_ids", False, "positions restart with each sample anyway; leave it out"),
    ("reset_attention_mask", False, "attention stays inside each sample anyway; leave it out"),
    ("eod_mask_loss", False, "the last token of a sample has no label anyway; leave it out"),
)


def rule(f: Facts) -> Iterator[str]:
    """One line for each."""
    if not f["packed_samples"]:
        if f["dummy_data"] is not None:
            yield f"{f.say('dummy_data')}: makes samples of many lengths, which are packed; add --packed-samples"
        if f["log_accuracy"]:
            yield "--log-accuracy: is counted by subset of packed samples; add --packed-samples, or leave it out"
        return
    for name, off, why in _APART:
        if f[name] != off:
            yield f"{f.flags[name].spelling}: with --packed-samples it {why}" if why.startswith(("is ", "would ")) else (
                f"{f.flags[name].spelling}: with --packed-samples {why}")
    if f["dataloader_type"] == "cyclic":
        yield "--dataloader-type cyclic: packed rows are shuffled each epoch anyway; leave it out"
    if f["pack_into_one"] and f["pad_samples"]:
        yield "--pack-into-one and --pad-samples: two ways to fill a row; leave one of them out"
    for name in ("train_data_path", "valid_data_path", "test_data_path"):
        words = f[name] or ()
        weights = [word for word in words if word.startswith("epochs:") or _is_number(word)]
        if weights:
            yield (f"{f.flags[name].spelling} {weights[0]}: packed rows are drawn from each file as often as it has them, "
                   "without weights; give the folders or prefixes alone")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
