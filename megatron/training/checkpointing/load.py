"""Loads a run: from the newest good checkpoint of --load, or from one of its own after a
rollback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

import torch

from megatron import log
from megatron.checkpoint import reading, store
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.reading import Candidate, Checkpoint
from megatron.checkpoint.sharded_reader import Reader
from megatron.checkpoint.state import RunState
from megatron.config import history
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.history import History
from megatron.config.plan.parameters import OUTPUT_LAYER, WORD_EMBEDDING
from megatron.config.run_directory import (
    ForeignCheckpoint,
)
from megatron.optimizer import adam, saved_schedule
from megatron.parallel.collectives import gather_objects
from megatron.parallel.sharding import Box, Sharding
from megatron.training.checkpointing.hardware import hardware
from megatron.training.checkpointing.resume_checks import contradictions
from megatron.training.checkpointing.save import (
    layout_of,
    own_tensors,
    ranks_text,
)
from megatron.training.checkpointing.saved_args import check_architecture, saved_config
from megatron.training.feature import features_of
from megatron.training.launch.process import Refusal
from megatron.training.run import Run

# Megatron's number of the QKV layout by query group, which this suite's weights have
CHECKPOINT_VERSION = 3.0


def load_newest(run: Run, c: CheckpointConfig) -> str | None:
    """Load the checkpoint of --load, if there is one."""
    assert c.load is not None
    with run.timers("load-checkpoint"):
        load, step = c.load, c.ckpt_step
        tries, problems = run.of_rank_0(lambda: reading.candidates(load, step, c.slots_of(load)))
        for text in problems:
            log.print_rank_0(f"WARNING: {text}")
        if c.non_persistent_ckpt_type == "local":
            from megatron.training.checkpointing.local_copies import with_local_copies

            tries = with_local_copies(run, tries, c)
        if tries:
            return _take_newest_good(run, tries, c)
        _missing(c.load, c.exit_on_missing_checkpoint)
        return None


def _take_newest_good(run: Run, tries: list[Candidate], c: CheckpointConfig) -> str:
    """Load what `c` requests of the first of these checkpoints that is good for all ranks; returns
    its path."""
    bad: list[str] = []
    for candidate in tries:
        checkpoint: Checkpoint | None = None
        failure: CheckpointError | None = None
        try:
            checkpoint = candidate.open()
            log.detail(
                f" loading checkpoint from {candidate.path} at iteration {checkpoint.iteration}"
            )
            _take_tensors(run, checkpoint, c)
        except CheckpointError as error:
            failure = error
        answers = gather_objects(
            (
                checkpoint and checkpoint.manifest.crc32,
                failure and str(failure),
                failure and failure.is_damage,
            ),
            run.runtime.ctx.world,
        )
        failed = [(rank, text, damage) for rank, (_, text, damage) in enumerate(answers) if text]
        if not failed:
            assert checkpoint is not None
            if len({crc32 for crc32, _, _ in answers}) > 1:
                raise CheckpointError(
                    f"--load {candidate.path}: the ranks see different checkpoints of iteration "
                    f"{checkpoint.iteration}; give a directory that all of them share "
                    "[checkpoint-differs-between-ranks]"
                )
            break
        rank, text, damage = failed[0]
        text = f"rank {rank}: {text}" if rank else text
        if candidate.step is None or c.ckpt_step is not None or not damage:
            raise failure or CheckpointError(text)
        bad.append(f"{text} (iteration {candidate.step})")
        log.print_rank_0(f"WARNING: cannot load iteration {candidate.step}: {text}")
    else:
        raise Refusal(
            f"--load {c.load}: none of its {len(bad)} checkpoints is good: {'; '.join(bad[:3])}. "
            "Give another --load, or none and another --save to start from random weights "
            "[no-good-checkpoint]",
            2 if c is run.config.checkpoint else 1,  # of a rollback
        )
    if bad:
        log.print_rank_0(
            f"WARNING: the checkpoint of iteration {checkpoint.iteration} is used instead of "
            f"that of iteration {tries[0].step}, which is damaged; training resumes from iteration "
            f"{checkpoint.iteration}"
        )
    _take_state(run, checkpoint, c)
    log.detail(
        f"  successfully loaded checkpoint from {candidate.path} at iteration "
        f"{checkpoint.iteration}"
    )
    return candidate.path


def load_own(run: Run, tries: list[Candidate]) -> None:
    """Load everything in the first good one of these checkpoints, which this run saved or resumed
    from, whatever --load, --finetune and --no-load-optim say."""
    everything = replace(
        run.config.checkpoint,
        load=tries[0].path,
        ckpt_step=None,
        finetune=False,
        no_load_optim=False,
    )
    _take_newest_good(run, tries, everything)


def _missing(directory: str, leave: bool) -> None:
    path = f"{directory}/{store.TRACKER}"
    if leave:
        raise ValueError(
            f"--load {directory}: {path} is not there and --exit-on-missing-checkpoint is given "
            "[checkpoint-missing]"
        )
    log.detail(f"WARNING: could not find the metadata file {path} ")
    log.detail("    will not load any checkpoints and will start from random")


def _has_optimizer(checkpoint: Checkpoint) -> bool:
    return any(name.startswith("optimizer.") for name in checkpoint.manifest.tensors)


def _with_optimizer(c: CheckpointConfig, checkpoint: Checkpoint) -> bool:
    """Does the run continue with its optimizer? Weights that another suite trained came without
    one."""
    begun = checkpoint.state.iteration > 0 or _has_optimizer(checkpoint)
    return begun and not (c.finetune or c.no_load_optim)


def _take_tensors(run: Run, checkpoint: Checkpoint, c: CheckpointConfig) -> None:
    """Check that the checkpoint is of this model and copy its tensors, all checksums verified."""
    config = run.config
    state = checkpoint.state
    log.detail(f" checkpoint version {CHECKPOINT_VERSION}")
    saved = saved_config(checkpoint, type(config), bool(run.plan.own_model))
    changing = config.changing_after(state.iteration)
    check_architecture(saved, config, not c.finetune, changing)
    o = config.optimizer
    stateless = o.optimizer == "sgd" and not o.sgd_momentum
    if _with_optimizer(c, checkpoint) and not (_has_optimizer(checkpoint) or stateless):
        raise ValueError(
            f"--load {c.load}: it was saved without its optimizer (--no-save-optim); give "
            "--no-load-optim to continue with a new one, or --finetune to start a new run from "
            "its weights [checkpoint-without-optimizer]"
        )
    if not c.finetune:
        goes_on = _with_optimizer(c, checkpoint)
        for wrong in contradictions(config, run.plan, c, saved, state, run.tokenizer, goes_on):
            raise ValueError(wrong)
    with checkpoint.reader() as reader:
        for feature in features_of(config):
            reader = feature.reader(reader, run, checkpoint)
        same = state.data.get("tokenizer") == run.tokenizer
        if not (same or reader.of_one_rank or run.plan.own_model):
            _check_last_id(reader, run.plan.vocab_size)
        _read_tensors(run, reader, _with_optimizer(c, checkpoint))


def _take_state(run: Run, checkpoint: Checkpoint, c: CheckpointConfig) -> None:
    """Restore counters, schedule and data order of the checkpoint whose tensors were copied."""
    state = checkpoint.state
    try:
        written_by = ranks_text(state.layout)
        if not state.history:
            old = history.without_branches(checkpoint.manifest.crc32, state.iteration)
            state.history = old.dump(state.iteration)
        restore_counters(run, state, _with_optimizer(c, checkpoint), not c.finetune)
    except (KeyError, TypeError, AttributeError, OverflowError, StopIteration) as error:
        raise ForeignCheckpoint(
            f"{checkpoint.directory / store.STATE} lacks something or has it in another form "
            f"({type(error).__name__} {error}); use another checkpoint, or --finetune "
            "[checkpoint-damaged]"
        ) from None
    if not c.finetune and (warning := other_hardware(run.kernels, run.runtime.device, state)):
        log.print_rank_0(f"WARNING: {warning}")
    now = layout_of(run.runtime)
    if state.layout != now:
        log.print_rank_0(f" checkpoint was written by {written_by}, this run has {ranks_text(now)}")


def restore_counters(
    run: Run, state: RunState, with_optimizer: bool = True, with_progress: bool = True
) -> None:
    """Restore everything that is not a tensor: of optimizer and schedule, and the progress."""
    if with_optimizer:
        saved_schedule.load(run.scheduler, state.scheduler)
        run.optimizer.load_counters(state.optimizer)
    else:
        run.optimizer.reload_model_params()
    if with_progress:
        p = run.progress
        p.iteration = state.iteration
        p.consumed_train_samples = state.consumed_train_samples
        p.consumed_valid_samples = state.consumed_valid_samples
        p.skipped_train_samples = state.skipped_train_samples
        p.saved_skips = state.skips
        p.skipped = state.skipped_ranges()
        p.skipped_iterations = sum(last - first + 1 for first, last in p.skipped)
        p.data_order = state.data.get("order", {})
        p.features = state.features
        branch = History.parse(state.history).branch()
        p.history = replace(branch, number=max(branch.number, p.history.number + 1))


def _read_tensors(run: Run, reader: Reader, with_optimizer: bool) -> None:
    """Copy every tensor of this rank from the checkpoint; dtypes may differ, shapes may
    not."""
    stored = set(reader.names())
    if run.plan.own_model and not reader.of_one_rank:
        _check_names(run, {name for name in stored if not name.startswith("optimizer.")}, reader)
    scales = run.fp8.tensors() if run.fp8 and with_optimizer else {}
    unknown = {
        name
        for name, (sharding, _) in scales.items()
        if name not in stored or reader.shape(name) != sharding.shape
    }
    if unknown:
        log.print_rank_0(
            " the checkpoint has no FP8 scales of this --fp8-amax-history-len: the amax history "
            "is reset"
        )
    new_kept = run.optimizer.kept_tensors().keys() - stored if with_optimizer else set()
    changed = {}
    if with_optimizer:
        unknown |= _begin_state(run, stored, reader.of_one_rank)
    additions = {spec.name: spec.addition for spec in run.plan.parameters if spec.addition}
    new = set() if reader.of_one_rank else {*additions.values()} - set(map(additions.get, stored))
    if new:
        log.print_rank_0(
            f" the checkpoint has no {', '.join(sorted(new))}: started from initial values"
        )
    for name, sharding, _, own in own_tensors(run):
        if name.startswith("optimizer.") and not with_optimizer or name in unknown | new_kept:
            continue
        if additions.get(sharding.name) in new:
            continue
        key = adam.moment_of(name)
        if key and own and name in stored and reader.dtype(name) != own[0][1].dtype:
            changed[key] = (reader.dtype(name), own[0][1].dtype)
        source = name if reader.of_one_rank else _source(name, stored)
        for box, tensor in own:
            read_into(tensor, reader, source, sharding, box, run.plan.vocab_size)
    reader.wait()
    _start_kept(run, new_kept)
    for key, dtypes in changed.items():
        saved, now = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        log.print_rank_0(f" {key} of the checkpoint is {saved}: converted to {now}")
    if run.fp8:
        run.fp8.loaded()


def _check_last_id(reader: Reader, vocab_size: int) -> None:
    """Raise ValueError where the vocabulary has ids without a row; warn where the last row is of
    zeros: rows that pad a vocabulary are, and in Hugging Face models the one of a padding token."""
    name = _source(WORD_EMBEDDING, set(reader.names()))
    rows, columns = reader.shape(name)
    last = vocab_size - 1
    if rows < vocab_size:
        raise ValueError(
            f"--load {reader.directory}: its vocabulary ends before id {last}, the last of this "
            "run's tokenizer; give the tokenizer that it was trained with, or "
            "--extend-vocabulary where this one adds tokens to that [vocabulary-too-long]"
        )
    if not reader.read(name, ((last, vocab_size), (0, columns))).any():
        log.print_rank_0(
            f"WARNING: --load {reader.directory}: the embedding of id {last}, the last of this "
            "run's tokenizer, is zero, as rows that only pad a vocabulary are; if the tokenizer is "
            "longer than the checkpoint's, --extend-vocabulary gives new rows their first values"
        )


def _begin_state(run: Run, stored: Set[str], of_one_rank: bool) -> set[str]:
    """Set the optimizer's state that a checkpoint of other --train-only lacks to zero; returns the
    names of these tensors. Says of how many parameters, and how many states are left out."""
    keys = adam.STATE_KEYS[run.optimizer.kind]
    names = {spec.name for spec in run.plan.parameters} & stored
    had = {name for name in names for key in keys if f"optimizer.{key}.{name}" in stored}
    trained = {spec.name for spec in run.plan.trained}
    new = names & trained - had if had else set()
    left = had - trained
    if new and not of_one_rank:
        log.print_rank_0(
            f" the checkpoint has no optimizer state of {len(new)} trained parameters: it starts "
            "at zero"
        )
    if left and not of_one_rank:
        log.print_rank_0(
            f" the checkpoint's optimizer state of {len(left)} parameters that --train-only "
            "freezes is left out"
        )
    begun = {f"optimizer.{key}.{name}" for name in new for key in keys}
    for name in begun & (tensors := run.optimizer.tensors()).keys():
        tensors[name].zero_()
    return begun


def _start_kept(run: Run, names: Set[str]) -> None:
    """Start what features keep of the main weights and the checkpoint lacks."""
    run.optimizer.start_kept(names)
    if names:
        keys = ", ".join(sorted({name.split(".", 2)[1] for name in names}))
        log.print_rank_0(f" the checkpoint has no {keys} of its weights: started from them")


def _check_names(run: Run, stored: set[str], reader: Reader) -> None:
    """Raise ForeignCheckpoint where a script's own model lacks a parameter that is `stored`."""
    more = stored - {spec.name for spec in run.plan.parameters}
    more -= set(run.fp8.tensors()) if run.fp8 else set()
    if more:
        raise ForeignCheckpoint(
            f"{reader.directory} has {min(more)}, which the model of the script, "
            f"{run.plan.own_model}, has not; it is of another model [own-model]"
        )


