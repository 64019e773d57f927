"""The data sets of a run and their samplers, and whether a resumed run reads them in the order in
which it was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron import log
from megatron.config.checks.paths import has_files
from megatron.config.data import DataConfig
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.data import index_helpers
from megatron.data.data_order import data_order_fingerprint
from megatron.data.request import Before, DataRequest
from megatron.data.sample_lookup import Dataset, is_packed
from megatron.data.sampler import Sampler, SequentialSampler
from megatron.data.subsets import subset_names
from megatron.data.tokenizers.build import Tokenizer
from megatron.parallel.context import Axis
from megatron.training.feature import data_source
from megatron.training.launch.initialize import Runtime
from megatron.training.run import Progress, Run

if TYPE_CHECKING:
    from megatron.data.plan_table import Row
    from megatron.data.script_datasets import DatasetsProvider
    from megatron.data.sources import DataSource


@dataclass(frozen=True)
class Data:
    """The data sets (None or none: not wanted or not there) and their samplers; of validation there
    may be several."""

    train: Dataset | None
    valid: list[Dataset]
    test: Dataset | None
    valid_names: list[str]  # of several validation sets, what their lines call them
    train_sampler: Sampler | None
    valid_samplers: list[Sampler]
    test_sampler: Sampler | None
    order: dict[str, Any]
    rows: list[Row] = field(default_factory=list)  # of the table of what each split reads


def build_data(
    config: Config,
    plan: Plan,
    runtime: Runtime,
    tokenizer: Tokenizer,
    progress: Progress | None = None,
    provider: DatasetsProvider | None = None,
) -> Data:
    """The data sets of this rank. `progress`, that of a checkpoint which was loaded, says which mix
    of data it had; `provider` is a script's own source."""
    d = config.data
    dp = runtime.ctx.dp
    targets = plan.targets
    for text in (
        "> building train, validation, and test datasets ...",
        " > datasets target sizes (minimum size):",
        f"    train:      {targets.train}",
        f"    validation: {targets.valid}",
        f"    test:       {targets.test}",
        "> building train, validation, and test datasets for GPT ...",
    ):
        log.detail(text)
    if index_helpers.REASON and not (d.mock_data or provider):
        log.detail(
            f" > index helpers: {index_helpers.IMPLEMENTATION}, because {index_helpers.REASON}"
        )
    if has_files(d) and not (config.packed or provider):
        from megatron.data.megatron_order import check_tokenizer

        check_tokenizer(d, tokenizer.identity())

    source = _source(config, provider)
    rows: list[Row] = []
    before = (
        None
        if progress is None
        else _mix_before(config, progress.data_order, progress.consumed_train_samples)
    )
    train, valid, test = source.build(d, _request(config, plan, tokenizer, before), rows)
    valids = [each for each in (valid if isinstance(valid, list) else [valid]) if each is not None]
    if rows:
        from megatron.data.plan_table import plan_table

        for line in plan_table(rows):
            log.detail(line)
    log.detail("> finished creating GPT datasets ...")

    cyclic = d.dataloader_type == "cyclic"
    train_sampler = _train_sampler(config, plan, train, dp)
    rows_evaluated = plan.evaluation_batch.micro_batch_size
    return Data(
        train=train,
        valid=valids,
        test=test,
        valid_names=_validation_names(d, valids),
        train_sampler=train_sampler,
        valid_samplers=[
            _sampler(dataset, cyclic and not d.full_validation, rows_evaluated, d, dp)
            for dataset in valids
        ],
        test_sampler=None if test is None else _sampler(test, False, rows_evaluated, d, dp),
        order=data_order_fingerprint(
            train, valid, None if train_sampler is None else train_sampler.order()
        ),
        rows=rows,
    )


def _source(config: Config, provider: DatasetsProvider | None) -> DataSource:
    """That of the flags, or a script's own."""
    if provider is None:
        return data_source(config)
    from megatron.data.script_datasets import ScriptData

    return ScriptData(provider)


def planned_order(
    config: Config, plan: Plan, tokenizer: Tokenizer, saved: dict[str, Any], consumed: int
) -> dict[str, Any]:
    """`Data.order` of a run that goes on after `consumed` samples in the order `saved`, without
    building its indices; scripts' own data are not asked. Raises ValueError and OSError as
    `build_data` does."""
    request = _request(config, plan, tokenizer, _mix_before(config, saved, consumed))
    train, valid, _ = data_source(config).build(config.data, replace(request, indices=False), [])
    sampler = _train_sampler(config, plan, train, Axis("dp", plan.data_parallel_size))
    return data_order_fingerprint(train, valid, None if sampler is None else sampler.order())


def _request(
    config: Config, plan: Plan, tokenizer: Tokenizer, before: Before | None
) -> DataRequest:
    """What this run requests, from whichever source."""
    targets = plan.targets
    whole_validation = config.data.full_validation and targets.valid
    return DataRequest(
        sizes=(targets.train, None if whole_validation else targets.valid, targets.test),
        sequence_length=config.model.seq_length,
        seed=config.training.seed,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        identity=tokenizer.identity(),
        before=before,
        micro_batch_size=config.training.micro_batch_size,
        global_batch_size=plan.batch.final_global_batch_size,
    )


def _validation_names(data: DataConfig, datasets: Sequence[Dataset]) -> list[str]:
    """What the lines of the log call them, "" for the only one; they are listed."""
    names = [getattr(dataset, "set_name", "") for dataset in datasets]
    if data.multiple_validation_sets:
        names = [
            dataset.subsets[0] if is_packed(dataset) else str(number)
            for number, dataset in enumerate(datasets)
        ]
    for name, dataset in zip(names, datasets, strict=True) if any(names) else ():
        log.print_rank_0(
            f" > validation-{name}: {len(dataset)} {'rows' if is_packed(dataset) else 'samples'} "
            f"of {', '.join(subset_names(dataset))}"
        )
    return names


def _mix_before(config: Config, order: dict[str, Any], consumed: int) -> Before | None:
    """The mix of data of a checkpoint whose order this is."""
    if not order.get("train"):
        return None
    return Before(order["train"], consumed, config.data.continue_data_mix)


def _train_sampler(config: Config, plan: Plan, train: Dataset | None, dp: Axis) -> Sampler | None:
    """The sampler of training data."""
    cyclic = config.data.dataloader_type == "cyclic"
    rows = plan.batch.micro_batch_size
    return None if train is None else _sampler(train, cyclic, rows, config.data, dp)


def _sampler(
    dataset: Dataset, cyclic: bool, micro_batch_size: int, data: DataConfig, dp: Axis
) -> Sampler:
    """Which samples this rank reads, and in what order."""
    share = (micro_batch_size, dp.rank, dp.size)
    if is_packed(dataset):
        return dataset.sampler(*share)
    if cyclic:
        from megatron.data.cyclic_sampler import CyclicSampler

        return CyclicSampler(len(dataset), *share, data.data_sharding)
    return SequentialSampler(len(dataset), *share)


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
    from megatron.data.order_change import data_order_differences, only_amount_of_validation

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
