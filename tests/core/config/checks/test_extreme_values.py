"""Every flag with a value far outside: problems with a code, or none, never an exception."""

from __future__ import annotations

import pytest

from megatron.arguments import Problems, flags_of
from megatron.config import command_line
from megatron.features.registry import RunConfig

LINE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --vocab-size 100 "
    "--mock-data --tokenizer-type NullTokenizer --eval-iters 1"
).split()
FLAGS = [
    flag.spelling for flag in flags_of(RunConfig).values() if flag.kind not in ("switch", "off")
]


def problems(*words: str) -> list[str]:
    try:
        return command_line.judge([*LINE, *words], 2, RunConfig)[1]
    except Problems as error:
        return error.args[0]


@pytest.mark.parametrize(
    "value",
    [
        "0",
        *(
            pytest.param(value, marks=pytest.mark.campaign)
            for value in ("-1", str(2**62), "1e308", "-1e308", "inf", "nan")
        ),
    ],
)
def test_a_flag_with_an_extreme_value(value):
    found = {flag: problems(flag, value) for flag in FLAGS}
    assert [text for texts in found.values() for text in texts if "[" not in text] == []
    assert sum(map(bool, found.values())) > 20


def test_more_stages_than_memory():
    huge = str(3 * 10**9)
    assert problems("--pipeline-model-parallel-size", huge, "--num-layers", huge)
