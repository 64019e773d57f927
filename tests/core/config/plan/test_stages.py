"""Layers over stages and chunks: all of them once, as even as can be, or a message."""

import pytest

from megatron.config.plan.stages import (
    check_micro_batches,
    chunks_per_stage,
    split_layers,
)
from tests.problems import raises


def in_order(split) -> list[int]:
    """The layers in the order in which a micro-batch meets them."""
    return [layer for chunk in range(len(split[0])) for stage in split for layer in stage[chunk]]


def sizes(split) -> list[int]:
    return [sum(map(len, stage)) for stage in split]


@pytest.mark.parametrize("stages", range(1, 17))
def test_every_layer_once_and_as_even_as_can_be(stages):
    for chunks in range(1, 5):
        for num_layers in range(stages * chunks, 130):
            split = split_layers(num_layers, stages, chunks)
            assert in_order(split) == list(range(num_layers))
            parts = [len(chunk) for stage in split for chunk in stage]
            assert len(parts) == stages * chunks and max(parts) - min(parts) == (
                num_layers % (stages * chunks) > 0
            )
            assert max(sizes(split)) - min(sizes(split)) == (num_layers % stages > 0)


@pytest.mark.parametrize(
    "num_layers, stages, want",
    [
        (32, 3, [10, 11, 11]),
        (60, 16, [3] * 4 + [4] * 12),
        (30, 4, [7, 7, 8, 8]),
        (80, 16, [5] * 16),
        (24, 1, [24]),
    ],
)
def test_the_remainder_goes_to_the_last_stages(num_layers, stages, want):
    """The first two are InternLM's own figures."""
    assert sizes(split_layers(num_layers, stages)) == want


def test_chunks_of_a_stage_are_apart():
    assert split_layers(8, 2, 2) == ((range(0, 2), range(4, 6)), (range(2, 4), range(6, 8)))
    assert split_layers(10, 2, 2) == ((range(0, 2), range(4, 7)), (range(2, 4), range(7, 10)))


@pytest.mark.parametrize(
    "first, last, want",
    [
        (2, None, [2, 7, 7, 8]),
        (None, 3, [7, 7, 7, 3]),
        (4, 2, [4, 9, 9, 2]),
        (10, 10, [10, 2, 2, 10]),
    ],
)
def test_given_ends(first, last, want):
    num_layers = sum(want)
    split = split_layers(num_layers, 4, first=first, last=last)
    assert sizes(split) == want and in_order(split) == list(range(num_layers))


def test_given_ends_in_chunks():
    split = split_layers(24, 4, 2, first=4, last=8)
    assert [[len(chunk) for chunk in stage] for stage in split] == [[2, 2], [3, 3], [3, 3], [4, 4]]
    assert in_order(split) == list(range(24))
    assert sizes(split_layers(8, 2, first=3, last=5)) == [3, 5]


@pytest.mark.parametrize(
    "arguments, code, named",
    [
        (
            (3, 4),
            "layers-too-few-for-stages",
            ["--num-layers 3", "--pipeline-model-parallel-size 4"],
        ),
        ((7, 4, 2), "layers-too-few-for-stages", ["--num-layers 7", "4 x 2", 8]),
        ((8, 1, 1, 8), "pipeline-flag-without-pipeline", ["--decoder-first-pipeline-num-layers 8"]),
        ((8, 2, 1, 0), "stage-layers-do-not-fit", ["--decoder-first-pipeline-num-layers 0"]),
        (
            (24, 4, 2, None, 5),
            "stage-layers-do-not-fit",
            ["--decoder-last-pipeline-num-layers 5", "--num-virtual-stages-per-pipeline-rank 2"],
        ),
        ((8, 2, 1, 3, 4), "layers-too-few-for-stages", ["--num-layers 8", 1, 0]),
        ((8, 2, 1, 5, 4), "layers-too-few-for-stages", [-1, 0]),
        (
            (8, 4, 1, 4, 3),
            "layers-too-few-for-stages",
            ["--num-layers 8", "first-pipeline-num-layers 4, --decoder-last", 1, 2],
        ),
    ],
)
def test_refused_splits(arguments, code, named):
    with raises(ValueError, code, *named):
        split_layers(*arguments)


def test_virtual_stages():
    assert chunks_per_stage(24, 4) == 1
    assert chunks_per_stage(24, 4, chunks=3) == 3
    assert chunks_per_stage(24, 4, layers_per_chunk=2) == 3
    assert chunks_per_stage(24, 4, layers_per_chunk=6) == 1
    assert chunks_per_stage(24, 1, chunks=1) == 1
    assert chunks_per_stage(24, 4, chunks=2, uneven=True) == 2


def test_layers_per_virtual_stage_are_what_was_asked_or_refused():
    for stages in range(2, 17):
        for per_chunk in range(1, 9):
            for num_layers in range(1, 97):
                try:
                    chunks = chunks_per_stage(num_layers, stages, per_chunk)
                except ValueError:
                    assert num_layers % (stages * per_chunk)
                    continue
                split = split_layers(num_layers, stages, chunks)
                assert in_order(split) == list(range(num_layers))
                assert {len(chunk) for stage in split for chunk in stage} == {per_chunk}


PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"


@pytest.mark.parametrize(
    "arguments, code, named",
    [
        (
            (80, 16, 2),
            "layers-not-divisible-by-stages",
            [f"{PER_CHUNK} 2", "--num-layers 80", "= 32", f"{PER_CHUNK} 1 or 5"],
        ),
        ((30, 4, 2), "layers-not-divisible-by-stages", ["--num-layers 30", CHUNKS]),
        ((24, 4, 2, 3), "flags-exclude-each-other", [f"{PER_CHUNK} 2", f"{CHUNKS} 3"]),
        ((24, 4, 0), "value-out-of-range", [f"{PER_CHUNK} 0"]),
        ((24, 4, None, 0), "value-out-of-range", [f"{CHUNKS} 0"]),
        (
            (24, 4, 3, None, True),
            "flags-exclude-each-other",
            ["--decoder-first-pipeline-num-layers", CHUNKS],
        ),
        ((24, 1, 3), "pipeline-flag-without-pipeline", ["--pipeline-model-parallel-size"]),
        ((24, 1, None, 2), "pipeline-flag-without-pipeline", [f"{CHUNKS} 2"]),
    ],
)
def test_refused_virtual_stages(arguments, code, named):
    with raises(ValueError, code, *named):
        chunks_per_stage(*arguments)


def test_micro_batches_of_an_interleaved_schedule():
    check_micro_batches(5, 4, 1)
    check_micro_batches(8, 4, 2)
    code = "micro-batches-not-divisible-by-stages"
    with raises(
        ValueError, code, "6 micro-batches", "--pipeline-model-parallel-size 4", "8 (or 4)"
    ):
        check_micro_batches(6, 4, 2)
    with raises(ValueError, code, "3 micro-batches", "4 (or 8)"):
        check_micro_batches(3, 4, 2)
