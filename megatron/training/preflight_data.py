"""Checks a command line against the pairs of .bin and .idx that it names. Loads no torch."""

import bisect

from megatron import object_stores
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.data import dry_run, megatron_order
from megatron.data.tokenizers.base import Tokenizer


def of_data(config: Config, plan: Plan, tokenizer: Tokenizer | None) -> list[str]:
    """Problems of the data: too few samples, or ids of another vocabulary. Raises ValueError and
    OSError where they cannot be read."""
    d = config.data
    targets = plan.targets
    validation = None if d.full_validation and targets.valid else targets.valid
    with object_stores.urls_in_errors(d):
        splits = dry_run.read_splits(d, [targets.train, validation, targets.test])
        in_epochs = d.data_order == "epoch"
        short = [] if in_epochs else dry_run.shortages(splits, config.model.seq_length)
    problems = [
        _shortage(config, plan, shortage) for shortage in short if _runs_out(config, shortage.split)
    ]
    try:
        if tokenizer is not None:
            megatron_order.check_tokenizer(d, tokenizer.identity())
            with object_stores.urls_in_errors(d):
                dry_run.check_ids(splits, tokenizer.vocab_size)
    except ValueError as error:
        problems.append(str(error))
    return problems


def _runs_out(config: Config, split: str) -> bool:
    """Whether a split is read to its end and no further."""
    if split == "train":
        return not config.training.skip_train and config.data.dataloader_type != "cyclic"
    return split == "test" or config.data.dataloader_type != "cyclic"


def _shortage(config: Config, plan: Plan, short: dry_run.Shortage) -> str:
    """The line about a blend that is too small, with the flags that make it large enough."""
    t = config.training
    batch = plan.evaluation_batch.global_batch_size
    text = (
        f"{_flag(config, short.split)}: without weights each data set is read at most once, which "
        f"makes {short.samples} samples of {short.split}, and the run reads {short.needed}; "
    )
    if short.split == "train":
        enough = bisect.bisect_right(
            range(1, plan.train_iters + 1), short.samples, key=plan.consumed_samples
        )
        flag = (
            f"--train-samples to {short.samples}"
            if t.train_iters is None
            else f"--train-iters to {enough}"
        )
        text += f"lower {flag}"
    elif short.split == "test":
        text += f"lower --eval-iters to {short.samples // batch}"
    else:
        times = short.needed // (t.eval_iters * batch)
        text += (
            f"lower --eval-iters to {short.samples // (times * batch)} (of {times} "
            "validations), raise --eval-interval"
        )
    return (
        f"{text}, give weights (1 A 1 B), or --data-order epoch: with these, data are read as "
        "often as needed [data-exhausted]"
    )


def _flag(config: Config, split: str) -> str:
    """The flag that names the data of a split."""
    d = config.data
    if d.data_path or d.data_args_path:
        return "--data-path" if d.data_path else f"--data-args-path {d.data_args_path}"
    if d.per_split_data_args_path:
        return f"--per-split-data-args-path {d.per_split_data_args_path}"
    return f"--{split.partition('-')[0]}-data-path"
