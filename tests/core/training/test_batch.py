"""Batches from samples: shift, masks and positions at document ends, and which samples an iteration
reads."""

import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron.config.plan.batch_size import build_batch_size_schedule
from megatron.config.skip_ranges import SkipRanges
from megatron.data.sampler import SequentialSampler
from megatron.data.samples import Sample, sample_of
from megatron.kernels.cu_seqlens import cumulative_lengths
from megatron.parallel.context import Axis
from megatron.training import batch
from megatron.training.batch import (
    BatchRules,
    MicroBatch,
    evaluation_samples,
    load_samples,
    make_batch,
    training_samples,
)
from megatron.training.launch.leaving import describe
from tests.forkrun import ROOT

EOD = 9
SAMPLE = MicroBatch(torch.tensor([[1, 2, EOD, 3, EOD, EOD, 4, 5]]))
CPU = torch.device("cpu")


class NotPickled:
    """A data set that cannot be pickled."""

    def __getitem__(self, index):
        return Sample(np.full(5, index))

    def __reduce__(self):
        raise AssertionError("it is pickled")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_micro_batch_for_cuda_is_pinned(device):
    """Else the copy would wait for it."""
    calls = []

    class Rows:
        is_cuda = False

        def pin_memory(self):
            calls.append("pinned")
            return self

        def to(self, device, non_blocking):
            calls.append(device.type)
            assert non_blocking

    MicroBatch(Rows()).to(torch.device(device))
    assert calls == ["pinned"] * (device == "cuda") + [device]


def test_workers_get_the_data_set_without_pickling_it():
    numbers = [[n, n + 1] for n in range(0, 20, 2)]
    found = list(load_samples(NotPickled(), iter(numbers), 2))
    assert [one.rows[:, 0].tolist() for one in found] == numbers


# Reads with two workers, then ends as named.
ENDING = """
import os, signal, sys
import numpy as np, torch
from megatron.data.samples import Sample
from megatron.training.batch import load_samples
from megatron.training.launch.process import exit_now
data = [Sample(np.full(3, i)) for i in range(100)]
batches = load_samples(data, iter([[i] for i in range(100)]), 2)
next(batches)
{
    "ends": lambda: list(batches),
    "fails": lambda: exit_now(3),
    "is asked to end": lambda: os.killpg(os.getpid(), signal.SIGTERM),  # as torchrun does it
    "is killed": lambda: os.kill(os.getpid(), 9),
}[sys.argv[1]]()
"""


@pytest.mark.campaign
@pytest.mark.parametrize(
    "how, code", [("ends", 0), ("fails", 3), ("is asked to end", -15), ("is killed", -9)]
)
def test_a_process_with_workers_leaves_no_temporary_files_however_it(how, code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDING, how],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=120,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == code
    assert not os.listdir(tmp_path)


def test_plain_batch_is_the_shift_alone():
    batch = make_batch(SAMPLE, BatchRules(EOD), CPU)
    assert batch.tokens.tolist() == [[1, 2, EOD, 3, EOD, EOD, 4]]
    assert batch.labels.tolist() == [[2, EOD, 3, EOD, EOD, 4, 5]]
    assert batch.loss_mask is None and batch.position_ids is None and batch.document_ids is None


def test_document_ends():
    batch = make_batch(SAMPLE, BatchRules(EOD, True, True, True), CPU)
    # where the INPUT is the end token
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0, 1]]
    # the end token belongs to its document
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3]]


def test_each_rule_alone():
    assert make_batch(SAMPLE, BatchRules(EOD, reset_position_ids=True), CPU).document_ids is None
    assert make_batch(SAMPLE, BatchRules(EOD, reset_attention_mask=True), CPU).position_ids is None
    assert make_batch(SAMPLE, BatchRules(EOD, eod_mask_loss=True), CPU).loss_mask.sum() == 4


PLAIN = MicroBatch(torch.tensor([[1, 2, EOD, 3, EOD, EOD, 4, 5, 6], [1, 2, 3, 4, 5, 6, EOD, 8, 9]]))
PACKED = MicroBatch(
    torch.tensor([[[*range(8)], [2, 3, 0, 5, 0, 7, 8, 0], [0, 1, 2, 0, 1, 0, 1, 2], [4] * 8]]), True
)


@pytest.mark.parametrize("sample", [PLAIN, PACKED], ids=["plain", "packed"])
def test_a_context_parallel_rank_gets_its_chunks_of_what_holds_for_the_whole_sequence(sample):
    """Documents, positions and masks go on over the cut between the ranks; document ids stay
    whole."""
    whole = make_batch(sample, BatchRules(EOD, True, True, True), CPU)
    for rank, places in ((0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])):
        batch = make_batch(sample, BatchRules(EOD, True, True, True, Axis("cp", 2, rank)), CPU)
        for name in ("tokens", "labels", "loss_mask", "position_ids", "subset_ids"):
            if getattr(whole, name) is not None:
                assert torch.equal(getattr(batch, name), getattr(whole, name)[:, places]), name
        assert torch.equal(batch.document_ids, whole.document_ids)
        plain = make_batch(PLAIN, BatchRules(EOD, cp=Axis("cp", 2, rank)), CPU)
        assert plain.position_ids.tolist() == [places]
        assert plain.loss_mask is None and plain.document_ids is None


