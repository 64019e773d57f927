"""The options of programs that read the data of a run: its directory, or its flags."""

from dataclasses import dataclass

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that name a run."""

    run: str | None = arg(None, position="positional", metavar="RUN")
    """run directory (--save), or an iter_XXXXXXX in it"""

    flags: tuple[str, ...] | None = arg(None, position="after --", metavar="-- FLAGS")
    """in place of RUN: flags of pretrain_gpt.py"""

    world_size: int | None = arg(None, minimum=1)
    """number of ranks (default: the run's; with flags: 1)"""

    def problems(self) -> list[str]:
        """What is wrong with them."""
        if self.run is not None and self.flags is not None:
            return [
                f"RUN: {self.run} and flags after -- both name a run; give one of them "
                "[flags-exclude-each-other]"
            ]
        return []
