"""The TensorBoard writer where its package is missing; what it writes is in test_metrics."""

from __future__ import annotations

import sys

from megatron.training.logging.tensorboard import TensorBoard
from tests import problems


def test_a_missing_package_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with problems.raises(ValueError, "package-missing", "--tensorboard-dir"):
        TensorBoard(str(tmp_path), 10)
