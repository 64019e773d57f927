"""--save-hf-interval: Hugging Face directories of a run while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.config.checkpoint import is_url
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.config.checks.facts import Facts
    from megatron.training.hook import Hook


@dataclass(frozen=True)
class HFSavesConfig(Feature):
    """Hugging Face directories."""

    save_hf_interval: int | None = arg(
        None,
        minimum=1,
        requires="save",
        per_run=True,
        help="iterations between Hugging Face directories of the model, SAVE/hf/iter_XXXXXXX, as "
        "tools/convert_checkpoint.py hf-export writes them; with or without a checkpoint of the "
        "same iteration, and none is removed",
    )

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
