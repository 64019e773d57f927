"""--save-hf-interval: Hugging Face directories of a run while it trains; --extend-vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron.arguments import arg
from megatron.config.checkpoint import is_url
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.checkpoint.reading import Checkpoint
    from megatron.checkpoint.sharded_reader import Reader
    from megatron.config.checks.facts import Facts
    from megatron.config.command_line import CommandLine
    from megatron.data.tokenizers.base import Tokenizer
    from megatron.training.hook import Hook
    from megatron.training.run import Run


@dataclass(frozen=True)
class HFSavesConfig(Feature):
    """Hugging Face directories."""

    save_hf_interval: int | None = arg(None, minimum=1, requires="save", per_run=True)
    """iterations between Hugging Face directories of the model, SAVE/hf/iter_XXXXXXX, as
    tools/convert_checkpoint.py hf-export writes them; with or without a checkpoint of the same
    iteration, and none is removed"""

    def check(self, facts: Facts) -> Iterator[str]:
        """That a family of models can express this one, and the tests compared such exports."""
        save = facts["save"]
        if not self.save_hf_interval or not save:
            return
        from .options import FOLDER

        flag = facts.say("save_hf_interval")
        if is_url(save):
            yield (
                f"{flag} with --save {save}: is written to a directory of this machine alone; omit "
                "it, and export checkpoints with tools/convert_checkpoint.py hf-export "
                "[url-not-supported]"
            )
        elif (folder := Path(save) / FOLDER).exists() and not folder.is_dir():
            yield (
                f"{flag}: {folder} is no directory; move it, or give another --save "
                "[path-not-a-directory]"
            )
        if not facts.ok("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
            return
        from .families import why_not

        for reason in why_not(facts.config, Path(save)):
            yield f"{flag}: {reason}"

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """What writes them. Raises ValueError for a script's own model, and for one that cannot be
        written."""
        if self.save_hf_interval:
            if loop.run.plan.own_model:
                raise ValueError(
                    "--save-hf-interval: needs the GPT of the flags, and the script's "
                    "model_provider returned another model; omit it [own-model]"
                )
            from .hf_saves import HFSaves

            yield HFSaves(loop.run, self.save_hf_interval)


@dataclass(frozen=True)
class LongerVocabularyConfig(Feature):
    """A longer vocabulary."""

    extend_vocabulary: Literal["pieces", "mean", "drawn"] | None = arg(
        None, requires="load", per_run=True
    )
    """load a checkpoint whose tokenizer this run's adds tokens to; their rows of embedding and
    output layer begin as pieces: the mean of the old tokens that spell them; mean: that of all old
    tokens; drawn: at random with mean and covariance of the old tokens"""

    def check(self, facts: Facts) -> Iterator[str]:
        """That the checkpoint is here before the run begins."""
        load = facts["load"]
        if self.extend_vocabulary and is_url(load):
            yield (
                f"{facts.say('extend_vocabulary')} with --load {load}: the tokenizer of a "
                "checkpoint is compared before it is fetched; copy it to this machine "
                "[url-not-supported]"
            )

    def tokenizer_problems(self, tokenizer: Tokenizer, line: CommandLine) -> Iterable[str]:
        """It must have all tokens of the checkpoint's, whose data it then takes."""
        if not self.extend_vocabulary:
            return
        from .longer_vocabulary import extend

        try:
            extend(tokenizer, line.config.checkpoint, type(line.config))
        except ValueError as error:
            yield str(error)

    def extends(self, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
        """Of a tokenizer that was compared."""
        from megatron.data.tokenizers.metadata import fingerprint

        return bool(self.extend_vocabulary) and fingerprint(saved) in now.get("extends", ())

    def reader(self, reader: Reader, run: Run, checkpoint: Checkpoint) -> Reader:
        """One that has the rows of the new tokens."""
        if not self.extend_vocabulary:
            return reader
        from .longer_reader import longer_reader

        return longer_reader(reader, run, checkpoint, self.extend_vocabulary)
