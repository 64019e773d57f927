"""What a script asks of the run: `get_args()`, all arguments by Megatron's names with those of the
script itself, and `get_tokenizer()`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.training import current_run

if TYPE_CHECKING:
    from megatron.config.command_line import CommandLine
    from megatron.config.plan.plan import Plan
    from megatron.data.tokenizers.base import Tokenizer
    from megatron.parallel.context import ParallelContext
    from megatron.timers import Timers
    from megatron.training.run import Progress

# How far the run is: these change while it trains.
_COUNTERS = {
    "curr_iteration": "iteration",
    "consumed_train_samples": "consumed_train_samples",
    "consumed_valid_samples": "consumed_valid_samples",
    "skipped_train_samples": "skipped_train_samples",
}
# Names that these arguments have in Megatron's TransformerConfig.
_OF_CONFIG = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "gated_linear_unit": "swiglu",
    "pipeline_dtype": "params_dtype",
}

RENAMED = _COUNTERS.keys() | _OF_CONFIG.keys()


class Arguments(argparse.Namespace):
    """Arguments of the suite can be read, those of the script (`own`) be written too.

    `iteration` (the one this run goes on from), `curr_iteration` (iterations done) and the numbers
    of samples are those of `progress`, 0 before it is set.
    """

    __slots__ = ("_fixed", "_progress")  # not among the arguments, which scripts print
    _fixed: frozenset[str]
    _progress: Progress

    def __init__(self, values: Mapping[str, Any], own: Mapping[str, Any]):
        super().__init__(**{"iteration": 0, **values, **own})
        self._fixed = frozenset({*values, *_COUNTERS, "iteration"} - {*own})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in getattr(self, "_fixed", ()):
            raise AttributeError(
                f"get_args().{name}: model and plan were made from it before; give it on the "
                "command line"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _COUNTERS:
            return getattr(getattr(self, "_progress", None), _COUNTERS[name], 0)
        if name in _OF_CONFIG:
            return getattr(self, _OF_CONFIG[name])
        raise AttributeError(
            f"get_args().{name}: there is no such argument; add it with extra_args_provider, or "
            "take another one of docs/flags.md",
            name=name,
            obj=self,
        )

    def become(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> Arguments:
        """Itself with other arguments; those that were written keep their values."""
        written = {name: v for name, v in vars(self).items() if name not in self._fixed}
        new = Arguments(values, {**own, **written})
        vars(self).clear()
        vars(self).update(vars(new))
        self._fixed = new._fixed
        return self

    def follow(self, progress: Progress) -> None:
        """The run has been loaded, and moves `progress`."""
        self._progress = progress
        if "iteration" in self._fixed:
            vars(self)["iteration"] = progress.iteration


_run: dict[str, Any] = {}  # of this process


def begin_early(line: CommandLine) -> Arguments:
    """The arguments before the run has begun, with what the command line says."""
    values = {name: value for name, value in _values(line).items() if name not in _COUNTERS}
    _run["args"] = _run["early"] = Arguments(values, vars(line.extra) if line.extra else {})
    return _run["args"]


def _values(line: CommandLine) -> dict[str, Any]:
    """Of every flag its value or default, Megatron's flags that have no effect here too."""
    from megatron.arguments import flags_of, values_of
    from megatron.config.command_line import foreign_flags

    flags = [*foreign_flags(line.tree).flags, *flags_of(line.tree).values()]
    values = {flag.name: flag.default for flag in flags}
    values |= line.foreign | values_of(line.config)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def begin(
    line: CommandLine, plan: Plan, distributed_backend: str, tokenizer: Tokenizer, rank: int
) -> None:
    """Make these the arguments and the tokenizer of the run, of this rank.

    What a script holds already of `begin_early` becomes them, with what it has written into it.
    `params_dtype` is a torch.dtype.
    """
    import torch

    from megatron.training.logging import argument_dump

    config = line.config
    values = _values(line)
    values |= argument_dump.dumped_values(
        config, plan, distributed_backend, line.foreign, rank=rank
    )
    values |= {
        "padded_vocab_size": plan.padded_vocab_size,
        "params_dtype": getattr(torch, config.precision.params_dtype),
    }
    values = {name: value for name, value in values.items() if name not in _COUNTERS}
    own = vars(line.extra) if line.extra else {}
    early = _run.get("early")
    _run["args"] = Arguments(values, own) if early is None else early.become(values, own)
    _run["tokenizer"] = tokenizer


def connected(timers: Timers, ctx: ParallelContext) -> None:
    """Make these the timers and the ranks of the run."""
    _run["timers"] = timers
    _run["context"] = ctx


def set_progress(progress: Progress) -> None:
    """The run has been loaded, and moves `progress`."""
    _of_run("args").follow(progress)


def get_args() -> Arguments:
    """The arguments of the run. Raises RuntimeError before it has begun."""
    return _of_run("args")


def context() -> ParallelContext:
    """The ranks of the run. Raises RuntimeError before they are connected."""
    return _of_run("context")


def has_context() -> bool:
    """Are the ranks connected?"""
    return "context" in _run


def get_tokenizer() -> Tokenizer:
    """The tokenizer of the run. Raises RuntimeError before it has begun."""
    return _of_run("tokenizer")


def run_timers() -> Timers:
    """The timers of the run. Raises RuntimeError before it has begun."""
    return _of_run("timers")


def _of_run(name: str) -> Any:
    if name not in _run:
        raise RuntimeError(f"{name} of the run: there are none before the run has begun")
    return _run[name]


def _hear(fact: str, *values: Any) -> None:
    """What `current_run` was told."""
    if fact == "begin":
        begin(*values)
    elif fact == "connected":
        connected(*values)
    else:
        set_progress(*values)


current_run.listen(_hear)
