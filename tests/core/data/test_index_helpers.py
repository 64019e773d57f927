"""Sample index and blending: golden vectors, and C++ against its numpy twin and a plain loop on
random input."""

import importlib
import sys
import types
from types import ModuleType

import numpy as np
import pytest

import megatron.data
from megatron.data import index_helpers
from megatron.data.blend import indices
from megatron.data.blend.indices import (
    build_blending_indices,
    build_exhaustive_blending_indices,
    dataset_index_dtype,
)
from megatron.data.index_helpers import (
    build_sample_index,
    document_index_dtype,
    sample_index_dtype,
)
from tests.core.data import native


@pytest.fixture(scope="module")
def cpp(tmp_path_factory) -> ModuleType:
    """The C++ helpers as they were built, else compiled where there is a compiler."""
    try:
        return importlib.import_module("megatron.data.helpers_cpp")
    except ImportError:
        if not native.compiler():
            pytest.skip("megatron.data.helpers_cpp is not built")
        return native.compile_helpers(
            tmp_path_factory.mktemp("cpp"), "-march=native", "-ffp-contract=fast"
        )


def sample_index_by_hand(lengths, documents, sequence_length, samples):
    """Every token's (place, offset), then each sequence_length-th of them."""
    places = [
        (place, at) for place, document in enumerate(documents) for at in range(lengths[document])
    ]
    return [(0, 0)] + [places[row * sequence_length] for row in range(1, samples + 1)]


def blend_by_hand(weights, size, limits=None):
    taken = [0] * len(weights)
    found = []
    for i in range(size):
        open_ = [d for d in range(len(weights)) if limits is None or taken[d] < limits[d]]
        lags = [weights[d] * max(i, 1) - taken[d] for d in open_]
        d = open_[lags.index(max(lags))]
        found.append((d, taken[d]))
        taken[d] += 1
    return found


def random_corpora(cases: int, seed: int):
    random = np.random.default_rng(seed)
    while cases:
        shortest = random.integers(0, 2)
        longest = random.integers(2, 60)
        count = random.integers(1, 40)
        lengths = random.integers(shortest, longest, count).astype(np.int32)
        entries = random.integers(0, len(lengths), random.integers(1, 90)).astype(np.int32)
        sequence_length = int(random.integers(1, 40))
        samples = (int(lengths[entries].sum()) - 1) // sequence_length
        if samples > 0:
            cases -= 1
            yield lengths, entries, sequence_length, samples


def test_golden_blends():
    ids, samples = build_blending_indices([0.3, 0.7], 10)
    assert ids.tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1] and samples.tolist() == [
        0,
        0,
        1,
        2,
        1,
        3,
        4,
        2,
        5,
        6,
    ]
    ids, samples = build_blending_indices([0.5, 0.25, 0.25], 8)
    assert ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 0] and samples.tolist() == [0, 0, 0, 1, 2, 1, 1, 3]
    assert build_exhaustive_blending_indices([3, 5, 2])[0].tolist() == [
        1,
        0,
        2,
        1,
        0,
        1,
        2,
        1,
        0,
        1,
    ]
    assert (ids.dtype, samples.dtype) == (np.int16, np.int64)


def test_sample_index_equals_counting_tokens(cpp):
    for lengths, entries, sequence_length, samples in random_corpora(150, seed=1):
        wanted = sample_index_by_hand(lengths, entries, sequence_length, samples)
        found = build_sample_index(lengths, entries, sequence_length, samples)
        assert found.dtype == np.int32 and [tuple(row) for row in found.tolist()] == wanted
        for dtype in (np.int32, np.int64):
            rows, twin = (np.full((samples + 1, 2), -1, dtype) for _ in range(2))
            cpp.fill_sample_index(lengths, entries.astype(dtype), sequence_length, rows)
            index_helpers.fill_sample_index(lengths, entries, sequence_length, twin)
            assert [tuple(row) for row in rows.tolist()] == wanted and (rows == twin).all()


def test_blending_equals_the_plain_loop(cpp):
    random = np.random.default_rng(2)
    for case in range(60):
        weights = (
            random.random(random.integers(1, 12))
            if case % 3
            else random.integers(1, 5, 6).astype(float)
        )
        weights = weights / weights.sum()
        wanted = blend_by_hand(weights.tolist(), 200)
        for fill in (cpp.fill_blending, indices.fill_blending):
            ids = np.empty(200, (np.int16, np.int32)[case % 2])
            samples = np.empty(200, np.int64)
            fill(weights, ids, samples)
            assert list(zip(ids.tolist(), samples.tolist(), strict=True)) == wanted


def test_exhaustive_blending_uses_every_sample_once(cpp):
    random = np.random.default_rng(3)
    for _ in range(60):
        sizes = random.integers(1, 60, random.integers(1, 9))
        total = int(sizes.sum())
        wanted = blend_by_hand((sizes / total).tolist(), total, sizes)
        assert sorted(wanted) == [(d, s) for d, size in enumerate(sizes) for s in range(size)]
        for fill in (cpp.fill_exhaustive_blending, indices.fill_exhaustive_blending):
            ids = np.empty(total, np.int16)
            samples = np.empty(total, np.int64)
            fill(sizes, ids, samples)
            assert list(zip(ids.tolist(), samples.tolist(), strict=True)) == wanted


