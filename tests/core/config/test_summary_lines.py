"""The first screen of a run: its numbers follow the flags, and no line is wider than the screen."""

from __future__ import annotations

import shlex

import pytest

from megatron.arguments import config_from, flags_of, parse, values_of
from megatron.config import command_line, summary_lines
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config

GOOD = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --lr 1e-3 --mock-data --vocab-size 100"
)


def summary(flags: str, world_size: int = 1) -> str:
    environ = {"RANK": "0", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    line = command_line.read(f"{GOOD} {flags}".split(), environ)
    lines = summary_lines.summary(line.config, make_plan(line.config, world_size, 100), "T")
    text = "\n".join(lines)
    assert max(map(len, text.splitlines())) <= 100
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("flags", "world_size", "texts"),
    [
        (
            "--train-iters 10 --global-batch-size 8",
            1,
            [
                "8 samples = micro-batch 2 x accumulation 4 x data-parallel 1; 256 tokens",
                "10 iterations, 80 samples, 2,560 tokens; validation every 1,000 iterations: 800 "
                "samples",
                "learning rate 0.001, linear decay to 0 at iteration 10; no warm-up",
                "T, vocabulary 100, padded to 128",
                "Adam (betas 0.9 0.999, eps 1e-08), weight decay 0.01, gradient clipping 1",
            ],
        ),
        (
            "--train-iters 10 --pipeline-model-parallel-size 2 --use-distributed-optimizer",
            4,
            ["4 ranks = data 2 x pipeline 2; optimizer state sharded over 2 ranks"],
        ),
        (
            "--train-iters 10 --num-experts 4 --disable-bias-linear --expert-model-parallel-size 2",
            2,
            ["2 ranks = data 2; experts: expert 2 x expert-tensor 1"],
        ),
        (
            "--train-samples 100 --lr-warmup-samples 10 --lr-decay-style cosine --min-lr 1e-4",
            1,
            ["0.001, cosine decay to 0.0001 at sample 100; warm-up 10 samples"],
        ),
        (
            "--train-iters 2000 --lr-decay-style WSD-S --lr-wsd-decay-iters 100 --min-lr 1e-4 "
            "--lr-wsd-decay-end-iters 500 1000",
            1,
            ["0.001, WSD-S decays to 0.0001 at iterations 500, 1,000, 2,000; no warm-up"],
        ),
        (
            "--train-samples 2000 --lr-decay-style power --lr-wsd-decay-samples 200 "
            "--global-batch-size 8",
            1,
            ["0.001 or 32 x tokens^-0.51, decay to 0 at sample 2,000; no warm-up"],
        ),
        (
            "--train-iters 10 --lr-decay-style constant --optimizer sgd --clip-grad 0 "
            "--eval-iters 0",
            1,
            ["SGD (momentum 0.9)", "no gradient clipping", "0.001, constant", "; no validation"],
        ),
        (
            "--train-samples 100 --rampup-batch-size 2 2 20 --global-batch-size 8",
            1,
            ["8 samples = micro-batch 2", "; ramp-up from 2 samples"],
        ),
        (
            "--train-iters 10 --train-range-to-skip 2 3 --exit-interval 5",
            1,
            ["(2 iterations will be skipped); exits at multiples of 5 iterations"],
        ),
        (
            "--train-iters 10 --lr-warmup-fraction 0.1 --group-query-attention "
            "--num-query-groups 2",
            1,
            ["warm-up 0.1 of the decay", "4 heads (2 key/value) of 16"],
        ),
    ],
)
def test_numbers_of_the_flags(flags, world_size, texts):
    text = summary(flags, world_size)
    assert [one for one in texts if one not in text] == []
    assert (" layout " in f" {text} ") == (world_size > 1)


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
    lines = summary_lines.changed_arguments(config)
    again = shlex.split("\n".join(lines).replace("\\\n", " "))
    assert config_from(Config, parse(command_line.parser(), again).typed) == config
    assert all(line.endswith(" \\") for line in lines[:-1]) and not lines[-1].endswith("\\")
    spelled = {word for word in again if word.startswith("--")}
    same = [
        flag for name, flag in flags_of(Config).items() if values_of(config)[name] == flag.default
    ]
    assert not spelled & {flag.spelling for flag in same}
