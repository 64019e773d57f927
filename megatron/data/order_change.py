"""What differs between the orders of two runs' samples, and what to look at."""

from typing import Any

SHOWN = 300  # characters of a value that differs: there may be thousands of data sets
AMOUNTS = "--train-iters, --train-samples, --eval-iters, --eval-interval or --global-batch-size"
# Which flag, or what else, a key of the data order comes from.
ORDER_REMEDIES = {
    "seed": "--seed",
    "sequence_length": "--seq-length",
    "sequences": "--split or --data-path",
    "num_epochs": AMOUNTS,
    "separate_last_epoch": AMOUNTS,
    "weights": "--data-path",
    "since": "--data-path",
    "taken": "--data-path",
    "exhaustive": "--data-path",
    "kind": "--data-path or --mock-data",
    "corpus": "the data files",
    "dataloader_type": "--dataloader-type",
    "micro_batch_size": "--micro-batch-size",
    "data_parallel_size": "the number of ranks",
    "data_sharding": "--no-data-sharding",
    "total_samples": "--train-iters or --train-samples",
    "vocab_size": "--vocab-size",
    "rows": "--micro-batch-size",
    "rows_per_batch": "--global-batch-size",
    "mode": "--pack-into-one or --pad-samples",
    "min_length": "--min-sample-length",
    "dataset": "the script's data set",
    "first_sample": "the script's data set",
}


def data_order_differences(
    saved: dict[str, Any], now: dict[str, Any], other_mix: bool = False
) -> list[str]:
    """One line for each key in which two data orders differ, with both values and what to look at;
    [] if they agree.

    A split that one of the two runs does not read is no difference, nor is, with `other_mix`, the
    mix of training data in epoch order.
    """
    lines = []
    for name in sorted(saved.keys() | now.keys()):
        before: Any = saved.get(name)
        after: Any = now.get(name)
        if name in ("train", "valid") and (before is None or after is None):
            continue
        if other_mix and name == "train" and before["kind"] == after["kind"] == "EpochBlend":
            continue
        if name == "train" and before.get("compares") and after.get("compares"):
            continue  # the source has compared them when it was built
        lines += _differences(name, before, after, "")
    return lines


def only_amount_of_validation(line: str) -> bool:
    """Does this difference of `data_order_differences` say only how much validation data is read?
    They are not trained on, so that none is repeated or lost."""
    return line.startswith("valid.") and line.endswith(f"({AMOUNTS})")


def _differences(key: str, before: Any, after: Any, remedy: str) -> list[str]:
    remedy = ORDER_REMEDIES.get(key.rsplit(".", 1)[-1], remedy)
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for name in sorted(before.keys() | after.keys())
            for line in _differences(f"{key}.{name}", before.get(name), after.get(name), remedy)
        ]
    pairs = isinstance(before, list) and isinstance(after, list) and len(before) == len(after)
    if pairs and any(isinstance(value, dict) for value in before):
        return [
            line
            for number, (old, new) in enumerate(zip(before, after, strict=True))
            for line in _differences(f"{key}.{number}", old, new, remedy)
        ]
    if before == after:
        return []
    return [
        f"{key}: {_short(before)} in the checkpoint, {_short(after)} now"
        + (f" ({remedy})" if remedy else "")
    ]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
