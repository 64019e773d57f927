"""Whether a resumed run reads its data in the order in which it was trained."""

from __future__ import annotations

from typing import Any

from megatron import log
from megatron.config.tree import Config
from megatron.data.data_order import data_order_differences, only_amount_of_validation
from megatron.training.run import Run


def check_data_order(run: Run, order: dict[str, Any]) -> None:
    """Raise ValueError if the order of the data has changed; print a warning if that was
    requested."""
    saved = run.progress.data_order
    run.progress.data_order = order
    warning = order_change(run.config, saved, order, run.progress.iteration)
    if warning:
        log.warn_once(warning)


def order_change(
    config: Config, saved: dict[str, Any], order: dict[str, Any], iteration: int
) -> str | None:
    """The warning about a change of the order after this iteration, if there is one. Raises
    ValueError for a change that was not requested."""
    if not saved or config.training.skip_train:
        return None
    changed = data_order_differences(saved, order, config.data.continue_data_mix)
    if not changed:
        return None
    text = "; ".join(changed)
    allowed = config.data.allow_data_order_change
    if not allowed and not all(map(only_amount_of_validation, changed)):
        mix = ", --continue-data-mix to continue with another mix" * (
            config.data.data_order == "epoch"
        )
        raise ValueError(
            "--load: with these flags the order of the data is not that of the checkpoint, so "
            f"samples would be repeated or lost: {text}. Give the flags it was saved with{mix}, "
            "or --allow-data-order-change [data-order-differs]"
        )
    return f"the order of the data changes from iteration {iteration + 1} on: {text}"
