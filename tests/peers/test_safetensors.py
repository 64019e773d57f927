"""Our safetensors files against the safetensors package: it reads ours, we read its, bit for bit in
every dtype."""

import pytest
import torch

from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.safetensors_file import Entry, write_file
from megatron.checkpoint.safetensors_reader import SafetensorsFile
from megatron.checkpoint.sharded import TensorSlice, write
from tests.core.checkpoint.random_bits import of_all_kinds, same_bits

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.peers


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not same_bits(found[key], wanted[key])] == []


def test_every_dtype_and_metadata_both_ways(tmp_path):
    tensors = of_all_kinds()
    write_file(
        tmp_path / "ours",
        [Entry(key, one.dtype, tuple(one.shape), one) for key, one in tensors.items()],
        metadata={"a": "b"},
    )
    safetensors_torch.save_file(tensors, tmp_path / "theirs", metadata={"who": "peer"})
    assert_same(safetensors_torch.load_file(tmp_path / "ours"), tensors)
    with safetensors.safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"a": "b"}
    with SafetensorsFile(tmp_path / "theirs") as file:
        assert_same({key: file.read(key) for key in file.locations}, tensors)
        assert file.metadata == {"who": "peer"}


def test_slices_of_a_rank_are_readable_by_the_package_alone(tmp_path):
    tensor = torch.randn(6, 4)
    write(
        tmp_path,
        "w.safetensors",
        [
            TensorSlice("w", (6, 4), tensor.dtype, ((0, 3), (0, 4)), tensor[:3]),
            TensorSlice("w", (6, 4), tensor.dtype, ((3, 6), (0, 4)), tensor[3:]),
        ],
        1,
    )
    loaded = safetensors_torch.load_file(tmp_path / "w.safetensors")
    assert torch.equal(torch.cat([loaded["w[0:3,0:4]"], loaded["w[3:6,0:4]"]]), tensor)


@pytest.mark.parametrize("cut", [0, 7, 8, 40, -1])
def test_what_the_package_refuses_we_refuse(tmp_path, cut):
    data = safetensors_torch.save({"a": torch.ones(5), "b": torch.ones(3, 2)})
    (tmp_path / "x").write_bytes(data[:cut])
    with pytest.raises(safetensors.SafetensorError):
        safetensors_torch.load_file(tmp_path / "x")
    with pytest.raises(CheckpointError):
        SafetensorsFile(tmp_path / "x")
    (tmp_path / "x").write_bytes(data + b"1")
    with pytest.raises(safetensors.SafetensorError):
        safetensors_torch.load_file(tmp_path / "x")
    with pytest.raises(CheckpointError):
        SafetensorsFile(tmp_path / "x")
