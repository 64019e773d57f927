"""Run lm-eval on a checkpoint without converting it: tools/run_lm_eval.py CHECKPOINT -- ARGUMENTS.
Needs the package lm-eval.

ARGUMENTS are those of the lm_eval command (--tasks, --include_path, --num_fewshot, ...). CHECKPOINT
stands for --model megatron_gpt --model_args checkpoint=CHECKPOINT; without it these are given, too:
  tools/run_lm_eval.py -- --model megatron_gpt --model_args checkpoint=runs/gpt,ckpt_step=500 ...
Exit codes: 0 done, 1 it could not be done, 2 wrong command line; else lm_eval's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron import threads
from megatron.arguments import arg
from megatron.checkpoint.filesystem import CheckpointError
from tools.shared.program import complain, read
from tools.shared.trained_model import DtypeOption


@dataclass(frozen=True, kw_only=True)
class Options(DtypeOption):
    """The command line."""

    checkpoint: str | None = arg(None, position="positional", metavar="CHECKPOINT")
    """run directory, or an iter_XXXXXXX in it"""

    arguments: tuple[str, ...] | None = arg(None, position="after --", metavar="-- ARGUMENTS")
    """arguments of lm_eval"""

    def problems(self) -> list[str]:
        """What is wrong with them."""
        problems = []
        if not self.arguments:
            problems.append(
                "-- ARGUMENTS: is missing; give lm_eval's arguments after --, such as -- --tasks "
                "NAME --include_path DIR "
                "[flag-missing]"
            )
        if self.checkpoint is not None and not os.path.exists(self.checkpoint):
            problems.append(
                f"CHECKPOINT: {self.checkpoint}: no such directory; give the directory that "
                "--save named, or an iter_XXXXXXX in it "
                "[checkpoint-directory-missing]"
            )
        if self.checkpoint is None and self.dtype != "auto":
            problems.append(
                f"--dtype {self.dtype}: needs CHECKPOINT; give that, or dtype={self.dtype} in "
                "--model_args [flag-needs-other-flag]"
            )
        if self.checkpoint is not None and "--model" in (self.arguments or ()):
            problems.append(
                f"CHECKPOINT: {self.checkpoint} and --model: give one of them "
                "[flags-exclude-each-other]"
            )
        return problems

    def words(self) -> list[str]:
        """The arguments of lm_eval."""
        words = list(self.arguments or ())
        if self.checkpoint is None:
            return words
        model_args = f"checkpoint={self.checkpoint},dtype={self.dtype}"
        if "--model_args" in words:
            index = words.index("--model_args") + 1
            words[index : index + 1] = [",".join([model_args, *words[index : index + 1]])]
            return ["--model", "megatron_gpt", *words]
        return ["--model", "megatron_gpt", "--model_args", model_args, *words]


def main(argv: Sequence[str]) -> int:
    """Exit codes as above."""
    options = read(
        Options, argv, prog="run_lm_eval.py", description=__doc__ or "", check=Options.problems
    )
    threads.set_waiting()
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        print(
            f"error: run_lm_eval.py: needs the package lm-eval ({error}); run: pip install lm-eval "
            "(or install this suite with its extra: [eval]) [package-missing]",
            file=sys.stderr,
        )
        return 1
    from . import lm_eval_model  # noqa: F401 (registers megatron_gpt)

    before = sys.argv
    sys.argv = ["lm_eval", *options.words()]
    try:
        cli_evaluate()
    except (ValueError, OSError, CheckpointError) as error:
        complain(error)
        return 1
    finally:
        sys.argv = before
    return 0
