"""The plan against the seed's figures and against arithmetic done by hand."""

from dataclasses import replace

import pytest

from megatron.config.plan.plan import padded_vocab_size, parameters_per_rank
from megatron.config.plan.state_bytes import bytes_per_rank
from tests.core.config.plan.seed_plan import plan


def test_the_seeds_figures():
    _, p = plan()
    assert p.num_parameters == 354871296
    assert (p.padded_vocab_size, p.padded_vocab_size - p.vocab_size) == (50304, 47)
    assert (p.targets.train, p.targets.valid, p.targets.test) == (8000, 80080, 80)
    assert p.num_microbatches(1) == 2 and p.train_iters == 1000 and p.split == "949,50,1"


def test_targets():
    _, p = plan(eval_interval=300, eval_iters=2)
    assert (p.targets.train, p.targets.valid, p.targets.test) == (8000, 4 * 2 * 8, 16)
    assert plan(skip_train=True)[1].targets.valid == 80
    own = plan(eval_interval=300, eval_global_batch_size=16, eval_micro_batch_size=2)[1]
    assert (own.targets.valid, own.targets.test) == (4 * 10 * 16, 160)
    assert own.evaluation_batch.num_microbatches == 8
    for start, validations in ((0, 4), (300, 4), (301, 3), (900, 2), (901, 1), (2000, 1)):
        later = plan(eval_interval=300, start_eval_at_iter=start)[1]
        assert later.targets.valid == validations * 80
    _, none = plan(eval_iters=0)
    assert (none.targets.valid, none.targets.test) == (0, 0)
    _, samples = plan(train_iters=None, train_samples=8005)
    assert samples.train_iters == 1000 and samples.targets.train == 8005


@pytest.mark.parametrize("ranks, micro_batches", [(1, 2), (2, 1)])
def test_ranks_share_the_batch(ranks, micro_batches):
    _, p = plan(ranks)
    assert (p.data_parallel_size, p.num_microbatches(1), p.global_batch_size(1)) == (
        ranks,
        micro_batches,
        8,
    )
    assert [p.consumed_samples(n) for n in (0, 1, 10)] == [0, 8, 80]


def test_padding_is_a_multiple_of_divisor_and_ranks():
    assert padded_vocab_size(50257, 128, 1) == 50304 and padded_vocab_size(50257, 128, 8) == 51200
    assert padded_vocab_size(512, 128, 1) == 512


def test_bytes():
    config, p = plan()
    n = p.num_parameters
    assert bytes_per_rank(config, p) == {
        "weights": 2 * n,
        "gradients": 2 * n,
        "main weights": 4 * n,
        "optimizer moments": 8 * n,
        "FP8 scales": 0,
    }
    fp32 = replace(config, precision=replace(config.precision, fp16=False))
    assert bytes_per_rank(fp32, p) == {
        "weights": 4 * n,
        "gradients": 4 * n,
        "main weights": 0,
        "optimizer moments": 8 * n,
        "FP8 scales": 0,
    }


def test_tensor_parallel_ranks_share_what_is_split():
    """By hand: norms, output biases and positions are whole on each rank, all else is cut; padding
    grows with the ranks."""
    config, p = plan(4, tensor_model_parallel_size=4)
    h = 1024
    layers = 24
    padded = 50688
    assert (p.data_parallel_size, p.padded_vocab_size, p.num_padding) == (
        1,
        padded,
        (padded - 50257) * h,
    )
    whole = 1024 * h + layers * (4 * h + 2 * h) + 2 * h
    split = padded * h + layers * (3 * h * h + 3 * h + h * h + 8 * h * h + 4 * h)
    assert (
        p.num_parameters == whole + split and parameters_per_rank(config, p) == whole + split // 4
    )
    assert bytes_per_rank(config, p)["optimizer moments"] == 8 * (whole + split // 4)


def test_a_stage_has_the_layers_of_its_chunks_and_the_ends_of_the_model():
    config, p = plan(
        4, num_layers=30, pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=2
    )
    assert p.layers_per_stage[1] == (range(3, 6), range(18, 22)) and p.data_parallel_size == 1
    names = [{spec.name for spec in p.parameters_of(stage)} for stage in range(4)]
    assert {name.split(".")[2] for name in names[1]} == set("3 4 5 18 19 20 21".split())
    tied = "embedding.word_embeddings.weight"
    ends = {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    assert names[0] & names[3] == {tied} and ends < names[3]
    assert (
        sum(parameters_per_rank(config, p, stage) for stage in range(4))
        == p.num_parameters + 50304 * 1024
    )
    _, p = plan(
        4,
        num_layers=30,
        pipeline_model_parallel_size=4,
        decoder_first_pipeline_num_layers=6,
        decoder_last_pipeline_num_layers=6,
    )
    assert [len(chunk) for [chunk] in p.layers_per_stage] == [6, 9, 9, 6]
