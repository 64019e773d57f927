"""The options of programs that use a trained model: which checkpoint, its vocabulary, the device.
Imports no torch before the model is opened."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.arguments import arg
from megatron.config.precision import DTYPES
from megatron.config.script import NO_SCRIPT
from megatron.config.tokenizer import TOKENIZER_FILES
from megatron.inference.generate import checkpoint_problem, load_model

if TYPE_CHECKING:
    from megatron.inference.load_model import TrainedModel

FLAGS = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")
FILES = ("vocab_file", "merge_file", "tokenizer_model")


@dataclass(frozen=True, kw_only=True)
class DtypeOption:
    """The dtype of a trained model."""

    dtype: str = arg("auto", choices=DTYPES)
    """of the model; on a CPU its matrices are stored in it, and all is computed in fp32 (auto: that
    of training, on a CPU fp32)"""


@dataclass(frozen=True, kw_only=True)
class SpeculativeOption:
    """How many tokens are drafted while text is generated."""

    num_speculative_tokens: int = arg(0, minimum=0)
    """tokens that the heads of --mtp-num-layers draft, of which a step keeps those that the model
    chooses, too: the same text in fewer steps"""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DtypeOption):
    """Flags that name a trained model."""

    checkpoint: str = arg(position="positional", metavar="CHECKPOINT")
    """run directory, or an iter_XXXXXXX in it"""

    ckpt_step: int | None = arg(None)
    """load this iteration instead of the newest"""

    tokenizer_type: str | None = arg(None, choices=tuple(TOKENIZER_FILES))
    """tokenizer of a model that was trained on ids alone (NullTokenizer)"""

    vocab_file: str | None = arg(None, metavar="FILE")
    """vocab.json (default: the path of training)"""

    merge_file: str | None = arg(None, metavar="FILE")
    """merges.txt (default: the path of training)"""

    tokenizer_model: str | None = arg(None, metavar="FILE")
    """model file of another tokenizer (default: the path of training)"""

    script: str | None = arg(None, metavar="FILE")
    """of a model of your own: the script that trained it, whose model_provider makes it (a GPTModel
    with other modules in it); it is run as far as its call of pretrain"""

    device: Literal["auto", "cpu", "cuda", "xpu"] = arg("auto")
    """auto: the accelerator, if there is one"""

    def problems(self) -> list[str]:
        """Everything that can be found wrong before torch is loaded."""
        problems = []
        if problem := checkpoint_problem(self.checkpoint, self.ckpt_step):
            problems.append(f"CHECKPOINT: {problem}")
        if self.script is not None and not os.path.isfile(self.script):
            problems.append(f"--script {self.script}: no such file [file-not-readable]")
        for name in FILES:
            if (path := getattr(self, name)) and not os.path.exists(path):
                problems.append(
                    f"--{name.replace('_', '-')} {path}: no such file [tokenizer-file-missing]"
                )
        return problems

    def open(self, tensor_parallel: int = 1, drafts: int = 0) -> TrainedModel:
        """Load it, with a line on stderr about what was loaded. Raises as load_model."""
        files = {name: path for name in FLAGS if (path := getattr(self, name))}
        script = NO_SCRIPT
        if self.script is not None:
            if tensor_parallel > 1:
                raise ValueError(
                    f"--script {self.script}: needs one process, without a launcher "
                    "[one-process-only]"
                )
            from tools.shared.script_file import script_of

            script = script_of(self.script)
        model = load_model(
            self.checkpoint,
            self.ckpt_step,
            files,
            self.device,
            tensor_parallel,
            script,
            self.dtype,
            drafts,
        )
        trained = model.trained
        print(f"loaded {trained.directory} (iteration {trained.iteration})", file=sys.stderr)
        return trained
