"""What is compared of student and teacher: distributions over a vocabulary that is split over
ranks, and hidden states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.cross_entropy import capped, loss_dtype
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Axis

from .teacher import BLOCKS

# What differences of probabilities are multiplied by while they are stored in 16 bits: the smallest
# number of fp16 is 6e-8.
STORED = 4096.0


def divergence(
    student: Tensor,
    teacher: Tensor,
    *,
    vocab_size: int,
    tp: Axis,
    temperature: float = 1.0,
    softcaps: tuple[float | None, float | None] = (None, None),
) -> Tensor:
    """KL(teacher || student) of each token [b, s], of logits [s, b, v/tp] over the temperature:
    column j holds id tp.rank * v/tp + j, and those from `vocab_size` on are padding. `softcaps`:
    those of student and teacher, which the logits are before.

    The memory of `teacher` is overwritten: it keeps the gradient for backward. Two collectives,
    whatever the size of the vocabulary.
    """
    s, b, columns = student.shape
    valid = min(max(vocab_size - tp.rank * columns, 0), columns)
    rows = (student.reshape(s * b, columns), teacher.view(s * b, columns))
    return _Divergence.apply(*rows, valid, tp, temperature, softcaps).view(s, b).t()


def hidden_losses(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """Of hidden states [s, b, h], of each token [b, s]: 1 - cosine, or the mean square of what
    differs."""
    dtype = loss_dtype(student)
    student, teacher = student.to(dtype), teacher.to(dtype)
    if kind == "mse":
        return (student - teacher).square().mean(-1).t()
    return 1.0 - F.cosine_similarity(student, teacher, dim=-1).t()


class _Divergence(torch.autograd.Function):
    """Of rows [n, columns]. The gradient, softmax(student) - softmax(teacher), is made at once,
    since the student's logits are overwritten by the backward of another loss."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        valid: int,
        tp: Axis,
        temperature: float,
        softcaps: tuple[float | None, float | None],
    ) -> Tensor:
        dtype = loss_dtype(student)
        n, columns = student.shape
        step = max(1, BLOCKS[student.device.type != "cpu"] // columns)
        blocks = [slice(start, start + step) for start in range(0, n, step)] if valid else []

        def scaled(rows: slice) -> tuple[Tensor, Tensor]:
            """Student's and teacher's, in new memory."""
            return (
                capped(student[rows, :valid], softcaps[0], dtype).to(dtype) / temperature,
                capped(teacher[rows, :valid], softcaps[1], dtype).to(dtype) / temperature,
            )

        # of this rank's columns: logsumexp of both, the mean difference by the teacher
        logs = student.new_full((2, n), -torch.inf, dtype=dtype)
        gap = student.new_zeros(n, dtype=dtype)
        for rows in blocks:
            of_student, of_teacher = scaled(rows)
            logs[0, rows] = of_student.logsumexp(-1)
            logs[1, rows] = of_teacher.logsumexp(-1)
            weights = (of_teacher - logs[1, rows, None]).exp_()
            gap[rows] = of_teacher.sub_(of_student).mul_(weights).sum(-1)
        peaks = all_reduce(logs, tp, "max")
        shares = (logs - peaks).exp()
        sums = all_reduce(torch.cat((shares, (shares[1] * gap).unsqueeze(0))), tp)
        log_z = sums[:2].log() + peaks
        for rows in blocks:
            of_student, of_teacher = scaled(rows)
            slopes = None
            if softcaps[0] is not None:
                slopes = 1.0 - (of_student * (temperature / softcaps[0])).square()
            of_student.sub_(log_z[0, rows, None]).exp_()
            of_student.sub_(of_teacher.sub_(log_z[1, rows, None]).exp_())
            if slopes is not None:
                of_student.mul_(slopes)
            teacher[rows, :valid] = of_student.mul_(STORED).to(teacher.dtype)
        teacher[:, valid:] = 0
        ctx.gradient = teacher
        ctx.factor = 1.0 / (temperature * STORED)
        return sums[2] / sums[1] - (log_z[1] - log_z[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_((grad * ctx.factor).unsqueeze(1)), *[None] * 5
