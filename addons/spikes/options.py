"""The flags of the commands of tools/spikes.py. Imports no torch and no numpy, so that --help is
immediate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg
from tools.shared.run_options import RunOptions


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions:
    """Options of analyze."""

    logs: tuple[str, ...] = arg(position="positional", metavar="LOG")
    """run directory, log, metrics file or TensorBoard directory; several of one run in their
    order"""

    load: str | None = arg(None, metavar="DIR")
    """the run's checkpoints, to name the one to restart from"""

    json: bool = arg(False)
    """print the events as JSON"""

    plot: str | None = arg(None, metavar="FILE")
    """draw loss, gradient norm, events, skipped ranges and checkpoints (.svg, .png or .pdf)"""


@dataclass(frozen=True, kw_only=True)
class DocsOptions(RunOptions):
    """Options of docs."""

    iteration: int | None = arg(None, minimum=1)
    """list the documents this iteration reads"""

    doc: int | None = arg(None, minimum=0)
    """list the iterations that read this document; its number in its data set, from 0"""

    prefix: str | None = arg(None)
    """with --doc: prefix of the data set, if the run reads several"""

    microbatch: int | None = arg(None, minimum=0)
    """only this micro-batch, from 0"""

    dp_rank: int | None = arg(None, minimum=0)
    """only samples of this data-parallel rank, from 0"""

    order: Literal["suspicion", "loss"] = arg("suspicion")
    """order of the documents; loss: at the newest checkpoint before the iteration"""

    ckpt_step: int | None = arg(None)
    """with --order loss: use the checkpoint of this iteration"""

    top: int = arg(10, minimum=1)
    """number of documents to print"""

    json: bool = arg(False)
    """print all documents as JSON"""

    def problems(self) -> list[str]:
        """What is wrong with them."""
        if (self.iteration is None) == (self.doc is None):
            return ["--iteration or --doc: give one of them, and not both"]
        return super().problems()


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of replay."""

    iterations: str = arg(metavar="A-B")
    """iterations to replay, first and last, as numbered in the log"""

    ckpt: str | None = arg(None, metavar="DIR")
    """checkpoint (iter_XXXXXXX) to replay at; or give --load"""

    load: str | None = arg(None, metavar="DIR")
    """the run's checkpoints; or give --ckpt"""

    ckpt_step: int | None = arg(None)
    """with --load: iteration of the checkpoint (default: the newest before the replayed
    iterations)"""

    other_ckpt: str | None = arg(None, metavar="DIR|N")
    """second checkpoint, or an iteration of the same directory, to tell bad data from a bad
    combination of data and model state"""

    world_size: int | None = arg(None, minimum=1)
    """number of ranks that read the data (default: the run's)"""

    top: int = arg(5, minimum=1)
    """number of samples to print"""

    device: Literal["auto", "cpu", "cuda", "xpu"] = arg("auto")
    """auto: the accelerator, if there is one"""

    json: bool = arg(False)
    """print every sample as a JSON object as soon as it is computed"""

    def problems(self) -> list[str]:
        """What is wrong with them."""
        if (self.ckpt is None) == (self.load is None):
            return [
                "--ckpt or --load: give the checkpoint: --ckpt PATH/iter_XXXXXXX, or --load "
                "DIR and --ckpt-step N"
            ]
        return []


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(RunOptions):
    """Options of verify."""

    ledger: str | None = arg(None, metavar="FILE")
    """the run's ledger (default: the run's --data-ledger)"""

    reference: str | None = arg(None, metavar="FILE")
    """ledger of the same run without these skips"""
