"""What InternLM adds to tools/convert_checkpoint.py: internlm-import, and its families of Hugging
Face models. Imports no torch, so that --help is immediate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.arguments import arg

from ..convert.options import Answer, finish, ignored_keys, path_of
from .choices import MLP_ORDERS
from .families import FAMILIES

if TYPE_CHECKING:
    from tools.shared.program import Command

__all__ = ["FAMILIES", "commands"]


@dataclass(frozen=True, kw_only=True)
class InternLMImport:
    """internlm-import."""

    source: Path = path_of(
        "SOURCE", "InternLM's or InternEvo's directory of one step (model_tp*_pp*.pt)"
    )
    target: Path = path_of("DIR", "run directory to create")
    mlp_weights: str | None = arg(None, choices=tuple(sorted(MLP_ORDERS)))
    """w2-up: w2 is the up and w3 the down matrix, as before February 2024; w2-down: the other way
    round, as since then and in InternEvo (default: what their shapes show)"""

    max_position_embeddings: int | None = arg(None)
    """context length (default: what the file says, or 2048)"""

    tokenizer_model: Path | None = arg(None, parse=Path, metavar="FILE")
    """its SentencePiece model (default: NullTokenizer)"""

    ignore_config_key: tuple[str, ...] = ignored_keys("keys of model_config.pt")
    args: Path | None = arg(None, parse=Path, metavar="FILE")
    """flags of the run (from tools/internlm_config.py): convert the optimizer's state and the
    counters too, so that --load resumes"""

    def run(self) -> Answer:
        """Do it."""
        from .checkpoint import internlm_import

        return internlm_import(
            self.source,
            self.target,
            order=self.mlp_weights,
            args_file=self.args,
            tokenizer=self.tokenizer_model,
            positions=self.max_position_embeddings,
            ignored=self.ignore_config_key,
        )


def commands() -> dict[str, Command]:
    """Commands of tools/convert_checkpoint.py, by name."""
    from tools.shared.program import Command

    return {
        "internlm-import": Command(
            "make a run directory of a step of InternLM's or InternEvo's training "
            "(model_tp*_pp*.pt)",
            InternLMImport,
            finish,
        ),
    }
