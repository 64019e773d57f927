"""Samplers: golden vectors, and that they are pure functions of the samples consumed."""

import itertools

import pytest

from megatron.data.cyclic_sampler import CyclicSampler
from megatron.data.sampler import SequentialSampler
from tests import problems


def take(sampler, consumed, count=None):
    return list(itertools.islice(sampler.micro_batches(consumed), count))


def test_golden_sequential():
    assert take(SequentialSampler(20, 2, 0, 2), 4) == [[4, 5], [8, 9], [12, 13], [16, 17]]
    assert take(SequentialSampler(20, 2, 1, 2), 4) == [[6, 7], [10, 11], [14, 15], [18, 19]]


def test_golden_cyclic():
    sharded = [CyclicSampler(14, 2, rank, 2, data_sharding=True) for rank in range(2)]
    assert take(sharded[0], 4, 2) == [[3, 0], [1, 4]] and take(sharded[1], 4, 2) == [
        [9, 6],
        [7, 10],
    ]
    shared = [CyclicSampler(14, 2, rank, 2, data_sharding=False) for rank in range(2)]
    assert take(shared[0], 4, 2) == [[2, 9], [1, 5]] and take(shared[1], 4, 2) == [
        [11, 10],
        [12, 13],
    ]


@pytest.mark.parametrize(
    ("dp_size", "micro_batch"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]
)
def test_a_global_batch_is_the_same_samples_in_every_layout(dp_size, micro_batch):
    """Eight samples a step: whatever the layout, step k takes samples 8k .. 8k + 7."""
    samplers = [SequentialSampler(100, micro_batch, rank, dp_size) for rank in range(dp_size)]
    for step in range(12):
        consumed = range(8 * step, 8 * step + 8, micro_batch * dp_size)
        taken = [n for at in consumed for sampler in samplers for n in sampler.micro_batch(at)]
        assert taken == list(range(8 * step, 8 * step + 8))


def test_the_last_incomplete_chunk_is_dropped():
    sampler = SequentialSampler(21, 2, 1, 2)
    assert sampler.micro_batches_left(0) == 5 and sampler.micro_batches_left(18) == 0
    assert take(sampler, 16) == [[18, 19]]
    for consumed in (18, 20, 21, 400):
        with problems.raises(ValueError, "data-exhausted", consumed, "21", "--train-iters"):
            sampler.micro_batch(consumed)


@pytest.mark.parametrize("data_sharding", [True, False])
def test_cyclic_resumes_anywhere(data_sharding):
    """A run resumed at any step draws what the straight run drew, over epoch ends; each epoch shows
    a sample once."""
    samplers = [CyclicSampler(29, 2, rank, 3, data_sharding) for rank in range(3)]
    assert samplers[0].samples_per_epoch == 24
    straight = [take(sampler, 0, 12) for sampler in samplers]
    for resumed in range(12):
        fresh = [CyclicSampler(29, 2, rank, 3, data_sharding) for rank in range(3)]
        rest = [take(sampler, 6 * resumed, 12 - resumed) for sampler in fresh]
        assert rest == [drawn[resumed:] for drawn in straight]
    for epoch in range(3):
        seen = [
            n for drawn in straight for batch in drawn[4 * epoch : 4 * epoch + 4] for n in batch
        ]
        assert len(set(seen)) == 24 and set(seen) <= set(range(29))
    assert straight[0][:4] != straight[0][4:8]


def test_cyclic_ranks_end_an_epoch_together():
    """15 samples, 4 ranks without sharding: Megatron's first ranks would take a fourth micro-batch
    of epoch 0."""
    samplers = [CyclicSampler(15, 1, rank, 4, data_sharding=False) for rank in range(4)]
    drawn = [take(sampler, 0, 3) for sampler in samplers]
    assert len({n for rank in drawn for (n,) in rank}) == 12
    assert [sampler.micro_batches_left(8) for sampler in samplers] == [1] * 4
    epoch_1 = [take(sampler, 12, 1) for sampler in samplers]
    assert len({n for rank in epoch_1 for (n,) in rank}) == 4


def test_cyclic_refuses_another_layout():
    with pytest.raises(ValueError, match=r"--dataloader-type cyclic: 6\b"):
        CyclicSampler(40, 2, 0, 2).micro_batch(6)


@pytest.mark.parametrize("kind", [SequentialSampler, CyclicSampler])
def test_a_dataset_smaller_than_a_step(kind):
    assert take(kind(8, 2, 0, 4), 0, 1)
    with problems.raises(ValueError, "data-too-small", "--micro-batch-size"):
        kind(7, 2, 0, 4)


def test_order_names_what_matters():
    assert SequentialSampler(20, 2, 0, 2).order() == SequentialSampler(90, 3, 1, 4).order()
    assert CyclicSampler(20, 2, 0, 2).order() == CyclicSampler(20, 2, 1, 2).order()
    assert CyclicSampler(20, 2, 0, 2).order() != CyclicSampler(20, 1, 0, 4).order()