def test_too_few_tokens_are_refused(cpp):
    lengths = np.array([3, 4], np.int32)
    entries = np.array([0, 1], np.int32)
    for fill in (cpp.fill_sample_index, index_helpers.fill_sample_index):
        fill(lengths, entries, 6, np.empty((2, 2), np.int32))
        with pytest.raises(ValueError, match="fewer tokens"):
            fill(lengths, entries, 7, np.empty((2, 2), np.int32))
    with pytest.raises(ValueError, match="no length"):
        cpp.fill_sample_index(lengths, np.array([0, 2], np.int32), 3, np.empty((3, 2), np.int32))


def test_the_cpp_never_copies_or_overruns_its_output(cpp):
    lengths = np.array([3, 4], np.int32)
    with pytest.raises(TypeError):
        cpp.fill_sample_index(lengths, lengths % 2, 2, np.empty((2, 2), np.float32))
    with pytest.raises(TypeError):
        cpp.fill_sample_index(lengths, lengths % 2, 2, np.empty((2, 4), np.int32)[:, ::2])
    with pytest.raises(ValueError, match="shape"):
        cpp.fill_sample_index(lengths, lengths % 2, 2, np.empty((2, 3), np.int32))
    with pytest.raises(ValueError, match="one size"):
        cpp.fill_blending(np.array([1.0]), np.empty(3, np.int16), np.empty(2, np.int64))


def test_ties_fall_the_same_with_fused_multiply_add(cpp):
    """`cpp` is built for this processor with fusing asked for; the greedy choice stays that of
    numpy, which rounds the product first."""
    random = np.random.default_rng(5)
    for _ in range(40):
        weights = random.integers(1, 4, 7).astype(float)
        weights /= weights.sum()
        found = [(np.empty(400, np.int16), np.empty(400, np.int64)) for _ in range(2)]
        cpp.fill_blending(weights, *found[0])
        indices.fill_blending(weights, *found[1])
        assert found[0][0].tolist() == found[1][0].tolist()


def test_sample_index_dtype_grows_only_when_it_must():
    top = np.iinfo(np.int32).max
    assert sample_index_dtype(top, 5) == sample_index_dtype(5, top) == np.int32
    assert sample_index_dtype(top + 1, 5) == sample_index_dtype(5, top + 1) == np.int64


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 100, 1024, 1025, 3_000_001])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_shuffles_are_numpys_and_leave_its_generator_alike(cpp, monkeypatch, size, dtype):
    monkeypatch.setattr(index_helpers, "CPP", cpp)
    ours = np.random.RandomState(size)
    theirs = np.random.RandomState(size)
    for _ in range(2):
        mine = np.arange(size, dtype=dtype)
        other = np.arange(size, dtype=dtype)
        index_helpers.shuffle(ours, mine)
        theirs.shuffle(other)
        assert (mine == other).all()
    assert ours.random_sample(5).tolist() == theirs.random_sample(5).tolist()


def test_ids_grow_only_where_they_must(cpp):
    assert dataset_index_dtype(32_766) == np.int16 and dataset_index_dtype(32_767) == np.int32
    assert (
        document_index_dtype(1 << 31) == np.int32
        and document_index_dtype((1 << 31) + 1) == np.int64
    )
    with pytest.raises(ValueError, match="40000|dataset"):
        cpp.fill_blending(np.ones(40_000), np.empty(3, np.int16), np.empty(3, np.int64))
    cpp.fill_blending(np.ones(40_000), np.empty(3, np.int32), np.empty(3, np.int64))


def imported_anew() -> ModuleType:
    """index_helpers.py run again, beside the one in use."""
    spec = importlib.util.spec_from_file_location("index_helpers_anew", index_helpers.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_implementation_in_use_is_named(cpp, monkeypatch):
    monkeypatch.setattr(megatron.data, "helpers_cpp", cpp, raising=False)
    found = imported_anew()
    assert (found.IMPLEMENTATION, found.REASON) == ("C++", "")
    rows = found.build_sample_index(np.array([3, 4], np.int32), np.array([0, 1], np.int32), 2, 3)
    assert rows.tolist() == [[0, 0], [0, 2], [1, 1], [1, 3]]
    monkeypatch.setattr(
        megatron.data, "helpers_cpp", types.SimpleNamespace(__file__="/old.so", INTERFACE=0)
    )
    found = imported_anew()
    assert found.IMPLEMENTATION == "numpy" and found.REASON.startswith("/old.so ")
    monkeypatch.delattr(megatron.data, "helpers_cpp")
    monkeypatch.setitem(sys.modules, "megatron.data.helpers_cpp", None)
    found = imported_anew()
    assert found.IMPLEMENTATION == "numpy" and "helpers_cpp" in found.REASON
