"""Checkpoints of runs with Muon: weights leave to Hugging Face and torch_dist and come back as they
are; the optimizer's state has the names of the weights."""

from __future__ import annotations

import pytest
import torch

from megatron.checkpoint import reading
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

MUON = "--optimizer muon --muon-momentum 0.95 --muon-use-nesterov".split()
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 48 --mock-data"
).split()
# the words that export and that import
EXPORTS = {
    "hugging face": (["hf-export"], ["hf-import"]),
    "torch_dist": (["megatron-export", "--ckpt-format", "torch_dist"], ["megatron-import"]),
}


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """The checkpoint of four iterations in bf16."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*with_flags(SMALL, *NO_DROPOUT, *LLAMA, *MUON), "--bf16", "--train-iters", "4"]
    return train(folder, [*flags, "--save", str(folder / "save")]).save


def weights(folder) -> dict[str, torch.Tensor]:
    with reading.load(folder).reader() as reader:
        return {n: reader.read(n) for n in reader.names() if not n.startswith("optimizer.")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", EXPORTS)
def test_weights_leave_and_come_back_bit_by_bit(to, save, tmp_path, convert):
    out, back = EXPORTS[to]
    convert(*out, save, tmp_path / "theirs")
    convert(*back, tmp_path / "theirs", tmp_path / "ours")
    before, after = weights(save), weights(tmp_path / "ours")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name][: len(tensor)], tensor[: len(after[name])]), name


def test_the_state_is_inspected_by_name(save, convert):
    """Matrices have a momentum, everything else Adam's two moments."""
    said = {
        words[0]
        for line in convert("inspect", save, "--tensors").splitlines()
        if (words := line.split())
    }
    for name, tensor in weights(save).items():
        matrix = name.startswith("decoder.layers.") and tensor.dim() > 1
        kinds = {
            kind
            for kind in ("momentum_buffer", "exp_avg", "exp_avg_sq")
            if f"optimizer.{kind}.{name}" in said
        }
        assert kinds == ({"momentum_buffer"} if matrix else {"exp_avg", "exp_avg_sq"}), name
