"""The safetensors layout: what we write comes back bit for bit, and every damage is an error naming
file and tensor."""

import json

import pytest
import torch

from megatron.checkpoint import safetensors_file as st
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.safetensors_file import Entry, bytes_of, write_file
from megatron.checkpoint.safetensors_reader import SafetensorsFile
from megatron.checksums import BLOCK_BYTES, block_sum, block_sums
from tests import problems
from tests.core.checkpoint.random_bits import of_all_kinds, random_tensor, same_bits


def entry(key: str, tensor: torch.Tensor) -> Entry:
    return Entry(key, tensor.dtype, tuple(tensor.shape), tensor)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    tensors = of_all_kinds()
    written = write_file(tmp_path / "x", [entry(key, tensor) for key, tensor in tensors.items()])
    with SafetensorsFile(tmp_path / "x") as file:
        assert file.metadata == {"format": "pt"} and file.locations.keys() == tensors.keys()
        assert file.bytes == written.bytes == (tmp_path / "x").stat().st_size
        assert file.header_crc32 == written.header_crc32
        for key, tensor in tensors.items():
            assert same_bits(file.read(key), tensor), key
            place = file.locations[key]
            assert place.start % max(1, tensor.dtype.itemsize) == 0, f"{key} is not aligned"
            assert written.sums[key] == block_sums(bytes_of(tensor))


def test_strided_lazy_and_grad_tensors_are_written_as_they_look(tmp_path):
    base = torch.randn(6, 8)
    made = []

    def lazy() -> torch.Tensor:
        made.append(1)
        return base * 2

    parameter = torch.nn.Parameter(base.clone())
    write_file(
        tmp_path / "x",
        [
            entry("t", base.t()),
            entry("column", base[:, 3]),
            entry("expanded", base[:1].expand(4, 8)),
            Entry("lazy", torch.float32, (6, 8), lazy),
            entry("parameter", parameter),
        ],
    )
    with SafetensorsFile(tmp_path / "x") as file:
        assert torch.equal(file.read("t"), base.t()) and torch.equal(
            file.read("column"), base[:, 3]
        )
        assert torch.equal(file.read("expanded"), base[:1].expand(4, 8)) and torch.equal(
            file.read("lazy"), base * 2
        )
        assert torch.equal(file.read("parameter"), base) and made == [1]


def test_contiguous_tensors_are_not_copied(tmp_path, monkeypatch):
    seen = []
    real = st.bytes_of
    monkeypatch.setattr(
        st, "bytes_of", lambda tensor: seen.append(tensor.data_ptr()) or real(tensor)
    )
    tensors = [torch.randn(100, 10), torch.randn(5).bfloat16()]
    write_file(
        tmp_path / "x", [entry(str(number), tensor) for number, tensor in enumerate(tensors)]
    )
    assert seen == [tensor.data_ptr() for tensor in tensors]


