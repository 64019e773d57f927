"""What a script of one's own gives to `megatron.training.pretrain`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ExtraArgsProvider = Callable[[argparse.ArgumentParser], Any]


@dataclass(frozen=True)
class Script:
    """The functions of a script; None: what the flags say.

    forward_step: `training.script_step` says what it takes and returns. extra_args_provider: adds
    flags to the parser of argparse. datasets_provider: `data.script_datasets`. model_provider:
    `training.script_model`. With `complete` False the functions are not known yet: they may turn
    out to be there.
    """

    forward_step: Callable[..., Any] | None = None
    extra_args_provider: ExtraArgsProvider | None = None
    datasets_provider: Callable[..., Any] | None = None
    model_provider: Callable[..., Any] | None = None
    complete: bool = True

    @property
    def takes_batch(self) -> bool:
        """Is its forward_step called with a batch and the GPT of the flags, as ours is?"""
        assert self.forward_step is not None
        first = next(iter(inspect.signature(self.forward_step).parameters), None)
        return first == "batch" and self.model_provider is None


NO_SCRIPT = Script()  # a program that has none
