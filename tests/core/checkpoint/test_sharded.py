"""Any layout to any layout: slices written by some ranks come back as any box, checked, whoever
asks."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from megatron import checksums
from megatron.checkpoint import manifest, safetensors_file, tensor_slices
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.manifest import FileRecord, Manifest
from megatron.checkpoint.sharded import TensorSlice, write
from megatron.checkpoint.sharded_reader import Reader
from tests import problems
from tests.core.checkpoint.random_bits import random_tensor, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float16]


def grid(rng: random.Random, shape) -> list[tensor_slices.Box]:
    """A random cut of `shape` into a grid of boxes, some of them empty."""
    pairs = []
    for size in shape:
        cuts = sorted(rng.randint(0, size) for _ in range(rng.randint(0, 3)))
        pairs.append(list(itertools.pairwise([0, *cuts, size])))
    return list(itertools.product(*pairs))


def random_box(rng: random.Random, shape) -> tensor_slices.Box:
    return (
        tuple(sorted((rng.randint(0, size), rng.randint(0, size))) for size in shape)
        if rng.random() < 0.9
        else tensor_slices.whole(shape)
    )


def save_cut(folder, rng, tensors, ranks: int, block: int) -> Manifest:
    """Write `tensors`, each cut at random, by `ranks` ranks; the merged manifest as it was read
    back."""
    parts = [[] for _ in range(ranks)]
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if shape and tensor.numel() and rng.random() < 0.4:
            cuts = sorted(rng.randint(0, tensor.numel()) for _ in range(ranks - 1))
            ranges = itertools.pairwise([0, *cuts, tensor.numel()])
            cut = [
                (rank, box)
                for rank, (low, high) in enumerate(ranges)
                for box in tensor_slices.of_range(low, high, shape)
            ]
        else:
            cut = [(rng.randrange(ranks), box) for box in grid(rng, shape)]
            cut = cut if tensor.numel() else cut[:1]
        for rank, box in cut:
            parts[rank].append(
                TensorSlice(name, shape, tensor.dtype, box, tensor[tensor_slices.slices(box)])
            )
    written = [
        write(folder, f"weights_{rank:05d}.safetensors", part, 7, block_bytes=block)
        for rank, part in enumerate(parts)
    ]
    text = manifest.merge(written, {}, "all").dump()
    return manifest.parse(text, str(folder / "manifest.json"))


@pytest.mark.parametrize("seed", range(25))
def test_any_cut_is_read_back_as_any_box(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    block = checksums.BLOCK_BYTES
    if seed % 2:  # small blocks and pieces, so that small tensors take the roads of large ones
        block = 4096
        monkeypatch.setattr(safetensors_file, "SECTION_BYTES", 8192)
    tensors = {}
    for number in range(6):
        shape = tuple(
            rng.randint(0 if rng.random() < 0.1 else 1, (9, 70)[seed % 2])
            for _ in range(rng.randint(0, 3))
        )
        tensors[f"layer.{number}.weight"] = random_tensor(
            rng.choice(DTYPES), shape, rng.randrange(1 << 30)
        )
    whole = save_cut(tmp_path, rng, tensors, rng.randint(1, 4), block)
    with Reader(tmp_path, whole) as reader:
        assert reader.names() == sorted(tensors)
        assert reader.verify() == sum(
            tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values()
        )
        for name, tensor in tensors.items():
            assert reader.shape(name) == tuple(tensor.shape) and reader.dtype(name) == tensor.dtype
            assert same_bits(reader.read(name), tensor)
            for _ in range(5):
                box = random_box(rng, tensor.shape)
                assert same_bits(reader.read(name, box), tensor[tensor_slices.slices(box)]), (
                    name,
                    box,
                )
                turned = torch.zeros(tensor_slices.extent(box)[::-1], dtype=tensor.dtype)
                turned = turned.permute(tuple(reversed(range(tensor.dim()))))
                assert reader.read(name, box, into=turned) is turned
                assert same_bits(turned, tensor[tensor_slices.slices(box)])


def test_a_rank_without_data_writes_no_file_but_its_names(tmp_path):
    part = write(
        tmp_path,
        "w.safetensors",
        [TensorSlice("w", (4,), torch.float32, ((2, 2),), torch.empty(0))],
        7,
    )
    assert not list(tmp_path.iterdir()) and not part.files
    assert part.tensors["w"].shape == (4,) and part.tensors["w"].chunks == ()


def two_ranks(folder):
    tensor = torch.arange(20_000, dtype=torch.float32).reshape(100, 200)
    parts = [
        write(
            folder,
            f"w{rank}.safetensors",
            [
                TensorSlice(
                    "w",
                    (100, 200),
                    torch.float32,
                    ((50 * rank, 50 * rank + 50), (0, 200)),
                    tensor[50 * rank : 50 * rank + 50],
                )
            ],
            7,
        )
        for rank in range(2)
    ]
    return tensor, parts


def test_missing_coverage_and_overlap_are_errors_at_read_too(tmp_path):
    tensor, parts = two_ranks(tmp_path)
    with (
        Reader(tmp_path, parts[0]) as reader,
        problems.raises(CheckpointError, "checkpoint-damaged", "10000"),
    ):
        reader.read("w", ((0, 10), (0, 200)))
    record = parts[0].tensors["w"]
    double = replace(parts[0], tensors={"w": replace(record, chunks=record.chunks * 2)})
    with Reader(tmp_path, double) as reader, pytest.raises(CheckpointError, match="overlap"):
        reader.read("w")
    with Reader(tmp_path, manifest.merge(parts, {}, "all")) as reader:
        assert torch.equal(reader.read("w", ((40, 60), (7, 9))), tensor[40:60, 7:9])


def test_requests_that_do_not_fit_say_so(tmp_path):
    _, parts = two_ranks(tmp_path)
    with Reader(tmp_path, manifest.merge(parts, {}, "all")) as reader:
        for call, words in [
            (lambda: reader.read("v"), "has no tensor 'v' among its 1"),
            (lambda: reader.shape("v"), "has no tensor"),
            (
                lambda: reader.read("w", ((0, 101), (0, 200))),
                r"tensor w \[100, 200\]: box .* not within 0:100",
            ),
            (lambda: reader.read("w", ((0, 1),)), "has 1 dims"),
            (
                lambda: reader.read("w", into=torch.empty(100, 199)),
                r"cannot take torch.float32 \[0:100,0:200\]",
            ),
            (
                lambda: reader.read("w", into=torch.empty(100, 200).bfloat16()),
                "read it without `into` and convert",
            ),
        ]:
            with pytest.raises(CheckpointError, match=words):
                call()


def test_damage_is_named_and_only_the_blocks_asked_for_are_judged(tmp_path):
    tensor = torch.arange(1_000_000, dtype=torch.float32).reshape(1000, 1000)
    part = write(tmp_path, "w.safetensors", [TensorSlice.whole("w", tensor)], 7)
    path = tmp_path / "w.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with Reader(tmp_path, part) as reader:
        assert torch.equal(reader.read("w", ((0, 500), (0, 1000))), tensor[:500])
        for box in (None, ((999, 1000), (0, 3))):
            with problems.raises(
                CheckpointError, "checkpoint-damaged", path, "tensor w", "3145728"
            ):
                reader.read("w", box)
        with pytest.raises(CheckpointError, match="tensor w: .*checkpoint-damaged"):
            reader.verify()


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"x",
        lambda raw: raw.replace(b'"pt"', b'"tp"'),
        lambda raw: b"",
    ],
    ids=["cut", "longer", "another header", "empty"],
)
def test_a_changed_file_is_not_trusted(tmp_path, change):
    _, parts = two_ranks(tmp_path)
    path = tmp_path / "w1.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with Reader(tmp_path, manifest.merge(parts, {}, "all")) as reader:
        with problems.raises(CheckpointError, "checkpoint-damaged", path):
            reader.read("w")
        reader.read("w", ((0, 50), (0, 200)))


def test_files_of_two_ranks_swapped_or_gone(tmp_path):
    _, parts = two_ranks(tmp_path)
    merged = manifest.merge(parts, {}, "all")
    (tmp_path / "w0.safetensors").rename(tmp_path / "w2")
    with (
        Reader(tmp_path, merged) as reader,
        problems.raises(CheckpointError, "file-operation-failed", "w0.safetensors"),
    ):
        reader.read("w")
    (tmp_path / "w1.safetensors").rename(tmp_path / "w0.safetensors")
    (tmp_path / "w2").rename(tmp_path / "w1.safetensors")
    with (
        Reader(tmp_path, merged) as reader,
        pytest.raises(CheckpointError, match=r"w0.safetensors, tensor w\[0:50"),
    ):
        reader.read("w")


def test_a_manifest_that_lies_about_a_key_is_found_out(tmp_path):
    part = write(
        tmp_path,
        "w.safetensors",
        [
            TensorSlice.whole("w", torch.ones(4)),
            TensorSlice.whole("v", torch.ones(4, dtype=torch.int32)),
        ],
        7,
    )
    chunk = replace(part.tensors["w"].chunks[0], key="v")
    lying = replace(part, tensors={"w": replace(part.tensors["w"], chunks=(chunk,))})
    with (
        Reader(tmp_path, lying) as reader,
        problems.raises(CheckpointError, "checkpoint-damaged", "tensor v"),
    ):
        reader.read("w")


def test_a_slice_that_contradicts_itself_is_our_own_mistake():
    with pytest.raises(AssertionError, match="not within"):
        TensorSlice("w", (4,), torch.float32, ((2, 5),), torch.ones(3))
    with pytest.raises(AssertionError, match="for torch.float32"):
        TensorSlice("w", (4,), torch.float32, ((2, 4),), torch.ones(3))
    with pytest.raises(AssertionError, match="for torch.float32"):
        TensorSlice("w", (4,), torch.float32, ((2, 4),), torch.ones(2).half())


@pytest.mark.gpu
def test_cuda_tensors_go_out_and_come_in(tmp_path):
    tensor = torch.randn(300, 70).to("cuda:0")
    part = write(tmp_path, "w.safetensors", [TensorSlice.whole("w", tensor)], 7)
    target = torch.zeros(100, 70, device="cuda:0")
    with Reader(tmp_path, part) as reader:
        reader.read("w", ((100, 200), (0, 70)), into=target)
    assert torch.equal(target, tensor[100:200])


def test_file_records_name_every_file(tmp_path):
    _, parts = two_ranks(tmp_path)
    for part in parts:
        for name, record in part.files.items():
            assert record == FileRecord((tmp_path / name).stat().st_size, record.crc32)
