"""The manifest's text: exact round trip, no damage unnoticed, no hostile content believed."""

import json
import random

import pytest

from megatron.checkpoint.filesystem import (
    CheckpointError,
)
from megatron.checkpoint.manifest import (
    FileRecord,
    Manifest,
    SavedChunk,
    TensorRecord,
    merge,
    parse,
)
from megatron.checksums import crc32
from megatron.config.run_directory import (
    ForeignCheckpoint,
)
from tests import problems

FILE = "weights_00000.safetensors"


def chunk(box, file=FILE, sums=("00000001",), key=None) -> SavedChunk:
    return SavedChunk(file, key or f"w{box}", box, sums)


def example() -> Manifest:
    tensors = {
        'na"me\u00fc\n': TensorRecord(
            (4, 2), "F32", (chunk(((0, 3), (0, 2))), chunk(((3, 4), (0, 2))))
        ),
        "scalar": TensorRecord((), "F64", (chunk((), key="scalar"),)),
        "empty": TensorRecord((0, 5), "BF16", ()),
        "big": TensorRecord(
            (300_000,), "F32", (chunk(((0, 300_000),), sums=("1234abcd", "ffffffff")),)
        ),
    }
    return Manifest(
        20, {FILE: FileRecord(2_000_000, "00c0ffee"), "args": FileRecord(3, "deadbeef")}, tensors
    )


def test_round_trip_and_the_first_line():
    text = example().dump()
    assert parse(text, "here") == example() and parse(text, "here").dump() == text
    first, rest = text.split(b"\n", 1)
    assert first == b'{"crc32": "' + crc32(b'{"crc32": "00000000",\n' + rest).encode() + b'",'
    assert json.loads(text)["tensors"]["scalar"]["chunks"][0]["bytes"] == 8
    assert parse(Manifest(0, {}, {}).dump(), "here") == Manifest(0, {}, {})


def test_every_single_bit_flip_and_every_truncation_is_noticed():
    text = example().dump()
    for at in range(len(text)):
        for bit in range(8):
            bad = bytearray(text)
            bad[at] ^= 1 << bit
            with pytest.raises(CheckpointError, match="there"):
                parse(bytes(bad), "there")
        with pytest.raises(CheckpointError, match="there"):
            parse(text[:at], "there")
    with pytest.raises(CheckpointError, match="there"):
        parse(text + b" ", "there")


def forged(change) -> bytes:
    """The example's text with `change(table)` applied and a right checksum: what a hostile writer
    would hand out."""
    table = json.loads(example().dump())
    del table["crc32"]
    change(table)
    text = ('{"crc32": "00000000",\n' + json.dumps(table)[1:]).encode()
    return text.replace(b"00000000", crc32(text).encode(), 1)


def first(table):
    return table["tensors"]['na"me\u00fc\n']


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.update(format="other"), "'other'"),
        (lambda t: t.update(version=2), "2"),
        (lambda t: t.update(version=True), "True"),
        (lambda t: t.pop("version"), "KeyError"),
        (lambda t: t.update(iteration=-1), "-1"),
        (lambda t: t.update(iteration=1.0), "1.0"),
        (lambda t: t.update(checksum="none"), "'none'"),
        (lambda t: t.update(block_bytes=0), "block_bytes"),
        (lambda t: t.update(block_bytes=5000), "block_bytes"),
        (lambda t: t.update(block_bytes=1 << 40), "block_bytes"),
        (
            lambda t: t["files"].update({"x": {"bytes": "1", "crc32": ""}}),
            "'1'",
        ),
        (lambda t: t["files"].update({"x": {"bytes": 1, "crc32": 5}}), "5"),
        (lambda t: t.update(files=[]), "AttributeError"),
        (lambda t: t.update(tensors=7), "AttributeError"),
        (lambda t: first(t).update(dtype="F33"), "'F33'"),
        (lambda t: first(t).update(dtype=[]), "TypeError"),
        (lambda t: first(t).update(shape=[4, 1 << 63]), str(1 << 63)),
        (lambda t: first(t).update(shape=[1] * 65), "too many dims"),
        (lambda t: first(t).update(shape=[4]), "2 dims"),
        (lambda t: first(t).update(shape=[4, 1]), "0:1"),
        (lambda t: first(t)["chunks"][0].update(box=[[0, 3], [0]]), "ValueError"),
        (lambda t: first(t)["chunks"][0].update(box=[[0, 2], [0, 2]]), "24"),
        (lambda t: first(t)["chunks"][0].update(box=[[0, 0], [0, 2]], bytes=0), "0 bytes"),
        (lambda t: first(t)["chunks"][0].update(bytes=25), "25"),
        (lambda t: first(t)["chunks"][0].update(sums=[]), "24 bytes"),
        (lambda t: first(t)["chunks"][0].update(sums=["0", "0"]), "2 checksums"),
        (lambda t: first(t)["chunks"][0].update(sums=[0]), "0"),
        (
            lambda t: first(t)["chunks"][0].update(file="other"),
            "'other'",
        ),
        (lambda t: first(t)["chunks"][0].update(key=first(t)["chunks"][1]["key"]), "used twice"),
    ],
)
def test_forged_manifests_are_one_clear_error(change, named):
    assert parse(forged(lambda table: None), "there") == example()
    with pytest.raises(CheckpointError) as caught:
        parse(forged(change), "there")
    foreign = isinstance(caught.value, ForeignCheckpoint)
    code = "checkpoint-version-unknown" if foreign else "checkpoint-damaged"
    line = str(caught.value).replace("\n", " ")  # one name of a tensor has a line end
    problems.assert_problem(line, code, "there", named)


