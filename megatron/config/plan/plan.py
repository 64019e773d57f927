"""The plan: everything that follows from the command line, the number of ranks and the
vocabulary size."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron.config.plan import buckets
from megatron.config.plan.batch_size import (
    BatchSizeSchedule,
    EvaluationBatch,
    build_batch_size_schedule,
)
from megatron.config.plan.buckets import Assign
from megatron.config.plan.parameters import (
    Chunk,
    ParameterSpec,
    active_size,
    count_parameters,
    freeze,
    parameter_table,
    stage_table,
)
from megatron.config.skip_ranges import SkipRanges
from megatron.config.tree import Config

if TYPE_CHECKING:
    from megatron.config.parallel import Split

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Targets:
    """Samples that each split must hold."""

    train: int
    valid: int
    test: int


@dataclass(frozen=True)
class Plan:
    """Derived facts: nothing here was typed, all of it follows."""

    world_size: int
    data_parallel_size: int
    vocab_size: int
    padded_vocab_size: int
    parameters: tuple[ParameterSpec, ...]
    batch: BatchSizeSchedule
    evaluation_batch: EvaluationBatch
    train_iters: int
    targets: Targets
    skips: SkipRanges
    by_iteration: bool
    split: str | None
    layers_per_stage: Split  # [stage][chunk], global numbers, of the decoder
    behind: range = range(0)  # the numbers of layers behind the decoder and its final norm
    apart: bool = False  # are these on the virtual stage before the loss?
    num_idle: int = 0  # parameters of experts that are not selected for a token
    own_model: str = ""  # the class, where a script's model is not the GPT of the flags

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, padded vocabulary rows included."""
        return sum(p.size for p in self.parameters)

    @property
    def num_active(self) -> int:
        """Parameters that compute a token: of experts those that its router selects."""
        return self.num_parameters - self.num_idle

    @property
    def num_padding(self) -> int:
        """How many of them are padding: always 0, and as many as the layout asks for."""
        return sum(p.padding for p in self.parameters)

    @property
    def trained(self) -> list[ParameterSpec]:
        """Those that the optimizer updates."""
        return [p for p in self.parameters if p.trained]

    @property
    def first_trained(self) -> int:
        """The decoder's layer with the first trained parameter; those before it have no backward.
        0 also where the embedding is trained."""
        part, number = buckets.unit_of(self.trained[0].name)
        behind = sum(map(len, itertools.chain(*self.layers_per_stage)))
        return {"embedding": 0, "decoder": number}.get(part, behind)

    def chunks(self, stage: int) -> list[Chunk]:
        """What a pipeline stage has of the model: virtual stage c x stages + s is its chunk c."""
        stages = len(self.layers_per_stage)
        chunks = self.layers_per_stage[stage]
        last = stages * len(chunks) - 1
        numbers = range(stage, last + 1, stages)
        return [
            Chunk(layers, number == 0, number == last - self.apart, number == last)
            for number, layers in zip(numbers, chunks, strict=True)
        ]

    def numbers(self, stage: int) -> list[range]:
        """The layers of each of these, those behind the decoder among them."""
        return [
            range(layers.start, self.behind.stop) if final and self.behind else layers
            for layers, _, final, _ in self.chunks(stage)
        ]

    def parameters_of(self, stage: int) -> list[ParameterSpec]:
        """The parameters of a pipeline stage. A script's own model has one stage."""
        if self.own_model:
            return list(self.parameters)
        return stage_table(self.parameters, *self.chunks(stage))

    def consumed_samples(self, iteration: int) -> int:
        """Samples consumed after `iteration`: a function of the flags alone."""
        return self.batch.samples_before(iteration + 1)

    def global_batch_size(self, iteration: int) -> int:
        """Samples of that iteration."""
        return self.batch.global_batch_size(self.batch.samples_before(iteration))

    def scheduled_samples(self, first: int, last: int) -> int:
        """By how many samples iterations first..last move learning rate and weight decay: those
        they consume; where the run or the growth of its batch is counted in iterations, those of a
        full batch each."""
        if self.by_iteration:
            return (last - first + 1) * self.batch.final_global_batch_size
        return self.consumed_samples(last) - self.consumed_samples(first - 1)

    def num_microbatches(self, iteration: int) -> int:
        """Micro-batches of that iteration on each data-parallel rank."""
        return self.batch.num_microbatches(self.batch.samples_before(iteration))


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """The next multiple of `divisible_by` x TP, so that every rank holds as many rows."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def data_parallel_size(config: Config, world_size: int) -> int:
    """Data-parallel size: world size / (TP x PP x CP)."""
    p = config.parallel
    model = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
    return max(1, world_size // model)


def batch_schedule(config: Config, world_size: int) -> BatchSizeSchedule:
    """The global batch size over the run. Raises ValueError as `build_batch_size_schedule` does."""
    t = config.training
    return build_batch_size_schedule(
        micro_batch_size=t.micro_batch_size,
        global_batch_size=t.global_batch_size,
        data_parallel_size=data_parallel_size(config, world_size),
        rampup_batch_size=t.rampup_batch_size,
        rampup_micro_batches=t.rampup_micro_batches,
        step_batch_size_schedule=t.step_batch_size_schedule,
        seq_length=config.model.seq_length,
        decrease_batch_size_if_needed=t.decrease_batch_size_if_needed,
    )


def evaluation_batch(config: Config, batch: BatchSizeSchedule) -> EvaluationBatch:
    """The batch of validation and test: that of the end of training, where no flag says
    otherwise."""
    t = config.training
    return EvaluationBatch(
        t.eval_global_batch_size or batch.final_global_batch_size,
        t.eval_micro_batch_size or batch.micro_batch_size,
        batch.data_parallel_size,
    )


def split_string(config: Config) -> str | None:
    """The split as Megatron prints it: None with per-split paths, equal parts of synthetic data."""
    d = config.data
    if config.packed or not (d.mock_data or d.data_path or d.data_args_path or d.split):
        return None
    return "1,1,1" if d.mock_data else d.split or "969, 30, 1"


def target_sizes(config: Config, batch: BatchSizeSchedule, train_iters: int) -> Targets:
    """Samples needed: each validation reads new ones, every --eval-interval iterations and once at
    the end."""
    t = config.training
    evaluation = t.eval_iters * evaluation_batch(config, batch).global_batch_size
    evaluations = 1
    if t.eval_iters and not t.skip_train:
        omitted = max(0, (t.start_eval_at_iter or 0) - 1) // t.eval_interval
        evaluations += max(0, train_iters // t.eval_interval - omitted)
    train = batch.samples_before(train_iters + 1) if t.train_samples is None else t.train_samples
    return Targets(
        max(train, batch.samples_before(train_iters + 1)), evaluations * evaluation, evaluation
    )


def layer_split(config: Config) -> Split:
    """The layers of each stage's chunks. Raises ValueError with flags, values and remedy where
    there is no such split."""
    p = config.parallel
    m = config.model
    if not p.splits_layers:
        return ((range(m.num_layers),),)
    from megatron.config.plan.stages import only_one_split, split

    parts = (m.hybrid_layer_pattern or "").split("/")[0].split("|")
    bordered = len(parts) > 1 and p.pipeline_model_parallel_size > 1
    only_one_split(p, bordered)
    if bordered:
        from megatron.config.plan.pipeline_layout import deal

        typed = f"--hybrid-layer-pattern {m.hybrid_layer_pattern}"
        return deal(list(map(len, parts)), p.pipeline_model_parallel_size, typed)
    layout = p.pipeline_model_parallel_layout
    if layout is None:
        return split(m.num_layers, p)
    from megatron.config.plan.pipeline_layout import parse_layout

    stages = p.pipeline_model_parallel_size, p.num_virtual_stages_per_pipeline_rank
    return parse_layout(layout, m.num_layers, *stages, len(m.mtp_layers))


def is_apart(config: Config) -> bool:
    """Are the layers behind the decoder on the virtual stage before the loss?"""
    layout = config.parallel.pipeline_model_parallel_layout
    if layout is None:
        return False
    from megatron.config.plan.pipeline_layout import mtp_is_apart

    return mtp_is_apart(layout)


def embedding_stages(config: Config) -> list[int]:
    """The pipeline stages that have the word embedding, where it is used behind the first."""
    last = config.parallel.pipeline_model_parallel_size - 1
    final = [last - is_apart(config)] * (config.model.mtp_num_layers is not None)
    return sorted({0, *final, *[last] * config.model.tied})


def make_plan(config: Config, world_size: int, vocab_size: int) -> Plan:
    """The plan of a command line that `megatron.config.checks.rules` found no problem in."""
    t = config.training
    p = config.parallel
    batch = batch_schedule(config, world_size)
    train_iters = (
        t.train_iters
        if t.train_iters is not None
        else batch.train_iters_from_samples(t.train_samples or 0)
    )
    padded = padded_vocab_size(
        vocab_size, config.model.make_vocab_size_divisible_by, p.tensor_model_parallel_size
    )
    make_scheme = config.added("init_scheme")
    scheme = make_scheme(config.model) if make_scheme else None
    table = parameter_table(config.model, padded, vocab_size, scheme)
    parameters = freeze(table, config.optimizer.train_only)
    skips = SkipRanges()
    if t.train_range_to_skip or t.iterations_to_skip:
        from megatron.config.skip_flags import parse_skips

        singles = t.iterations_to_skip
        skips = parse_skips(t.train_range_to_skip, train_iters, iterations_to_skip=singles).ranges
    return Plan(
        world_size=world_size,
        data_parallel_size=data_parallel_size(config, world_size),
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        parameters=tuple(parameters),
        batch=batch,
        evaluation_batch=evaluation_batch(config, batch),
        train_iters=train_iters,
        targets=target_sizes(config, batch, train_iters),
        skips=skips,
        by_iteration=not batch.is_constant
        and (
            config.training.train_iters is not None
            or config.training.rampup_micro_batches is not None
        ),
        split=split_string(config),
        layers_per_stage=layer_split(config),
        behind=config.model.mtp_layers,
        apart=is_apart(config),
        num_idle=sum(spec.size - active_size(config.model, spec) for spec in parameters),
    )


def parameters_per_rank(config: Config, plan: Plan, stage: int = 0) -> int:
    """Parameters on each tensor-parallel rank of a pipeline stage, padded vocabulary rows
    included."""
    return count_parameters(plan.parameters_of(stage), rank_axes(config))


def rank_axes(config: Config) -> dict[str, int]:
    """Sizes of the axes over which parameters are split."""
    p = config.parallel
    return {
        "tp": p.tensor_model_parallel_size,
        "ep": p.expert_model_parallel_size,
        "etp": p.expert_tensor_parallel,
    }


def bucket_size(config: Config, plan: Plan, stage: int = 0) -> int | None:
    """Elements after which a gradient bucket of a pipeline stage is full; None: never.

    Buckets help to overlap, and keep what a reduce-scatter takes in addition to the buffer small.
    """
    p = config.parallel
    if shares_units(config, plan):
        return None
    if p.ddp_num_buckets is not None:
        trained = [spec for spec in plan.parameters_of(stage) if spec.trained]
        return -(-count_parameters(trained, rank_axes(config)) // p.ddp_num_buckets)
    if p.ddp_bucket_size is None and (p.overlap_grad_reduce or p.shares_optimizer):
        return max(
            buckets.DEFAULT_ELEMENTS, 1_000_000 * plan.data_parallel_size * p.context_parallel_size
        )
    return p.ddp_bucket_size


def assignment(config: Config) -> Assign | None:
    """How whole parameters are assigned to ranks; None: all are shared in equal ranges."""
    muon = config.optimizer.optimizer == "muon"
    if not muon and config.parallel.zero_partition != "whole-params":
        return None
    from megatron.config.plan import zero_partition

    if muon:
        return partial(zero_partition.whole_matrices, config.muon)
    return lambda params: zero_partition.whole_parameters(
        [p.name for p in params], [p.local_shape for p in params], params[0].shards
    )


def shares_units(config: Config, plan: Plan) -> bool:
    """Do ranks share gradients, so that those of a unit have buckets of their own?"""
    ranks = max(shards(config, plan), expert_shards(config, plan))
    return config.parallel.shares_gradients and ranks > 1


def by_muon(config: Config, spec: ParameterSpec) -> bool:
    """Does Muon update this parameter?"""
    return config.optimizer.optimizer == "muon" and spec.matrices is not None


def shards(config: Config, plan: Plan) -> int:
    """Ranks that share one copy of main weights and optimizer state."""
    p = config.parallel
    ranks = plan.data_parallel_size * p.context_parallel_size
    return ranks // p.num_distributed_optimizer_instances if p.shares_optimizer else 1


def expert_shards(config: Config, plan: Plan) -> int:
    """The same of the weights of experts."""
    p = config.parallel
    ranks = p.expert_replicas(plan.world_size)
    return ranks // p.num_distributed_optimizer_instances if p.shares_optimizer else 1


def fp8_layers(
    config: Config, plan: Plan, stage: int, by_library: bool = False
) -> list[ParameterSpec]:
    """The weights of a pipeline stage whose GEMMs are in FP8 by this suite's kernels, or by
    Transformer Engine's."""
    if config.precision.fp8 is None:
        return []
    library = config.kernels.transformer_impl == "transformer_engine"
    return [
        spec
        for spec in plan.parameters_of(stage)
        if ".linear_" in spec.name and spec.name.endswith(".weight")
        if (library and "ep" not in dict(spec.splits)) is by_library
    ]
