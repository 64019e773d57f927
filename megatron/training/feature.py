"""The contract of a feature: what some runs do beside training. Each is in the folder of its
feature.py, by which megatron/features/registry.py finds it, and can be deleted with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron.config.tree import Config, FeatureFlags
from megatron.data.sample_formats import SampleFormat

if TYPE_CHECKING:
    from megatron.checkpoint.reading import Checkpoint
    from megatron.checkpoint.sharded_reader import Reader
    from megatron.config.command_line import CommandLine
    from megatron.config.plan.plan import Plan
    from megatron.data.sources import DataSource
    from megatron.data.tokenizers.base import Tokenizer
    from megatron.training.hook import Hook
    from megatron.training.logging.iteration import ResultWriter
    from megatron.training.logging.training_log import TrainingLog
    from megatron.training.run import Run
    from megatron.training.save_policy import SavePolicy
    from megatron.training.step import ForwardStep


class Loop(NamedTuple):
    """What a hook may use: the run as it was loaded, the model's forward step, the log, when this
    process started, and what saves."""

    run: Run
    forward_step: ForwardStep
    lines: TrainingLog
    started: float
    saving: SavePolicy


class Feature(FeatureFlags):
    """A frozen dataclass with the feature's flags (fields made by `arguments.arg`) and, of these
    points and those of `FeatureFlags`, those that it needs. It is read before torch is imported:
    what is heavy is imported inside the points. `adds` has the values that it adds to flags of the
    core, each with what makes a `LogFormat` (--log-format) of configuration, plan and `Runtime`, a
    `Scheme` (--init-scheme) of the model's flags, or `GeneratedSamples` (--dummy-data). What it
    adds to tools/convert_checkpoint.py is a converter.py beside it."""

    # for --packed-samples: its formats of files beside .bin/.idx pairs
    sample_formats: ClassVar[Sequence[SampleFormat]] = ()

    def tokenizer_problems(self, tokenizer: Tokenizer, line: CommandLine) -> Iterable[str]:
        """One line for each problem of the run's tokenizer, before torch is loaded. It may set what
        the tokenizer `extends`."""
        return ()

    def extends(self, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
        """Does `reader` have what a checkpoint lacks whose tokenizer was another? Both are results
        of `Tokenizer.identity`."""
        return False

    def reader(self, reader: Reader, run: Run, checkpoint: Checkpoint) -> Reader:
        """What reads the tensors of a checkpoint for the run, if not `reader`, which is closed."""
        return reader

    def dry_run(self, line: CommandLine, plan: Plan, forward_step: ForwardStep) -> Iterable[str]:
        """Lines that --dry-run prints after the plan."""
        return ()

    def stage_lines(self, line: CommandLine) -> Sequence[CommandLine]:
        """The runs that this process makes in place of `line`, each from the checkpoint with which
        the one before ended (`Hook.ends_stage`); none: only `line`."""
        return ()

    def data_source(self, source: DataSource, config: Config) -> DataSource:
        """Where training samples come from, if not from `source`."""
        return source

    def prepare(self, config: Config) -> None:
        """What can fail before the ranks connect. Raises ValueError."""

    def writers(self, config: Config, world_size: int) -> Iterable[ResultWriter]:
        """Where the last rank stores results, beside --metrics-file. Raises ValueError or OSError
        where one cannot be opened."""
        return ()

    @classmethod
    def read_points(cls, path: str) -> Iterable[tuple[str, int, float]] | None:
        """What it wrote of a run under `path`, in that order: (name, iteration, value), named as
        the fields of `analysis.log_reader.Record`, or the split that the loss is of; None where it
        knows nothing of the path."""
        return None

    def built(self, run: Run) -> None:
        """The run was built, here or in a traced dry run; what it changes of the step itself."""

    def hooks(self, loop: Loop) -> Iterable[Hook]:
        """What it does in the training loop, if the run asks for it. A hook says itself where it
        stands among the others (`Hook.before`, `Hook.after`)."""
        return ()


def features_of(config: Config) -> Iterator[Feature]:
    """The features of the program, whether the run asks for them or not."""
    return (group for group in vars(config).values() if isinstance(group, Feature))


def data_source(config: Config) -> DataSource:
    """Where samples come from: the source that the data flags choose, or what a feature makes of
    it."""
    from megatron.data.sources import source_of

    source = source_of(config.data)
    # those that name the data first: what others make of a source they make of theirs, too
    for feature in sorted(features_of(config), key=lambda each: not each.names_data):
        source = feature.data_source(source, config)
    return source
