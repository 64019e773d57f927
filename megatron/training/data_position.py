"""Whether a resumed run goes on where its data stood: samples consumed, and their order. Knows no file of a checkpoint."""
from __future__ import annotations

from typing import Any

from megatron import log
from megatron.config.tree import Config
from megatron.data.data_order import data_order_differences
from megatron.training.build import Run


def check_position(run: Run, saved: Config) -> None:
    """The samples consumed must be those that this run's batch sizes give, or batches would overlap or leave gaps."""
    p = run.progress
    expected = run.plan.consumed_samples(p.iteration)
    if p.consumed_train_samples == expected or run.config.data.allow_data_order_change:
        return
    raise ValueError(
        f"--load: after iteration {p.iteration} the checkpoint has consumed {p.consumed_train_samples} samples, with "
        f"this run's batch sizes it would be {expected} (--global-batch-size was {saved.training.global_batch_size}, is "
        f"{run.config.training.global_batch_size}); give the batch sizes of the checkpoint, or --allow-data-order-change "
        f"to go on from sample {p.consumed_train_samples}")


def check_data_order(run: Run, order: dict[str, Any]) -> None:
    """Refuse to train on with another order of the data, unless that is asked for; then say what changes."""
    saved, run.data_order = run.data_order, order
    if not saved or run.config.training.skip_train:
        return
    changed = data_order_differences(saved, order, run.config.data.continue_data_mix)
    if not changed:
        return
    text = "; ".join(changed)
    if not run.config.data.allow_data_order_change:
        mix = ", --continue-data-mix to go on with another mix" * (run.config.data.data_order == "epoch")
        raise ValueError(f"--load: with these flags the order of the data is not that of the checkpoint, so samples would "
                         f"be repeated or lost: {text}. Give the flags it was saved with{mix}, or --allow-data-order-change")
    log.warn_once(f"the order of the data changes from iteration {run.progress.iteration + 1} on: {text}")
