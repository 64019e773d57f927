"""Small checkpoints saved and judged, and disks that sync nothing."""

from pathlib import Path

import torch

from megatron.checkpoint import reading, store
from megatron.checkpoint.filesystem import Disk, explained
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState

ARGS = "--num-layers 2\n# ü\n"


def tensors(iteration: int) -> dict[str, torch.Tensor]:
    """A small state that differs from iteration to iteration."""
    generator = torch.Generator().manual_seed(iteration)
    return {
        "decoder.weight": torch.randn(20, 7, generator=generator),
        "optimizer.exp_avg.decoder.weight": torch.randn(
            20, 7, generator=generator, dtype=torch.float64
        ),
        "scalar": torch.tensor(iteration),
    }


def save(root, iteration: int, disk: Disk | None = None, version: int = 0) -> Path:
    """Save the state of `iteration`; `version` tells two saves of one iteration apart."""
    slices = [
        TensorSlice.whole(name, tensor)
        for name, tensor in tensors(iteration + 1000 * version).items()
    ]
    state = RunState(
        iteration=iteration, consumed_train_samples=16 * iteration, optimizer={"version": version}
    )
    return store.save(root, iteration, slices, state, ARGS, disk=disk or Disk())


def assert_good(root, iteration: int, step: int | None = None) -> int:
    """What `root` means is the whole checkpoint of `iteration`; returns its version."""
    found = reading.load(root, step)
    assert found is not None and found.iteration == iteration and found.args == ARGS
    assert (
        found.state.iteration == iteration and found.state.consumed_train_samples == 16 * iteration
    )
    version = found.state.optimizer["version"]
    with found.reader() as reader:
        for name, tensor in tensors(iteration + 1000 * version).items():
            assert torch.equal(reader.read(name), tensor), name
    return version


class NoExchange(Disk):
    """A file system without an atomic exchange of two names."""

    def exchange(self, first: Path, second: Path) -> bool:
        return False


class Unsynced(Disk):
    """A disk that syncs nothing: for tests in which no power is lost."""

    def fsync(self, descriptor: int, path: Path) -> None:
        with explained("fsync", path):
            self.step("fsync", path)

    def fsync_directory(self, path: Path) -> None:
        with explained("fsync directory", path):
            self.step("fsync_directory", path)


class UnsyncedNoExchange(Unsynced, NoExchange):
    """The same without an atomic exchange."""
