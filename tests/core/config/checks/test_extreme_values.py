"""Every flag with a value far outside: problems with a code, or none, never an exception."""

import unicodedata

import pytest

from megatron.arguments import Problems, flags_of
from megatron.config import command_line
from megatron.features.registry import RunConfig
from megatron.problems import error_lines
from tests.problems import CODE, codes_of

LINE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --vocab-size 100 "
    "--mock-data --tokenizer-type NullTokenizer --eval-iters 1"
).split()
# with rules that compute with the values of several groups
RICH = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-samples 64 --lr 1e-3 "
    "--vocab-size 100 --mock-data --tokenizer-type NullTokenizer --eval-iters 1 --lr-init-iters 1 "
    "--lr-warmup-fraction 0.1 --global-batch-size 8 --rampup-batch-size 4 4 64 "
    "--num-experts 4 --moe-router-topk 2 --moe-expert-capacity-factor 1 --disable-bias-linear "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer --bf16 "
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
    "--train-range-to-skip 2 2"
).split()
FLAGS = [
    flag.spelling for flag in flags_of(RunConfig).values() if flag.kind not in ("switch", "off")
]


def problems(line: list[str], *words: str) -> list[str]:
    try:
        return command_line.judge([*line, *words], 8, RunConfig)[1]
    except Problems as error:
        return error.args[0]


@pytest.mark.parametrize(
    "value",
    [
        "0",
        *(
            pytest.param(value, marks=pytest.mark.campaign)
            for value in ("-1", str(2**62), "-1e308", "nan")
        ),
    ],
)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(LINE, id="plain"),
        pytest.param(RICH, id="rich", marks=pytest.mark.campaign),
    ],
)
def test_a_flag_with_an_extreme_value(line, value):
    found = {flag: problems(line, flag, value) for flag in FLAGS}
    assert [text for texts in found.values() for text in texts if "[" not in text] == []
    assert sum(map(bool, found.values())) > 20


def test_more_stages_than_memory():
    huge = str(3 * 10**9)
    assert problems(LINE, "--pipeline-model-parallel-size", huge, "--num-layers", huge)


HOSTILE = {
    "500 digits": "9" * 500,
    "minus 500 digits": "-" + "9" * 500,
    "5000 digits": "9" * 5000,  # more than Python reads
    "1e400": "1e400",
    "nan": "nan",
    "-0": "-0",
    "other digits": "\u0663",
    "superscript": "\u00b2",
    "underscores": "1_0",
    "clear screen": "\x1b[2J",
    "title": "\x1b]0;x\x07",
    "C1": "\x9b2J",
    "carriage return": "a\rb",
    "right to left": "\u202ea",
    "half a pair": "\udcff",
}
QUICK = ("title",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.campaign) for n in HOSTILE],
)
def test_every_flag_takes_or_refuses_a_hostile_value(name):
    found = {flag: problems(LINE, flag, HOSTILE[name]) for flag in FLAGS}
    assert [text for texts in found.values() for text in texts if not CODE.search(text)] == []
    numbers = [flag.spelling for flag in flags_of(RunConfig).values() if flag.type in (int, float)]
    if name not in ("-0", "other digits", "underscores"):
        wrong = (
            "value-malformed",
            "value-not-finite",
            "value-out-of-range",
            "value-count-wrong",
            "value-not-a-choice",
            "value-not-utf8",
        )
        said = {flag: [code for code in codes_of(found[flag]) if code in wrong] for flag in numbers}
        assert {flag for flag in numbers if len(said[flag]) != 1} == set()
    # ... and what is printed of it acts on no terminal
    lines = error_lines(text for texts in found.values() for text in texts)
    assert not {sign for sign in lines if sign != "\n" and unicodedata.category(sign)[0] == "C"}


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:SECRET@bucket/x",
        pytest.param("https://me:SEC/RET@host:80/x", marks=pytest.mark.campaign),
    ],
)
def test_no_flag_takes_a_url_with_credentials_or_repeats_it(url):
    for flag in FLAGS:
        found = problems(LINE, flag, url)
        assert "url-has-credentials" in codes_of(found), flag
        assert "RET@" not in "".join(found), flag
