"""The first screen of a run: its numbers follow the flags, and no line is wider than the screen."""

import shlex

import pytest

from megatron.arguments import config_from, flags_of, parse, values_of
from megatron.config import command_line
from megatron.config.plan import report
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config
from tests.problems import numbers

GOOD = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --lr 1e-3 --mock-data --vocab-size 100"
)


def summary(flags: str, world_size: int = 1) -> dict[str, str]:
    """{label: text} of the entries."""
    environ = {"RANK": "0", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    line = command_line.read(f"{GOOD} {flags}".split(), environ)
    entries = report.entries(line.config, make_plan(line.config, world_size, 100))
    for label, text in entries.items():
        rows = report.entry(label, text).splitlines()
        assert max(map(len, rows)) <= 100 and rows[0].split(maxsplit=1)[0] in label
        assert " ".join(" ".join(rows).split()) == f"{label} {text}"
    return entries


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        (
            "--train-iters 10 --global-batch-size 8",
            1,
            {
                "batch": [8, 2, 4, 1, 8 * 32],
                "training": [10, 80, 80 * 32, 1000, 100 * 8],
                "learning rate": [0.001, "linear", 0, 10],
                "tokenizer": ["NullTokenizer", 100, 128],
                "optimizer": ["Adam", 0.9, 0.999, 1e-8, 0.01, 1],
            },
        ),
        (
            "--train-iters 10 --pipeline-model-parallel-size 2 --use-distributed-optimizer",
            4,
            {"layout": [4, "data", 2, "pipeline", 2, "sharded", 2]},
        ),
        (
            "--train-iters 10 --num-experts 4 --disable-bias-linear --expert-model-parallel-size 2",
            2,
            {"layout": [2, "data", 2, "expert", 2, "expert-tensor", 1]},
        ),
        (
            "--train-samples 100 --lr-warmup-samples 10 --lr-decay-style cosine --min-lr 1e-4",
            1,
            {"learning rate": [0.001, "cosine", 0.0001, 100, "warm-up", 10]},
        ),
        (
            "--train-iters 2000 --lr-decay-style WSD-S --lr-wsd-decay-iters 100 --min-lr 1e-4 "
            "--lr-wsd-decay-end-iters 500 1000",
            1,
            {"learning rate": [0.001, "WSD-S", 0.0001, 500, 1000, 2000]},
        ),
        (
            "--train-samples 2000 --lr-decay-style power --lr-wsd-decay-samples 200 "
            "--global-batch-size 8",
            1,
            {"learning rate": [0.001, 32, "tokens", -0.51, 0, 2000]},
        ),
        (
            "--train-iters 10 --lr-decay-style constant --optimizer sgd --clip-grad 0 "
            "--eval-iters 0",
            1,
            {
                "optimizer": ["SGD", 0.9, 0.01],
                "learning rate": [0.001, "constant"],
                "training": [10, 20, 20 * 32],
            },
        ),
        (
            "--train-samples 100 --rampup-batch-size 2 2 20 --global-batch-size 8",
            1,
            {"batch": [8, 2, 4, 1, 8 * 32, "ramp-up", 2]},
        ),
        (
            "--train-iters 10 --train-range-to-skip 2 3 --exit-interval 5",
            1,
            {"training": [10, 20, 20 * 32, "skipped", 2, 5, 1000, 100 * 2]},
        ),
        (
            "--train-iters 10 --lr-warmup-fraction 0.1 --group-query-attention "
            "--num-query-groups 2",
            1,
            {"learning rate": [0.001, "linear", 0, 10, "warm-up", 0.1]},
        ),
    ],
)
def test_numbers_of_the_flags(flags, world_size, expected):
    """Of each entry all numbers, in order, and some words."""
    texts = summary(flags, world_size)
    for label, values in expected.items():
        assert numbers(texts[label]) == [v for v in values if not isinstance(v, str)], texts[label]
        assert [v for v in values if isinstance(v, str) and v not in texts[label]] == []
    assert ("layout" in texts) == (world_size > 1)


def test_heads_that_share_keys_are_counted():
    text = summary("--train-iters 10 --group-query-attention --num-query-groups 2")["model"]
    assert "4 heads (2 " in text and "64" in text


def test_changed_arguments_can_be_given_to_a_shell():
    """They give the same configuration, also where a value has blanks; what has its default is not
    there."""
    words = [
        *GOOD.split(),
        "--train-iters",
        "10",
        "--save",
        "a b/c'd",
        "--metrics-file",
        "x" * 90,
    ]
    config = config_from(Config, parse(command_line.parser(), words).typed)
    lines = report.changed_arguments(config)
    again = shlex.split("\n".join(lines).replace("\\\n", " "))
    assert config_from(Config, parse(command_line.parser(), again).typed) == config
    assert all(line.endswith(" \\") for line in lines[:-1]) and not lines[-1].endswith("\\")
    spelled = {word for word in again if word.startswith("--")}
    same = [
        flag for name, flag in flags_of(Config).items() if values_of(config)[name] == flag.default
    ]
    assert not spelled & {flag.spelling for flag in same}
