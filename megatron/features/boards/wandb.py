"""Weights & Biases: a run's scalars under the tags of TensorBoard. The only importer of wandb."""

from collections.abc import Mapping
from typing import Any

from megatron.small_files import make_directories

OFFLINE = "WANDB_MODE=offline in the environment records without network or account"


class WandB:
    """A run at Weights & Biases, or with WANDB_MODE=offline in files that `wandb sync` uploads."""

    def __init__(self, project: str, name: str, entity: str, directory: str):
        """Start a run; its files are written below `directory`.

        Raises ValueError where the package is missing or the run cannot be started (no account, no
        network), OSError for a directory that cannot be written.
        """
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "--wandb-project needs the package wandb: pip install wandb, or omit the flag "
                "(--tensorboard-dir and --metrics-file store the same values) [package-missing]"
            ) from None
        make_directories(directory)
        try:
            self._run = wandb.init(
                project=project,
                name=name or None,
                entity=entity or None,
                dir=directory,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ValueError(
                f"--wandb-project {project}: {' '.join(str(error).split())}; run `wandb login`, or "
                f"{OFFLINE} [wandb-failed]"
            ) from None

    def start(self, iteration: int, against_samples: bool) -> None:
        """Nothing: each process is a run of its own."""

    def arguments(self, values: Mapping[str, Any], iteration: int) -> None:
        """Store every argument as the run's configuration."""
        self._run.config.update({name: _plain(value) for name, value in values.items()})

    def scalar(self, tag: str, value: float, iteration: int, samples: int | None = None) -> None:
        """Store one value; those of one iteration are one row."""
        self._run.log({tag: value}, step=iteration)

    def flush(self) -> None:
        """wandb's own process writes at once."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
