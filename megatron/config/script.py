"""What a script of one's own gives to `megatron.training.pretrain`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ExtraArgsProvider = Callable[[argparse.ArgumentParser], Any]


@dataclass(frozen=True)
class Script:
    """The functions of a script; None: what the flags say.

    forward_step: `training.script_step` says what it takes and returns. extra_args_provider: adds
    flags to the parser of argparse. datasets_provider: `data.script_datasets`. model_provider:
    `training.script_model`. arguments: what the script has of `parse_and_validate_args`. With
    `complete` False the functions are not known yet: they may turn out to be there.
    """

    forward_step: Callable[..., Any] | None = None
    extra_args_provider: ExtraArgsProvider | None = None
    datasets_provider: Callable[..., Any] | None = None
    model_provider: Callable[..., Any] | None = None
    arguments: Any = None
    complete: bool = True


NO_SCRIPT = Script()  # a program that has none