def test_nonsense_with_a_right_checksum():
    for body in (b"}", b"[1]", b"[" * 200_000, b'"format": NaN}'):
        text = b'{"crc32": "00000000",\n' + body
        with pytest.raises(CheckpointError):
            parse(text.replace(b"00000000", crc32(text).encode(), 1), "there")
    with problems.raises(CheckpointError, "checkpoint-damaged"):
        parse(b'{"sharded_backend": "torch_dist"}', "there")


def part(rank: int, tensors: dict) -> Manifest:
    file = f"weights_{rank:05d}.safetensors"
    records = {
        name: TensorRecord(
            shape, dtype, tuple(chunk(box, file, key=f"{name}{box}") for box in some)
        )
        for name, (shape, dtype, some) in tensors.items()
    }
    return Manifest(20, {file: FileRecord(100, "00000000")}, records, source=f"part {rank}")


def test_merge_joins_the_parts_by_name():
    parts = [
        part(0, {"b": ((4,), "F32", [((0, 2),)]), "a": ((), "F32", [()])}),
        part(1, {"b": ((4,), "F32", [((2, 4),)]), "none": ((0,), "F32", [])}),
    ]
    merged = merge(parts, {"args": FileRecord(1, "0")}, "all")
    assert list(merged.tensors) == ["a", "b", "none"] and len(merged.files) == 3
    assert [one.box for one in merged.tensors["b"].chunks] == [((0, 2),), ((2, 4),)]
    assert parse(merged.dump(), "x") == merged


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (((4,), "F32", [((3, 4),)]), (" 3 of 4 ",)),
        (((4,), "F32", [((1, 4),)]), ("[0:2]", "[1:4]")),
        (((5,), "F32", [((2, 4),)]), ("part 1", "F32 [5]", "F32 [4]")),
        (((4,), "F16", [((2, 4),)]), ("part 1", "F16 [4]", "F32 [4]")),
    ],
)
def test_parts_that_do_not_fit_together(second, named):
    with problems.raises(CheckpointError, "checkpoint-damaged", "tensor b", *named):
        merge([part(0, {"b": ((4,), "F32", [((0, 2),)])}), part(1, {"b": second})], {}, "all")


@pytest.mark.parametrize("seed", range(20))
def test_cover_is_judged_right_for_random_cuts(seed):
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, 20), rng.randint(1, 6)))
    runs = [((low, high), (0, 3)) for low, high in zip([0, *cuts], [*cuts, 20], strict=True)]
    rng.shuffle(runs)
    merge([part(0, {"b": ((20, 3), "F32", runs)})], {}, "all")
    with problems.raises(CheckpointError, "checkpoint-damaged"):
        merge([part(0, {"b": ((20, 3), "F32", runs[1:])})], {}, "all")
    with pytest.raises(CheckpointError, match="overlap"):
        merge([part(0, {"b": ((20, 3), "F32", [*runs[1:], ((0, 20), (2, 3))])})], {}, "all")
