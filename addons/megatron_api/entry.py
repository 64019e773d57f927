"""`pretrain` as scripts of Megatron-LM of any year call it, and what they call before it."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.metadata
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron import log, program
from megatron.training import script_args

if TYPE_CHECKING:
    from megatron.config.script import ExtraArgsProvider

_DATA, _DATA_OF_2026 = (f"train_valid_test_{of}_provider" for of in ("datasets", "dataset"))
_CALLED = (_DATA, "model_provider", "forward_step_func")
_POSITIONS = (
    *(_DATA, "model_provider", "model_type", "forward_step_func", "process_non_loss_data_func"),
    *("extra_args_provider", "args_defaults", "get_embedding_ranks"),
    *("get_position_embedding_ranks", "non_loss_data_func", "store"),
)
# Files that are not the user's.
_OTHERS = (
    str(Path(program.__file__).parent),
    str(Path(__file__).parent),
    *(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")),
    "<",
)


class PretrainConfig:
    """What `pretrain_cfg_container_from_args` makes of the arguments."""

    def __init__(self, arguments: Any):
        self.arguments = arguments


_parsed: dict[str, Any] = {}  # what the last parse_and_validate_args was given


def parse_and_validate_args(
    extra_args_provider: ExtraArgsProvider | None = None,
    ignore_unknown_args: bool = False,
    args_defaults: Mapping[str, Any] | None = None,
) -> Any:
    """The arguments of the command line, by Megatron's names; `get_args()` is the same object,
    which `pretrain` completes. The program leaves with 2 if the command line is wrong."""
    if ignore_unknown_args:
        raise ValueError(
            "parse_and_validate_args: ignore_unknown_args has no effect here; leave it out "
            "[no-such-argument]"
        )
    program.check_packages()
    from megatron.config.script import Script

    _parsed.update(extra_args_provider=extra_args_provider, args_defaults=args_defaults)
    provider = program.extra_arguments(extra_args_provider, args_defaults)
    script = Script(extra_args_provider=provider, complete=False)
    return script_args.begin_early(program.read_command_line(sys.argv[1:], script))


def pretrain_cfg_container_from_args(args: Any, model_cfg: Any = None) -> PretrainConfig:
    """For `pretrain` to take in place of `args`, those of `parse_and_validate_args`. Raises
    ValueError for a configuration of a model other than the one of the flags."""
    if not _parsed or model_cfg not in (None, args):
        raise ValueError(
            "pretrain_cfg_container_from_args: takes the result of parse_and_validate_args, and "
            "perhaps that of gpt_config_from_args; a model of your own is a model_provider "
            "[no-such-argument]"
        )
    return PretrainConfig(args)


def pretrain(*args: Any, **kwargs: Any) -> None:
    """Train with a script's own functions: `program.pretrain`, whose arguments are those of
    Megatron of 2023 to 2025.

    Or of 2026, with `config` of `pretrain_cfg_container_from_args`: `pretrain(config,
    datasets_provider, model_provider, model_type, forward_step)`; in August `pretrain(config,
    datasets_provider, model_type, forward_step, model_provider=None)`.
    """
    if args and isinstance(args[0], PretrainConfig):
        _, *args_of_2026 = args
        names = [_DATA, "model_type", "forward_step_func", "model_provider"]
        if not any(isinstance(each, enum.Enum) for each in args_of_2026[1:2]):
            names = [_DATA, "model_provider", "model_type", "forward_step_func"]
        kwargs = {**_parsed, "model_provider": None, **kwargs}
        kwargs |= dict(zip([*names, _POSITIONS[4]], args_of_2026, strict=False))
        args = ()
    if len(args) > len(_POSITIONS):
        raise TypeError(f"pretrain: takes {len(_POSITIONS)} arguments by position")
    kwargs |= dict(zip(_POSITIONS, args, strict=False))
    if _DATA_OF_2026 in kwargs:
        kwargs[_DATA] = kwargs.pop(_DATA_OF_2026)
    with contextlib.ExitStack() as stack:
        script = _Script(stack)
        stack.callback(script.end)
        functions = {name for name in _POSITIONS if name in _CALLED and kwargs.get(name)}
        program.pretrain(**kwargs | {name: script.called(kwargs[name]) for name in functions})


class _Script:
    """What holds while a script's own functions run: errors name their line, a process group is
    there on one rank, too, and a CPU run lets `.cuda()` be. `stack` takes it back."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack = stack
        self._begun = False

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, under these rules; so is a function that it returns beside an output."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._begun:
                self._begin()
            try:
                result = function(*args, **kwargs)
            except (ValueError, OSError, ArithmeticError) as error:
                raise _located(error) from error
            if isinstance(result, tuple) and len(result) == 2 and callable(result[1]):
                return result[0], self.called(result[1])
            return result

        return call

    def end(self) -> None:
        """The functions may be called later, of a script that was read for its model."""
        self._begun = True

    def _begin(self) -> None:
        self._begun = True
        import torch

        from megatron.device import device_type

        ctx, args = script_args.context(), script_args.get_args()
        if ctx.world.size == 1 and not args.dry_run:
            ctx.group(ctx.world)
        if device_type(args.device) == "cpu":
            for kind in (torch.Tensor, torch.nn.Module):
                self._stack.enter_context(mock.patch.object(kind, "cuda", _itself))
        if "megatron.core" not in sys.modules:
            return
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version("megatron-core")
            log.warn_once(
                f"megatron.core is this suite's in a script that it runs; megatron-core {version}, "
                "which is installed, is not used [megatron-core-unused]"
            )


def _itself(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _located(error: Exception) -> Exception:
    """The error with the last line of the user's that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [each for each in frames if not each.filename.startswith(_OTHERS)]
    if not lines:
        return error
    return ValueError(f"{lines[-1].filename}, line {lines[-1].lineno}: {error}")
