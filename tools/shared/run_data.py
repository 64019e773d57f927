"""The training data of a run, opened from its directory or its flags: samples, their order, who
reads them."""

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron import object_stores
from megatron.checkpoint.skip_log import Position, Skips
from megatron.config import command_line, saved_flags
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.load_order import newest
from megatron.config.plan.plan import Plan, make_plan
from megatron.config.run_directory import iteration_directory, iterations
from megatron.config.skip_ranges import SkipRanges
from megatron.config.tree import Config
from megatron.data.ledger import MASK, sample_hash, tokens_hash
from megatron.data.request import Before, DataRequest
from megatron.data.sample_lookup import Dataset, TokenSpan, is_packed
from megatron.data.sampler import Sampler, SequentialSampler
from megatron.data.tokenizers.build import Tokenizer, tokenizer_from
from megatron.features.registry import RunConfig
from megatron.small_files import read_json
from megatron.training.feature import data_source


@dataclass(frozen=True)
class Reading:
    """The training data of a run and who reads them. `shift`: samples consumed beyond what the
    batch sizes say."""

    config: Config
    plan: Plan
    dataset: Dataset
    tokenizer: Tokenizer
    shift: int

    def samplers(self) -> list[Sampler]:
        """The sampler of each data-parallel rank."""
        d = self.config.data
        sizes = (len(self.dataset), self.config.training.micro_batch_size)
        ranks = range(self.plan.data_parallel_size)
        if is_packed(self.dataset):
            return [self.dataset.sampler(sizes[1], rank, len(ranks)) for rank in ranks]
        if d.dataloader_type == "cyclic":
            # torch, which takes longer to load than all the rest
            from megatron.data.cyclic_sampler import CyclicSampler

            return [CyclicSampler(*sizes, rank, len(ranks), d.data_sharding) for rank in ranks]
        return [SequentialSampler(*sizes, rank, len(ranks)) for rank in ranks]

    def tokens(self, sample: int) -> np.ndarray:
        """The token ids of a sample; of packed samples, of that row."""
        return np.atleast_2d(self.dataset[sample])[0]

    def name_of(self, prefix: str) -> str:
        """What a data set of the run is called: one in an object store by its URL."""
        if not self.config.data.object_storage_cache_path:
            return prefix
        name: str = object_stores.part("url_names").with_urls(prefix, self.config.data)
        return name

    def spans_of(self, sample: int) -> list[TokenSpan]:
        """Where the tokens of a sample are stored; the prefixes are as of `name_of`."""
        spans = self.dataset.spans_of(sample)
        return [replace(span, prefix=self.name_of(span.prefix)) for span in spans]

    def pieces(self, sample: int) -> Iterator[tuple[TokenSpan, int, np.ndarray]]:
        """The pieces of a sample, each with its place in it and its ids."""
        tokens = self.tokens(sample)
        position = 0
        for span in self.spans_of(sample):
            yield span, position, tokens[position : position + span.length]
            position += span.length

    def text(self, ids: np.ndarray) -> str | None:
        """The text of ids that the tokenizer has; None of others, and of none."""
        known = bool(len(ids)) and 0 <= int(ids.min()) <= int(ids.max()) < self.tokenizer.vocab_size
        return self.tokenizer.detokenize(ids.tolist()) if known else None

    def first_sample(self, iteration: int) -> int:
        """Samples consumed before an iteration."""
        return self.plan.batch.samples_before(iteration) + self.shift

    def batch(self, iteration: int, samplers: Sequence[Sampler]) -> Iterator[tuple[int, int, int]]:
        """(sample, rank, micro-batch) of a global batch, micro-batch by micro-batch and rank by
        rank."""
        first = self.first_sample(iteration)
        for micro_batch in range(self.plan.num_microbatches(iteration)):
            for rank, sampler in enumerate(samplers):
                for sample in sampler.micro_batch(first + micro_batch * sampler.step):
                    yield sample, rank, micro_batch


def hash_of(reading: Reading, iteration: int, samplers: Sequence[Sampler]) -> int:
    """The hash of an iteration's samples as the ledger has it, read from the data."""
    return (
        sum(
            sample_hash(sample, tokens_hash(reading.dataset[sample]))
            for sample, _, _ in reading.batch(iteration, samplers)
        )
        & MASK
    )


def open_run(
    run: str | None,
    flags: Sequence[str] | None,
    iteration: int | None = None,
    world_size: int | None = None,
) -> Reading:
    """The data of a run: of its directory `run`, as `iteration` was read, or of its `flags`;
    `world_size`: number of ranks, if not the run's (with flags: 1). Raises ValueError."""
    with contextlib.redirect_stdout(io.StringIO()):  # what training would log of its data
        return _opened(run, flags, iteration, world_size)


