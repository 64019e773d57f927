"""Whether a resumed run reads its data in the order in which it was trained."""

from __future__ import annotations

from typing import Any

from megatron import log
from megatron.data.data_order import data_order_differences, only_amount_of_validation
from megatron.training.run import Run


def check_data_order(run: Run, order: dict[str, Any]) -> None:
    """Raise ValueError if the order of the data has changed; print a warning if that was
    requested."""
    saved = run.progress.data_order
    run.progress.data_order = order
    if not saved or run.config.training.skip_train:
        return
    changed = data_order_differences(saved, order, run.config.data.continue_data_mix)
    if not changed:
        return
    text = "; ".join(changed)
    allowed = run.config.data.allow_data_order_change
    if not allowed and not all(map(only_amount_of_validation, changed)):
        mix = ", --continue-data-mix to continue with another mix" * (
            run.config.data.data_order == "epoch"
        )
        raise ValueError(
            "--load: with these flags the order of the data is not that of the checkpoint, so "
            f"samples would be repeated or lost: {text}. Give the flags it was saved with{mix}, "
            "or --allow-data-order-change [data-order-differs]"
        )
    log.warn_once(
        f"the order of the data changes from iteration {run.progress.iteration + 1} on: {text}"
    )
