"""The TensorBoard writer where its package is missing; what it writes is in test_metrics."""

from __future__ import annotations

import sys

import pytest

from megatron.training.logging.tensorboard import TensorBoard


def test_a_missing_package_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ValueError, match="--tensorboard-dir needs the package tensorboard: pip install tensorboard"
    ):
        TensorBoard(str(tmp_path), 10)
