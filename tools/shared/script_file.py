"""What a script of a user's own gives to `pretrain`, without training."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from megatron import program
from megatron.config.script import ExtraArgsProvider, Script


class _Called(BaseException):
    """The script has called pretrain."""

    def __init__(self, script: Script):
        super().__init__()
        self.script = script


def _pretrain(  # in place of `program.pretrain`
    train_valid_test_datasets_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    **_: Any,
) -> None:
    raise _Called(
        Script(
            forward_step_func,
            program.extra_arguments(extra_args_provider, args_defaults),
            train_valid_test_datasets_provider,
            model_provider,
        )
    )


def _parse(*_: Any, **__: Any) -> NoReturn:
    """In place of `program.read_command_line`: the flags are those of the checkpoint."""
    raise RuntimeError(
        "parse_and_validate_args has no command line here; give pretrain the providers, "
        "extra_args_provider and args_defaults instead"
    )


def script_of(path: str) -> Script:
    """Run a script as far as its call of `pretrain`; what it gives to it. Raises ValueError where
    it fails before, or does not call it."""
    real, words, search_path = (
        (program.pretrain, program.read_command_line),
        sys.argv,
        sys.path,
    )
    sys.argv = [path]
    sys.path = [str(Path(path).resolve().parent), *sys.path]
    program.pretrain, program.read_command_line = _pretrain, _parse
    try:
        runpy.run_path(path, run_name="__main__")
    except _Called as call:
        return call.script
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--script {path}: {type(error).__name__}: {error} [script-fails]"
        ) from error
    finally:
        (program.pretrain, program.read_command_line), sys.argv, sys.path = (
            real,
            words,
            search_path,
        )
    raise ValueError(
        f"--script {path}: does not call megatron.training.pretrain; give the script that trained "
        "the model [script-fails]"
    )
