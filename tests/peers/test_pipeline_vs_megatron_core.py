"""Interleaved order, warm-up and layers of each (virtual) stage equal to megatron-core 0.16.1."""

from itertools import product
from types import SimpleNamespace

import pytest

from megatron.config.plan.pipeline_layout import parse_layout, split_with_ends
from megatron.config.plan.schedules import compute_order, warm_up_forwards
from megatron.config.plan.stages import split_layers

pytestmark = pytest.mark.peers

theirs = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
block = pytest.importorskip("megatron.core.transformer.transformer_block")
layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
layer = pytest.importorskip("megatron.core.transformer.transformer_layer")


def communicator(stage: int, stages: int, chunks: int) -> SimpleNamespace:
    """What megatron-core asks for its place in the pipeline."""
    group = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
    return SimpleNamespace(
        pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [2, 3, 4, 8, 16])
def test_order_and_warm_up(stages, chunks):
    for micro_batches in range(stages, 65, stages):
        table = theirs.get_schedule_table(micro_batches, chunks, stages)
        for stage in range(stages):
            total, _, warm_up, _ = theirs.get_pp_rank_microbatches(
                micro_batches, chunks, stages, p2p_communicator=communicator(stage, stages, chunks)
            )
            assert warm_up_forwards(stage, stages, micro_batches, chunks) == warm_up
            order = compute_order(stage, stages, micro_batches, chunks)
            forwards, backwards = (
                [step[1:3] for step in order if step.kind == kind]
                for kind in ("forward", "backward")
            )
            assert forwards == table and len(order) == 2 * total
            assert backwards == [(micro_batch, chunks - 1 - chunk) for micro_batch, chunk in table]
            kinds = "".join(step.kind[0] for step in order)
            assert kinds == "f" * warm_up + "fb" * (total - warm_up) + "b" * warm_up
            evaluation = compute_order(stage, stages, micro_batches, chunks, forward_only=True)
            assert [step[1:3] for step in evaluation] == table


@pytest.mark.parametrize("stages, chunks", [(2, 2), (3, 2), (4, 3)])
def test_groups_of_micro_batches(stages, chunks):
    for micro_batches in range(stages, 4 * stages):
        for group in range(stages, micro_batches + 1):
            if 0 < micro_batches % group < stages:
                continue
            table = theirs.get_schedule_table(micro_batches, chunks, group)
            for stage in range(stages):
                _, _, warm_up, _ = theirs.get_pp_rank_microbatches(
                    micro_batches,
                    chunks,
                    group,
                    p2p_communicator=communicator(stage, stages, chunks),
                )
                assert warm_up_forwards(stage, stages, micro_batches, chunks, group) == warm_up
                order = compute_order(stage, stages, micro_batches, chunks, group=group)
                assert [step[1:3] for step in order if step.kind == "forward"] == table


LAYOUTS = (
    ("Et*3|(tt|)*29,L", 61, 31, None),
    ("E|(t|)*6,L", 6, 4, 2),
    ("Ett|tt,tt|t*2|(tt|ttt)*2|ttL", 20, 7, None),
    ("E(|t)*7L", 7, 2, None),
    ("E|t*12|t|tL", 14, 4, None),
)


@pytest.mark.parametrize("layout, num_layers, stages, chunks", LAYOUTS)
def test_layout_strings(layout, num_layers, stages, chunks):
    want = layouts.PipelineParallelLayerLayout(layout, stages)
    want.validate_layer_layout(num_layers, None)
    split = parse_layout(layout, num_layers, stages, chunks)
    assert [[len(chunk) for chunk in stage] for stage in split] == [
        [chunk.count(layouts.LayerType.decoder) for chunk in stage] for stage in want.layout
    ]


def compared(split, num_layers: int, stages: int, chunks: int, **flags) -> int:
    """Places of which the layers are those of megatron-core, all of them."""
    config = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=stages,
        pipeline_model_parallel_layout=None,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        **{
            "num_layers_in_first_pipeline_stage": None,
            "num_layers_in_last_pipeline_stage": None,
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
            **flags,
        },
    )
    for stage in range(stages):
        for chunk in range(chunks):
            vp_stage = chunk if chunks > 1 else None
            start = layer.get_transformer_layer_offset(config, vp_stage, stage)
            count = block.get_num_layers_to_build(config, vp_stage, stage)
            assert split[stage][chunk] == range(start, start + count)
    return stages * chunks


def test_layers_where_embedding_and_loss_count():
    places = 0
    ends = ((True, False), (False, True), (True, True))
    for stages, chunks, num_layers, (embedding, loss) in product(
        (2, 3, 4), (1, 2, 3), range(1, 73), ends
    ):
        if (num_layers + embedding + loss) % (stages * chunks) == 0:
            places += compared(
                split_with_ends(num_layers, stages, chunks, embedding, loss),
                num_layers,
                stages,
                chunks,
                account_for_embedding_in_pipeline_split=embedding,
                account_for_loss_in_pipeline_split=loss,
            )
    assert places > 1000


def test_layers_of_each_stage():
    places = 0
    for stages, chunks, num_layers in product((2, 3, 4, 8), (1, 2, 3), range(1, 73)):
        if num_layers < stages * chunks:
            continue
        for first, last in (
            (None, None),
            (chunks, None),
            (None, 2 * chunks),
            (2 * chunks, 3 * chunks),
        ):
            middle = num_layers - (first or 0) - (last or 0)
            between = (stages - (first is not None) - (last is not None)) * chunks
            if middle < between or (middle % between if between else middle):
                continue
            # megatron-core divides by the number of stages in between
            if not between and chunks > 1:
                continue
            places += compared(
                split_layers(num_layers, stages, chunks, first, last),
                num_layers,
                stages,
                chunks,
                num_layers_in_first_pipeline_stage=first,
                num_layers_in_last_pipeline_stage=last,
            )
    assert places > 3000
