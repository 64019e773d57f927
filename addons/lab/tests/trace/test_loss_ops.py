"""What cross entropy of CUDA costs, counted on the meta device. What its kernels compute is in
interpreted.py."""

from __future__ import annotations

import pytest
import torch

from megatron.addons.lab.tests.trace.layer_costs import of_cross_entropy
from megatron.kernels.cuda import availability


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", availability.DTYPES)
def test_two_launches_that_read_logits_twice_and_write_them_once(dtype, smoothing):
    (launches, read), (launches_back, moved) = of_cross_entropy(dtype, 1, smoothing)
    assert (launches, launches_back) == (1, 1)
    assert read + moved < 3.01 * dtype.itemsize


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_that_split_the_vocabulary_read_their_logits_as_often(tp):
    (launches, read), (launches_back, moved) = of_cross_entropy(torch.bfloat16, tp)
    assert launches + launches_back < 24  # of which two are of logits, the others of a number a row
    assert read + moved < 3.02 * 2


def test_without_triton_it_is_chunks(monkeypatch):
    monkeypatch.setattr(availability, "unavailable_reason", lambda *_: "no Triton")
    (launches, read), (launches_back, moved) = of_cross_entropy(torch.bfloat16)
    assert launches + launches_back > 50 and read + moved > 40
