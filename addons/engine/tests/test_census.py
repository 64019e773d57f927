"""Engine.weights of every family that the converter has: tensor by tensor what hf-export writes."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

from megatron.addons.convert.family_table import FAMILIES
from megatron.addons.convert.hf_files import HFFolder
from megatron.addons.convert.huggingface import hf_export, hf_import
from megatron.addons.convert.tests.hf_models import REMOTE, make
from megatron.checkpoint.safetensors_file import flat_bytes
from megatron.training import Engine
from tests.forkrun import run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.peers, pytest.mark.campaign]
KNOWN = sorted(FAMILIES.keys() - set(REMOTE))
FLAGS = (
    "--use-checkpoint-args --seq-length 16 --micro-batch-size 2 --global-batch-size 2 --lr 1e-4 "
    "--train-iters 2 --device cpu"
).split()


def stream(rank: int, world: int, folder: str, flags: list[str]) -> dict[str, torch.Tensor]:
    """What an engine gives that loaded the folder."""
    with contextlib.redirect_stdout(io.StringIO()), Engine(["--load", folder, *flags]) as engine:
        return {name: tensor.clone() for name, tensor in engine.weights()}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("family", KNOWN)
def test_a_family_is_streamed_as_it_is_exported(family, world, tmp_path):
    make(transformers, family, tmp_path / "hf")
    hf_import(tmp_path / "hf", tmp_path / "ours", tokenizer=False)
    hf_export(tmp_path / "ours", tmp_path / "out", shard_bytes=10**9)
    flags = [*FLAGS, *["--tensor-model-parallel-size", str(world)] * (world > 1)]
    for found in run_ranks(world, stream, str(tmp_path / "ours"), flags):
        with HFFolder(tmp_path / "out") as folder:
            assert found.keys() == folder.headers().keys()
            for name, tensor in found.items():
                written = folder.read(name)
                assert tensor.dtype == written.dtype and tensor.shape == written.shape, name
                assert torch.equal(flat_bytes(tensor), flat_bytes(written)), name
