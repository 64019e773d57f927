"""The contract of a feature: what some runs do beside training. megatron/features/registry.py lists
them; each can be deleted with its folder and its two lines there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron.arguments import Extension

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.config.command_line import CommandLine
    from megatron.config.model import ModelConfig
    from megatron.config.plan.parameters import Scheme
    from megatron.config.plan.plan import Plan
    from megatron.config.tree import Config
    from megatron.data.packed.sample_formats import GeneratedSamples, SampleFormat
    from megatron.training.hook import Hook
    from megatron.training.launch.initialize import Runtime
    from megatron.training.logging.iteration import Columns, LogFormat, ResultWriter
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


class Feature(Extension):
    """A frozen dataclass with the feature's flags (fields made by `arguments.arg`) and, of these
    points, those that it needs. It is read before torch is imported: what is heavy is imported
    inside the points. `adds` has the values that it adds to flags of the core; what stands behind
    each is a point here."""

    # The module of tools/ with the commands that it adds to tools/convert_checkpoint.py and its
    # families of Hugging Face models (tools/convert/options.py).
    converter: ClassVar[str] = ""

    def check(self, facts: Facts) -> Iterable[str]:
        """One line for each problem of its flags that their declarations do not say."""
        return ()

    def missing(self) -> Iterable[str]:
        """One line for each file that its flags name and a run would not find here."""
        return ()

    @staticmethod
    def sample_formats() -> Sequence[SampleFormat]:
        """For --packed-samples: its formats of files beside .bin/.idx pairs."""
        return ()

    def generated_samples(self, name: str) -> GeneratedSamples | None:
        """The samples, if --dummy-data has a value that this feature `adds`."""
        return None

    @staticmethod
    def converter_command(load: str) -> str | None:
        """The command and source of tools/convert_checkpoint.py with which it reads a directory
        that --load names; None if it cannot."""
        return None

    def dry_run(self, line: CommandLine, plan: Plan, forward_step: ForwardStep) -> Iterable[str]:
        """Lines that --dry-run prints after the plan."""
        return ()

    def init_scheme(self, model: ModelConfig) -> Scheme | None:
        """The initial values, if --init-scheme has a value that this feature adds."""
        return None

    def prepare(self) -> None:
        """What can fail before the ranks connect. Raises ValueError."""

    @property
    def step_numbers(self) -> int:
        """How many numbers its `StepCounter`s add to the sum over ranks of each step."""
        return 0

    def log_format(self, config: Config, plan: Plan, runtime: Runtime | None) -> LogFormat | None:
        """The lines of the run, if --log-format has a value that this feature `adds`."""
        return None

    def argument_table(self, values: dict[str, Any], foreign: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as a run prints and stores them; `foreign`: those typed that
        `other_flags` has read."""
        return values

    def counts_subsets(self, config: Config) -> bool:
        """Does it need the tokens and losses of each subset of the data?"""
        return False

    def columns(self, config: Config, plan: Plan) -> Columns | None:
        """What it adds to the metrics of each iteration."""
        return None

    @property
    def may_veto(self) -> bool:
        """Whether a hook of it is among `Run.before_update`, so that each step has its norm."""
        return False

    @property
    def host_copies(self) -> Mapping[str, int]:
        """How many copies of the run a rank keeps in host memory, by the flag that asks for
        them."""
        return {}

    def writers(self, config: Config, world_size: int) -> Iterable[ResultWriter]:
        """Where the last rank stores results, beside --metrics-file. Raises ValueError or OSError
        where one cannot be opened."""
        return ()

    @property
    def profile_folder(self) -> str | None:
        """Where it shows profiles, if it does."""
        return None

    @classmethod
    def read_points(cls, path: str) -> Iterable[tuple[str, int, float]] | None:
        """What it wrote of a run under `path`, in that order: (name, iteration, value), named as
        the fields of `analysis.log_reader.Record`, or the split that the loss is of; None where it
        knows nothing of the path."""
        return None

    def hooks(self, loop: Loop) -> Iterable[Hook]:
        """What it does in the training loop, if the run asks for it. A hook says itself where it
        stands among the others (`Hook.before`, `Hook.after`)."""
        return ()


def features_of(config: Config) -> Iterator[Feature]:
    """The features of the program, whether the run asks for them or not."""
    return (part for part in vars(config).values() if isinstance(part, Feature))
