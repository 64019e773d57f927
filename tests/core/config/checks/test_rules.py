"""Every rule of a command line: what is refused or noted (cases.txt), all at once, and what is
accepted."""

import pytest

from megatron.arguments import config_from
from megatron.config.checks import rules as check
from megatron.config.tree import Config
from tests.core.config.checks.cases import BASES, files, texts
from tests.core.config.checks.checked_flags import BASE, checked
from tests.problems import assert_problem, codes_of


def test_the_base_has_no_problem_and_nothing_to_note():
    assert checked("") == ([], [])
    assert checked("", world_size=64) == ([], [])


@pytest.mark.parametrize("file", files(), ids=lambda file: "-".join(file.parts[-4:-1]))
def test_each_case_is_one_line_with_its_code(file):
    """Of the texts of the file, which are those of the program (tests/house/test_codes.py)."""
    found = texts(file)
    assert found
    for case, lines in found:
        assert len(lines) == 1, case
        assert_problem(lines[0], case.code, *case.named)


def test_an_empty_command_line_is_told_everything_at_once():
    config = config_from(Config, {})
    problems = check.problems(config, 1, {})
    assert [line.split()[0] for line in problems] == [
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--max-position-embeddings",
        "--micro-batch-size",
        "--lr",
        "--train-iters",
        "no",
        "--vocab-file",
        "--merge-file",
    ]


def test_many_rules_broken_are_many_lines():
    problems, _ = checked(
        "--hidden-size 65 --fp16 --bf16 --min-lr 1 --split 0,1 --global-batch-size 7 "
        "--context-parallel-size 8 --attention-dropout 2 --iterations-to-skip 99"
    )
    assert len(problems) == 8


def test_the_run_counted_in_samples():
    base = BASES["samples"]
    assert checked("", base=base) == ([], [])
    assert checked("--rampup-batch-size 2 2 20 --global-batch-size 8", base=base) == ([], [])
    assert checked(["--step-batch-size-schedule", "0:2 640:4"], base=base) == ([], [])


def test_a_resumed_run_may_have_passed_the_sizes_that_do_not_fit():
    base = BASES["samples"]
    flags = "--rampup-batch-size 2 1 20 --global-batch-size 4"
    assert len(checked(flags, base=base)[0]) == 1
    load = " --load x --save x --save-interval 5"
    assert checked(flags + load, base=base)[0] == []
    flags = "--rampup-batch-size 2 1 20 --global-batch-size 5"
    assert len(checked(flags + load, base=base)[0]) == 1


TP = "--tensor-model-parallel-size"
CP = "--context-parallel-size"


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--device cuda --distributed-backend nccl", 2),
        (f"{TP} 2", 2),
        (f"{TP} 4 --sequence-parallel", 8),
        (f"{TP} 4 --seq-length 30", 4),
        (f"{TP} 2 --vocab-size 99", 2),
        (f"{TP} 2 --group-query-attention --num-query-groups 2 --sequence-parallel", 4),
        (f"{TP} 4 --hidden-size 62 --kv-channels 8", 4),
        (f"{CP} 2", 2),
        (f"{CP} 3 --seq-length 30", 3),
        (f"{CP} 4 {TP} 2 --sequence-parallel --cp-comm-type all_gather", 16),
        (f"{CP} 2 {TP} 4 --seq-length 28", 8),
    ],
)
def test_what_splits_over_the_ranks(flags, world_size):
    """... sequence parallelism is then on without a word; a split sequence is the only reason to
    split the length."""
    assert checked(flags, world_size) == ([], [])


PP = "--pipeline-model-parallel-size"
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
FIRST = "--decoder-first-pipeline-num-layers"


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (f"--num-layers 30 {PP} 4", 4),
        (f"--num-layers 80 {PP} 16 {PER_CHUNK} 5 --global-batch-size 64", 32),
        (f"--num-layers 80 {PP} 16 {CHUNKS} 2 --global-batch-size 32", 16),
        (f"--num-layers 5 {PP} 2 {FIRST} 2", 4),
        (f"--num-layers 5 {PP} 2 --no-overlap-p2p-communication", 2),
        (f"--num-layers 8 {PP} 4 --global-batch-size 12", 4),
    ],
)
def test_what_makes_a_pipeline(flags, world_size):
    assert checked(flags, world_size) == ([], [])


