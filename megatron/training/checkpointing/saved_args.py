"""The flags a checkpoint was saved with, compared with those of this run."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

from megatron import log
from megatron.arguments import flags_of, values_of
from megatron.checkpoint import store
from megatron.checkpoint.reading import Checkpoint
from megatron.checkpoint.state import OWN_MODEL
from megatron.config import architecture, saved_flags
from megatron.config.checks.declared import effective
from megatron.config.run_directory import (
    ForeignCheckpoint,
)
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.tree import Config
from megatron.training.checkpointing.resume_checks import architecture_problem

ABSENT = "(absent)"


def saved_config(
    checkpoint: Checkpoint, tree: type[Config] = Config, own_model: bool = False
) -> Config:
    """The configuration a checkpoint was saved with, from its `args` file, with the flags of
    `tree`. Raises Problems, and ForeignCheckpoint for one of a script's own model, unless the
    reader has an `own_model` too."""
    name = checkpoint.state.data.get(OWN_MODEL)
    if name and not own_model:
        raise ForeignCheckpoint(
            f"{checkpoint.directory} is of {name}, a script's own model; only the script, with its "
            "model_provider, can load it: tools/generate.py, evaluate.py and serve.py take a "
            "GPTModel with other modules by --script FILE [own-model]"
        )
    saved = saved_flags.read(checkpoint.directory / store.ARGS, tree)
    for text in saved.notes:
        log.warn_once(f"{checkpoint.directory / store.ARGS}: {text}")
    return saved.config


def check_architecture(
    saved: Config, now: Config, strict: bool, changing: Set[str] = frozenset()
) -> None:
    """Raise ValueError for flags that make it another model, but for the fields `changing`; print
    every other difference. Not `strict` (--finetune): print those of model and tokenizer, since the
    rest is meant to differ."""
    saved, now = effective(saved), effective(now)
    wrong = architecture.differences(saved.model, now.model)
    typed = architecture.typed_differences(saved.model, now.model)
    if strict and (problem := architecture_problem(typed, changing)):
        raise ValueError(problem)
    named = {field for difference in wrong for field in difference.fields}
    compared = [
        name
        for name, flag in flags_of(type(now)).items()
        if not flag.per_run
        and name not in named
        and (strict or hasattr(now.model, name) or hasattr(TokenizerConfig, name))
    ]
    changed = differences(values_of(saved), values_of(now), compared)
    for name, old, new in [
        *((difference.name, difference.saved, difference.now) for difference in wrong),
        *changed,
    ]:
        log.print_rank_0(f" differs from the checkpoint: {name} was {_text(old)}, is {_text(new)}")


def _text(value: object) -> str:
    """A value, of a list its words, as they are typed."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], names: Iterable[str]
) -> list[tuple[str, Any, Any]]:
    """(name, saved value, current value) for each of `names` on which the two disagree, in the
    order of `names`.

    A name that one side lacks has the value ABSENT there; lists and tuples of equal elements agree.
    """

    def plain(value: Any) -> Any:
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    pairs = [
        (name, plain(saved.get(name, ABSENT)), plain(current.get(name, ABSENT))) for name in names
    ]
    return [(name, old, new) for name, old, new in pairs if old != new]