def read_into(
    tensor: torch.Tensor, reader: Reader, source: str, sharding: Sharding, box: Box, vocab_size: int
) -> None:
    """Copy the part `box` of the tensor `source`; of a vocabulary with another padding (for another
    number of ranks) the real rows. Complete when `reader.wait` returns. Dtypes may differ; raises
    ValueError if shapes do."""
    (start, stop), *other_axes = box
    stored = tuple(reader.shape(source))
    expected = tuple(sharding.shape)
    if stored != expected:
        vocabulary = sharding.name in (WORD_EMBEDDING, OUTPUT_LAYER)
        if not vocabulary or stored[1:] != expected[1:] or min(stored[0], expected[0]) < vocab_size:
            raise ValueError(
                f"{source} has shape {list(stored)} in {reader.directory}, and {list(expected)} by "
                "the flags; use those it was saved with [checkpoint-shape-differs]"
            )
        stop = max(start, min(stop, vocab_size))
        tensor[stop - start :].zero_()
        tensor = tensor[: stop - start]
    if reader.dtype(source) == tensor.dtype:
        reader.read_later(source, ((start, stop), *other_axes), tensor)
    else:
        values = reader.read(source, ((start, stop), *other_axes))
        if adam.moment_of(source):
            from megatron.optimizer.precision_aware import convert

            values = convert(source, values, tensor.dtype)
        tensor.copy_(values)