def test_every_phase_of_a_ramp_must_fit_an_interleaved_pipeline():
    """... of those that are still to come; evaluation has the size of the last one."""
    base = BASE.replace("--train-iters 10", "--train-samples 1000").replace(
        "--num-layers 2", "--num-layers 8"
    )
    flags = f"{PP} 2 {CHUNKS} 2 --global-batch-size 16 --rampup-batch-size"
    assert checked(f"{flags} 4 4 100", 2, base=base)[0] == []
    lines = checked(f"{flags} 2 2 100", 2, base=base)[0]
    assert codes_of(lines) == ["micro-batches-not-divisible-by-stages"] * 4
    assert [int(line.split()[0]) for line in lines] == [1, 3, 5, 7]
    assert checked(f"{flags} 2 2 100 --load x --save x --save-interval 5", 2, base=base)[0] == []


def test_instances_of_the_distributed_optimizer():
    """They divide the ranks that hold the same weights, which tensor parallelism leaves fewer
    of."""
    flags = f"{TP} 2 --global-batch-size 8 --num-distributed-optimizer-instances"
    for number, world_size in ((2, 8), (4, 8), (1, 8), (2, 4)):
        assert checked(f"{flags} {number} --use-distributed-optimizer", world_size) == ([], [])
    every = (
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 9"
    )
    assert checked(every, 2) == ([], [])


@pytest.mark.parametrize(
    "flags",
    [
        "--fp16 --initial-loss-scale 65536",
        "--optimizer sgd --sgd-momentum 0.5",
        "--load x --save x --save-interval 5 --finetune",
        "--use-rotary-position-embeddings --rotary-percent 0.5",
        "--dataloader-type cyclic --no-data-sharding",
        "--no-bias-gelu-fusion",
        "--lr-decay-style WSD --lr-wsd-decay-iters 3",
        "--lr-decay-style WSD-S --lr-wsd-decay-iters 3 --lr-wsd-decay-end-iters 4 7 "
        "--lr-warmup-iters 1",
        "--lr-decay-style power --lr-wsd-decay-iters 3 --lr-power-amplitude 1",
        "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style inverse --min-lr 1e-4",
        "--kv-channels 7",
        "--num-query-groups 4",
        "--eval-iters 0",
        "--lr-warmup-fraction 0.01",
        "--save x --save-interval 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--bf16 --loss-scale 4",
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
        "--lr 0",
        "--decoupled-lr 1 --min-lr 1e-4",
        "--decoupled-lr 1e-5 --min-lr 1e-4 --decoupled-min-lr 1e-5",
        "--qk-layernorm --apply-wd-to-qk-layernorm",
        "--fp16 --loss-scale 1000",
        "--lr-warmup-iters 2 --lr-warmup-init 1e-5",
        "--lr-decay-iters 9 --lr-decay-style constant --lr-warmup-fraction 0.5",
        "--add-qkv-bias --disable-bias-linear",
        "--reset-position-ids --position-embedding-type rope",
        "--control-file x --save x --save-interval 5",
        "--save x --save-interval 5 --load ./x",
        "--snapshot-dir s3://bucket/x --load /",
        "--timing-log-option all --timing-log-level 1",
        "--decrease-batch-size-if-needed --global-batch-size 5",
    ],
)
def test_what_needs_no_word(flags):
    assert checked(flags) == ([], [])


def test_skipped_iterations_are_shown_normalised():
    problems, notes = checked("--train-range-to-skip 5 6 3 4 --iterations-to-skip 9")
    assert not problems
    assert notes[-1].endswith("5 iterations: --train-range-to-skip 3 6 9 9")
    assert_problem(
        notes[0], "skip-large-share", "5 of 10 iterations (50.0 %)", "10 samples", "320 tokens"
    )