def _opened(
    run: str | None, flags: Sequence[str] | None, iteration: int | None, world_size: int | None
) -> Reading:
    state: dict[str, Any] = {}
    if flags is not None:
        # a dry run: nothing is written, so what stands in --save is no obstacle
        words = [*flags, "--dry-run", "--world-size", str(world_size or 1)]
        line = command_line.read(words, {}, tree=RunConfig)
        config = line.config
        world_size = line.world_size
    elif run is None:
        raise ValueError(
            "no run: give the directory that --save named, or -- and the flags of pretrain_gpt.py "
            "[flag-missing]"
        )
    else:
        folder = checkpoint_after(run, iteration)
        state = read_json(folder / "state.json")
        config = saved_flags.read(folder / "args", RunConfig).config
        world_size = world_size or state["layout"]["world_size"]
    tokenizer = tokenizer_from(config.data)
    plan = make_plan(config, world_size, tokenizer.vocab_size)
    if state.get("skipped") is not None:
        plan = replace(plan, skips=_skips(folder, state, plan.skips))
    order = state["data"]["order"]["train"] if state else None
    before = Before(order, state["consumed_train_samples"]) if order else None
    request = DataRequest(
        sizes=(plan.targets.train, 0, 0),
        sequence_length=config.model.seq_length,
        seed=config.training.seed,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        check_tokens=False,
        before=before,
        micro_batch_size=config.training.micro_batch_size,
        global_batch_size=plan.batch.final_global_batch_size,
    )
    dataset, _, _ = data_source(config).build(config.data, request, [])
    assert dataset is not None, "--train-iters is at least 1"
    shift = (
        state["consumed_train_samples"] - plan.consumed_samples(state["iteration"]) if state else 0
    )
    return Reading(config, plan, dataset, tokenizer, shift)


def _skips(folder: Path, state: dict[str, Any], typed: SkipRanges) -> SkipRanges:
    """What a run has skipped up to a checkpoint, and from there on will skip by flags and
    records."""
    done = state["iteration"]
    here = Position.of(done, state["consumed_train_samples"], state["skipped"])
    skips = Skips.read(CheckpointConfig(load=str(folder)), typed, here, state["skips"])
    to_come = ((max(first, done + 1), last) for first, last in skips.all().ranges if last > done)
    return here.skipped.cut(done).joined(to_come)


def checkpoint_after(run: str, iteration: int | None) -> Path:
    """The checkpoint whose flags an iteration ran with: the first one that has it behind it, else
    the newest."""
    last = newest(run)
    if last is None:
        raise ValueError(
            f"{run}: no checkpoint there, whose flags would say what was read; give the directory "
            "that --save named, or -- and the flags of pretrain_gpt.py "
            "[checkpoint-missing]"
        )
    after = [
        number
        for number in iterations(last.parent)
        if iteration is not None and iteration <= number <= int(last.name[5:])
    ]
    return iteration_directory(last.parent, after[0]) if after and last != Path(run) else last


def find_document(reading: Reading, document: int, prefix: str | None) -> dict[str, Any]:
    """Every sample of the run that shows the document, with its iteration."""
    known = {reading.name_of(path): path for path in reading.dataset.prefixes()}
    if prefix is None and len(known) == 1:
        (prefix,) = known
    if prefix not in known:
        raise ValueError(
            f"--prefix {prefix or 'is missing'}: the run reads {', '.join([*known][:20])}; give "
            "one of them "
            "[value-not-a-choice]"
        )
    with object_stores.urls_in_errors(reading.config.data):
        shown = reading.dataset.samples_showing(known[prefix], document)
    return {"document": document, "dataset": prefix, "shown": list(place_samples(reading, shown))}


def place_samples(reading: Reading, shown: dict[int, int]) -> Iterator[dict[str, Any]]:
    """(iteration, sample, rank, micro-batch, tokens of the document) in the order of training."""
    plan = reading.plan
    samplers = reading.samplers()
    if isinstance(samplers[0], SequentialSampler):
        unit = reading.config.training.micro_batch_size if is_packed(reading.dataset) else 1
        iterations: Iterable[int] = sorted(
            {
                plan.batch.iterations_within(sample * unit - reading.shift) + 1
                for sample in shown
                if sample * unit >= reading.shift
            }
        )
    else:
        iterations = range(1, plan.train_iters + 1)
    for iteration in iterations:
        if iteration > plan.train_iters:
            return
        for sample, rank, micro_batch in reading.batch(iteration, samplers):
            if sample in shown:
                yield {
                    "iteration": iteration,
                    "sample": sample,
                    "dp_rank": rank,
                    "micro_batch": micro_batch,
                    "tokens": shown[sample],
                    "skipped": plan.skips.is_skipped(iteration),
                }


def show_samples(report: dict[str, Any]) -> None:
    """For a reader."""
    print(
        f"{report['dataset']} document {report['document']}: in {len(report['shown'])} samples of "
        "the run"
    )
    for sample in report["shown"]:
        print(
            f"iteration {sample['iteration']}: {sample['tokens']} tokens in sample "
            f"{sample['sample']}, rank {sample['dp_rank']}, micro-batch "
            f"{sample['micro_batch']}{', skipped: not read' if sample['skipped'] else ''}"
        )