def _source(name: str, stored: set[str]) -> str:
    """The name under which a tensor's most precise values are stored: its main weights if there are
    any, else its weights."""
    main = f"optimizer.fp32_param.{name}"
    if name.startswith("optimizer.fp32_param.") and name not in stored:
        return name.removeprefix("optimizer.fp32_param.")
    return main if main in stored else name


def other_hardware(kernels: Mapping[str, str], device: torch.device, state: RunState) -> str | None:
    """A line where a checkpoint was written with another processor, device, kernel or torch; None
    where not, or where an older checkpoint does not say."""
    now = hardware(kernels, device) | {"torch": f"torch {torch.__version__}"}
    saved = state.hardware and state.hardware | {"torch": f"torch {state.versions.get('torch')}"}
    changed = [f"{before} -> {after}" for before, after in _changes(saved, now)]
    if not changed:
        return None
    return (
        f"the checkpoint was written on other hardware or software ({'; '.join(changed)}): from "
        "here on the run is not bit for bit what it would be there [resume-not-bit-for-bit]"
    )


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in now.items():
        before = saved.get(key, value)
        if isinstance(value, dict) and isinstance(before, dict):
            for operation in sorted(before.keys() & value.keys()):
                if before[operation] != value[operation]:
                    yield f"{operation}: {before[operation]}", value[operation]
        elif before != value:
            yield before, value
