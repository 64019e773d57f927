"""Box algebra against numpy on random shapes."""

import random

import numpy as np
import pytest

from megatron.checkpoint import tensor_slices


def random_box(
    rng: random.Random, shape: tuple[int, ...], empty: bool = False
) -> tensor_slices.Box:
    """A box within `shape`, with at least one element unless `empty`."""
    pairs = []
    for size in shape:
        start = rng.randrange(size)
        pairs.append((start, rng.randint(start if empty else start + 1, size)))
    return tuple(pairs)


def mask(shape: tuple[int, ...], box: tensor_slices.Box) -> np.ndarray:
    array = np.zeros(shape, dtype=bool)
    array[tensor_slices.slices(box)] = True
    return array


@pytest.mark.parametrize("seed", range(30))
def test_intersection_and_span_and_pieces_as_numpy_sees_them(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
    a = random_box(rng, shape)
    b = random_box(rng, shape)
    common = tensor_slices.intersection(a, b)
    both = mask(shape, a) & mask(shape, b)
    assert (
        tensor_slices.volume(a) == mask(shape, a).sum()
        and tensor_slices.extent(a) == np.empty(shape)[tensor_slices.slices(a)].shape
    )
    assert (common is None) == (not both.any())
    if common is not None:
        assert (mask(shape, common) == both).all()
        inside = np.zeros(tensor_slices.extent(a), dtype=bool)
        inside[tensor_slices.slices(tensor_slices.relative(common, a))] = True
        assert inside.sum() == both.sum()
    flat = np.flatnonzero(mask(shape, a))
    assert tensor_slices.span(a, shape) == (flat[0], flat[-1] + 1)
    assert tensor_slices.strides(shape) == tuple(step // 8 for step in np.empty(shape).strides)
    limit = rng.randint(1, 40)
    parts = list(tensor_slices.cut(a, shape, limit))
    assert (sum(mask(shape, part).astype(int) for part in parts) == mask(shape, a)).all()
    for part in parts:
        low, high = tensor_slices.span(part, shape)
        assert high - low <= limit or tensor_slices.volume(part) == 1


def test_pieces_of_a_gate_up_split_are_contiguous_runs():
    parts = list(tensor_slices.cut(((0, 2), (100, 200), (0, 8)), (2, 400, 8), 1000))
    assert parts == [((0, 1), (100, 200), (0, 8)), ((1, 2), (100, 200), (0, 8))]


@pytest.mark.parametrize("seed", range(30))
def test_first_overlap_finds_one_exactly_when_there_is_one(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(3, 9) for _ in range(rng.randint(1, 3)))
    some = [random_box(rng, shape) for _ in range(rng.randint(1, 4))]
    pair = tensor_slices.first_overlap(some)
    assert (pair is not None) == (sum(mask(shape, box).astype(int) for box in some).max() > 1)
    assert pair is None or tensor_slices.intersection(*pair) is not None


def test_no_dims():
    assert (
        tensor_slices.whole(()) == ()
        and tensor_slices.volume(()) == 1
        and tensor_slices.intersection((), ()) == ()
    )
    assert tensor_slices.first_overlap([()]) is None and tensor_slices.first_overlap([(), ()]) == (
        (),
        (),
    )
    assert list(tensor_slices.cut((), (), 5)) == [()]


@pytest.mark.parametrize(
    ("box", "words"),
    [
        (((0, 3),), "1 dims, "),
        (((0, 3), (2, 5)), "2:5 in dim 1, "),
        (((2, 1), (0, 4)), "2:1 in dim 0"),
        (((-1, 1), (0, 4)), "-1:1 in dim 0"),
    ],
)
def test_what_is_wrong_with_a_box(box, words):
    assert words in tensor_slices.problem_of(box, (3, 4))


def test_a_right_box_and_its_text():
    assert (
        tensor_slices.problem_of(((0, 3), (2, 2)), (3, 4)) is None
        and tensor_slices.text(((0, 3), (2, 2))) == "[0:3,2:2]"
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_flat_range_is_a_few_boxes_in_order(seed):
    """Their elements, one box after another, are the range; k dims need no more than 2k - 1."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
    elements = np.arange(int(np.prod(shape))).reshape(shape)
    for start in range(elements.size + 1):
        for stop in range(start, elements.size + 1):
            found = list(tensor_slices.of_range(start, stop, shape))
            inside = [
                number
                for box in found
                for number in elements[tensor_slices.slices(box)].ravel().tolist()
            ]
            assert inside == list(range(start, stop)) and len(found) <= max(1, 2 * len(shape) - 1)
            assert all(tensor_slices.volume(box) for box in found)
