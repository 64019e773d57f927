"""What prevents a resume, by flags and counters alone."""

from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.arguments import Problems
from megatron.checkpoint.state import RunState
from megatron.config import architecture, saved_flags
from megatron.config.architecture import Difference
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks.declared import effective
from megatron.config.command_line import CommandLine
from megatron.config.plan.plan import Plan
from megatron.config.run_directory import ARGS, vouched_file
from megatron.config.tree import Config
from megatron.data.tokenizers.base import Tokenizer
from megatron.optimizer import saved_schedule
from megatron.optimizer.scheduler import build_scheduler
from megatron.training.feature import features_of


def of_checkpoint(
    line: CommandLine,
    plan: Plan,
    tokenizer: Tokenizer | None,
    folder: Path,
    state: RunState | None,
) -> Iterator[str]:
    """Flags and counters of a checkpoint on this machine that contradict these, before it is
    loaded."""
    config = line.config
    c = config.checkpoint
    saved = _saved_config(folder)
    if saved is None:
        return
    differences = architecture.typed_differences(effective(saved).model, effective(config).model)
    changing = config.changing_after(state.iteration) if state else set()
    if wrong := architecture_problem(differences, changing):
        yield wrong
    if state is None:
        return
    # weights of another suite have none
    with_optimizer = not c.no_load_optim and bool(state.iteration)
    identity = {} if tokenizer is None else tokenizer.identity()
    yield from contradictions(config, plan, c, saved, state, identity, with_optimizer)
    scheduler = build_scheduler(config, plan, SimpleNamespace(param_groups=[]))
    if wrong := saved_schedule.problem(scheduler, state.scheduler if with_optimizer else {}):
        yield wrong


def _saved_config(folder: Path) -> Config | None:
    """The flags that a checkpoint was saved with; None where they cannot be read."""
    try:
        if vouched_file(folder, ARGS) is not None:
            return saved_flags.read(folder / ARGS).config
    except Problems:
        pass
    return None


def architecture_problem(
    differences: Sequence[Difference], changing: Set[str] = frozenset()
) -> str | None:
    """The checkpoint is of another model, and not only in the fields `changing`."""
    wrong = [one for one in differences if not changing >= set(one.fields)]
    if not wrong:
        return None
    lines = [
        f"{name} value from checkpoint ({old}) is not equal to the input argument value ({new})."
        for name, _, old, new in wrong
    ]
    return (
        "--load: "
        + " ".join(lines)
        + " Give the values of the checkpoint (--use-checkpoint-args does), or --finetune "
        "to start a new run from its weights [flag-contradicts-checkpoint]"
    )


def contradictions(
    config: Config,
    plan: Plan,
    c: CheckpointConfig,
    saved: Config,
    state: RunState,
    tokenizer: Mapping[str, Any],
    with_optimizer: bool,
) -> Iterator[str]:
    """One line for each thing that keeps a run from going on from a checkpoint of its model, which
    was saved with the flags `saved`. `tokenizer`: the result of `Tokenizer.identity`, empty where
    it is not known; samples consumed must be those that this run's batch sizes give, or batches
    would overlap or leave gaps."""
    vocabulary = state.data.get("tokenizer") or {}
    wrong = vocabulary_problem(f"{c.load}", vocabulary, tokenizer)
    extended = any(one.extends(vocabulary, tokenizer) for one in features_of(config))
    if wrong and tokenizer and not extended:
        yield wrong
    kind = state.optimizer.get("optimizer")
    before, now = _optimizer(kind, saved), _optimizer(config.optimizer.optimizer, config)
    if with_optimizer and kind is not None and before != now:
        yield (
            f"--load {c.load}: it has the state of {before}, and this run's optimizer is {now}; "
            "give the flags of the checkpoint, or --no-load-optim to continue with new state "
            "[optimizer-differs-from-checkpoint]"
        )
    consumed = state.consumed_train_samples
    expected = plan.consumed_samples(state.iteration)
    if consumed != expected and not config.data.allow_data_order_change:
        yield (
            f"--load: after iteration {state.iteration} the checkpoint has consumed {consumed} "
            f"samples, with this run's batch sizes it would be {expected} (--global-batch-size was "
            f"{saved.training.global_batch_size}, is {config.training.global_batch_size}); give "
            "the batch sizes of the checkpoint, or --allow-data-order-change to continue from "
            f"sample {consumed} [consumed-samples-differ]"
        )


def _optimizer(kind: Any, config: Config) -> str:
    """The flags that say what state it has."""
    if kind == "sgd" and not config.optimizer.sgd_momentum:
        return "--optimizer sgd --sgd-momentum 0"
    return config.muon.spelled if kind == "muon" else f"--optimizer {kind}"


def vocabulary_problem(load: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The checkpoint was trained with another tokenizer. Both are results of `Tokenizer.identity`;
    an empty one matches any."""
    differ = {key for key in {**saved, **now} if saved.get(key) != now.get(key)}
    differ -= {"files", "extends"}
    if not saved or not differ:
        return None
    of_files = " with another content" * (saved.get("files") == now.get("files"))
    return (
        f"--load {load}: it was trained with the tokenizer {_text(saved, differ)}, this run has "
        f"{_text(now, differ)}{of_files * ('sha256' in differ)}; give the same vocabulary, or "
        "--finetune to start a new run from its weights [checkpoint-of-another-tokenizer]"
    )


def _text(identity: Mapping[str, Any], differ: Set[str]) -> str:
    """The class of a tokenizer, its files, and its settings that differ."""
    settings = [f"{key} {identity.get(key)}" for key in sorted(differ - {"class", "sha256"})]
    files = [str(file) for file in identity.get("files", ()) if "sha256" in differ]
    return ", ".join([str(identity.get("class")), *settings, *files])