def numbers(micro_batch: int, ranks: int, first: int = 1, last: int = 6, skip=()):
    """The samples of each iteration in the order of the global batch, from what each rank reads."""
    schedule = build_batch_size_schedule(
        micro_batch_size=micro_batch, global_batch_size=8, data_parallel_size=ranks
    )
    streams = [
        list(
            training_samples(
                SequentialSampler(100, micro_batch, r, ranks),
                schedule,
                SkipRanges(skip),
                first,
                last,
            )
        )
        for r in range(ranks)
    ]
    return [sample for parts in zip(*streams, strict=True) for part in parts for sample in part]


def test_the_order_knows_nothing_of_layout():
    for micro_batch in (1, 2, 4):
        for ranks in (1, 2):
            assert numbers(micro_batch, ranks) == list(range(48))
    assert numbers(2, 4) == list(range(48))


def test_skipped_iterations_consume_their_samples_unread():
    read = numbers(2, 2, skip=[(2, 3)])
    assert read == [*range(8), *range(24, 48)]
    assert numbers(2, 2, first=4, skip=[(2, 3)]) == list(range(24, 48))


def test_evaluation_goes_on_where_it_was_and_ends():
    sampler = SequentialSampler(10, 2, 1, 2)
    assert list(evaluation_samples(sampler, 4)) == [[6, 7]]


def test_a_micro_batch_is_one_tensor_with_all_of_its_samples():
    """What travels between processes; what is packed is what is unpacked."""
    rows = np.arange(12).reshape(2, 6)
    plain = MicroBatch.pack([Sample(row, hash=9) for row in rows])
    assert plain.rows.tolist() == rows.tolist() and plain.hash == 18
    of_blend = MicroBatch.pack([Sample(row, subset=n) for n, row in enumerate(rows, 5)])
    assert of_blend.rows.tolist() == [[*rows[0], 5], [*rows[1], 6]]
    for one in (plain, of_blend):
        assert torch.equal(one.tokens, torch.from_numpy(rows[:, :-1]))
        assert torch.equal(one.labels, torch.from_numpy(rows[:, 1:]))
        assert one.positions is None
    assert plain.subset_ids is None and of_blend.subset_ids.tolist() == [[5], [6]]
    lines = np.arange(40).reshape(2, 4, 5)
    packed = MicroBatch.pack([sample_of(one) for one in lines])
    assert packed.rows.tolist() == lines.tolist()
    found = (packed.tokens, packed.labels, packed.positions, packed.subset_ids)
    assert torch.equal(torch.stack(found, 1), torch.from_numpy(lines))


@pytest.mark.parametrize(
    "error",
    [
        EOFError(),
        ConnectionResetError(104, "Connection reset by peer"),
        FileNotFoundError(2, "No such file or directory", "/tmp/pymp-1/listener-2"),
    ],
)
def test_a_worker_that_dies_while_it_hands_over_a_micro_batch(error):
    def broken():
        raise error
        yield

    with pytest.raises(RuntimeError, match="DataLoader worker") as found:
        next(batch.handed_out(broken(), True))
    assert describe(found.value).count("\n") == 1
    with pytest.raises(ValueError):
        next(batch.handed_out(broken(), False))


def test_closing_the_samples_ends_the_workers_though_their_iterator_is_alive(monkeypatch):
    """As Python 3.12 keeps it until the exit now and then, where the workers are killed."""
    kept = []
    handed_out = batch.handed_out

    def keeping(batches, *rest):
        kept.append(batches)
        return handed_out(batches, *rest)

    monkeypatch.setattr(batch, "handed_out", keeping)
    before = multiprocessing.active_children()  # servers of other tests
    samples = load_samples(NotPickled(), iter([[0], [1], [2]]), 1)
    next(samples)
    assert set(multiprocessing.active_children()).difference(before)
    samples.close()
    assert kept and not set(multiprocessing.active_children()).difference(before)


@pytest.mark.parametrize(
    "samples",
    [SAMPLE, MicroBatch(torch.tensor([[[1] * 7, [2] * 7, [0, 1, 2, 0, 1, 0, 0], [0] * 7]]), True)],
    ids=["end-of-document tokens", "packed"],
)
def test_a_device_is_not_asked_how_many_documents_it_has(samples):
    """The meta device could not answer: the boundaries are found on the host."""
    rules = BatchRules(EOD, reset_attention_mask=True)
    ids = make_batch(samples, rules, torch.device("meta")).document_ids
    found = cumulative_lengths(ids)
    assert found.is_meta and found.dtype == torch.int32 and found.shape == (5,)
    on_host = make_batch(samples, rules, CPU).document_ids
    assert cumulative_lengths(on_host).tolist() == [0, 3, 5, 6, 7]