def test_large_tensors_go_by_sections_and_sums_are_those_of_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(st, "SECTION_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(st, "_IN_FLIGHT_BYTES", 3 * BLOCK_BYTES)
    tensors = {
        str(n): random_tensor(torch.uint8, (size,), n)
        for n, size in enumerate([5 * BLOCK_BYTES + 17, 3, BLOCK_BYTES, 7 * BLOCK_BYTES])
    }
    written = write_file(tmp_path / "x", [entry(key, tensor) for key, tensor in tensors.items()])
    with SafetensorsFile(tmp_path / "x") as file:
        for key, tensor in tensors.items():
            raw = bytes(bytes_of(tensor))
            assert written.sums[key] == tuple(
                block_sum(raw[at : at + 1048576]) for at in range(0, len(raw), 1048576)
            )
            assert torch.equal(file.read(key), tensor)
        part = torch.empty(2 * BLOCK_BYTES + 17, dtype=torch.uint8)
        file.read_into("0", bytes_of(part), 3 * BLOCK_BYTES, written.sums["0"])
        assert torch.equal(part, tensors["0"][3 * BLOCK_BYTES :])


class OnDevice(torch.Tensor):
    """A tensor in the memory of a device, as far as writing it goes."""

    device = torch.device("cuda", 0)


def test_tensors_of_a_device_are_copied_by_sections(tmp_path, monkeypatch):
    copied = []

    def pinned_copy(section: torch.Tensor) -> torch.Tensor:
        assert isinstance(section, OnDevice)
        copied.append(section.numel())
        return section.as_subclass(torch.Tensor).clone()

    monkeypatch.setattr(st.devices, "pinned_copy", pinned_copy)
    monkeypatch.setattr(st, "SECTION_BYTES", 2 * BLOCK_BYTES)
    tensors = {
        "large": random_tensor(torch.float32, (5, BLOCK_BYTES // 4 + 1), 1),
        "strided": random_tensor(torch.bfloat16, (6, 8), 2).t(),
        "one": random_tensor(torch.int64, (1, 4), 3)[:, :1],
        "empty": random_tensor(torch.float32, (0,)),
    }
    entries = [entry(key, tensor.as_subclass(OnDevice)) for key, tensor in tensors.items()]
    there = write_file(tmp_path / "device", entries)
    here = write_file(tmp_path / "cpu", [entry(key, one) for key, one in tensors.items()])
    assert there == here
    assert (tmp_path / "device").read_bytes() == (tmp_path / "cpu").read_bytes()
    assert sorted(copied) == [8, 96, BLOCK_BYTES + 20, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES]


def sample(tmp_path):
    """A file of three tensors, its path and bytes and what was written."""
    tensors = {
        "first": random_tensor(torch.float32, (40, 10), 1),
        "second": random_tensor(torch.bfloat16, (33,), 2),
        "third": random_tensor(torch.uint8, (BLOCK_BYTES + 9,), 3),
    }
    written = write_file(tmp_path / "x", [entry(key, tensor) for key, tensor in tensors.items()])
    return tmp_path / "x", (tmp_path / "x").read_bytes(), written


def test_a_flip_is_placed_in_its_tensor_and_block(tmp_path):
    path, good, written = sample(tmp_path)
    bad = bytearray(good)
    bad[-1] ^= 4
    path.write_bytes(bad)
    with SafetensorsFile(path) as file:
        whole = memoryview(bytearray(BLOCK_BYTES + 9))
        with problems.raises(
            CheckpointError, "checkpoint-damaged", path, "tensor third", "1048576"
        ):
            file.read_into("third", whole, 0, written.sums["third"])
        # the block before is sound
        file.read_into("third", whole[:BLOCK_BYTES], 0, written.sums["third"])


def test_a_file_cut_while_open_is_noticed(tmp_path):
    path, good, _ = sample(tmp_path)
    with SafetensorsFile(path) as file:
        path.write_bytes(good[:-4])
        with problems.raises(CheckpointError, "checkpoint-damaged", "tensor third"):
            file.read("third")


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def table(**entries: object) -> bytes:
    return json.dumps(entries).encode()


def f32(low: int, high: int, shape: list) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [low, high]}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "header of 0 "),
        (b"1234567", "bad: 7 bytes"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "header of 4611686018427387904"),
        ((200_000_000).to_bytes(8, "little") + b"{}", "at most 100000000 allowed"),
        (with_header(b"{}", b"data"), "14 bytes, "),
        (with_header(b"{]"), "not JSON"),
        (with_header(b"[]"), "JSON object"),
        (with_header(b"\xff\xfe"), "not JSON"),
        (with_header(b"[" * 100_000), "not JSON"),
        (with_header(b'{"a":1' + b"0" * 5000 + b"}"), "not JSON"),
        (with_header(table(__metadata__=[1])), "__metadata__"),
        (with_header(table(__metadata__={"a": 1})), "__metadata__"),
        (with_header(table(a=[1, 2])), "tensor a: "),
        (with_header(table(a={"dtype": "F32", "shape": [1]})), "data_offsets"),
        (
            with_header(table(a={**f32(0, 4, [1]), "dtype": "F33"}), b"1234"),
            "'F33'",
        ),
        (
            with_header(table(a={**f32(0, 4, [1]), "dtype": ["F32"]}), b"1234"),
            "['F32']",
        ),
        (with_header(table(a=f32(0, 4, [1.0])), b"1234"), "whole numbers"),
        (with_header(table(a=f32(0, 4, [True])), b"1234"), "whole numbers"),
        (with_header(table(a=f32(0, 4, [-1])), b"1234"), "whole numbers"),
        (with_header(table(a=f32(0, 0, [0, 1 << 64]))), "whole numbers"),
        (with_header(table(a=f32(0, 4, [1] * 65)), b"1234"), "at most 64 dims"),
        (with_header(table(a=f32(0, 4, [2])), b"1234"), "F32 [2] "),
        (
            with_header(table(a=f32(0, 4, [1]), b=f32(2, 6, [1])), b"123456"),
            "tensor b: ",
        ),
        (
            with_header(table(a=f32(0, 4, [1]), b=f32(8, 12, [1])), b"1" * 12),
            "tensor b: ",
        ),
        (
            with_header(table(a=f32(0, 1 << 40, [1 << 38])), b"1234"),
            "1099511627868",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_bad_files_are_one_clear_error(tmp_path, raw, words):
    (tmp_path / "bad").write_bytes(raw)
    with problems.raises(CheckpointError, "checkpoint-damaged", tmp_path / "bad", words):
        SafetensorsFile(tmp_path / "bad")


def test_missing_file_and_missing_tensor(tmp_path):
    with problems.raises(CheckpointError, "file-operation-failed", tmp_path / "nothing"):
        SafetensorsFile(tmp_path / "nothing")
    write_file(tmp_path / "x", [entry("a", torch.ones(1))])
    with (
        SafetensorsFile(tmp_path / "x") as file,
        problems.raises(CheckpointError, "checkpoint-damaged", "tensor 'b'"),
    ):
        file.read("b")


def test_a_header_that_no_reader_would_take_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(st, "MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="5 tensors .* 336 bytes.* 100 "):
        write_file(tmp_path / "x", [entry(f"tensor{n}", torch.ones(1)) for n in range(5)])
    assert not (tmp_path / "x").exists()
