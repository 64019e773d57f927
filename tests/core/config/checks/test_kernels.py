"""Choices between kernels that some machine can meet are accepted in silence (those that none can:
cases.txt)."""

import pytest

from tests.core.config.checks.checked_flags import BASE, checked


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--attention-backend local",
        "--attention-backend unfused --no-masked-softmax-fusion",
        "--no-masked-softmax-fusion",
        "--attention-backend fused --attention-dropout 0",
        "--use-flash-attn --attention-dropout 0 --bf16",
        "--transformer-impl transformer_engine --bf16",
        "--swiglu --no-bias-swiglu-fusion",
        "--no-gradient-accumulation-fusion",
        "--position-embedding-type rope --no-rope-fusion",
    ],
)
def test_what_some_machine_can_do(flags):
    assert checked(flags, base=f"{BASE} --min-lr 0") == ([], [])
