"""Which samples an iteration trains on: the same for every layout, reader and length of the run
(one epoch)."""

from types import SimpleNamespace

import pytest

from megatron.arguments import config_from
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config
from megatron.data.samples import Samples
from megatron.data.tokenizers.build import build_tokenizer
from megatron.parallel.context import Axis
from megatron.training.batch import load_samples, training_samples
from megatron.training.build_data import build_data
from tests.runs import write_text

ITERATIONS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Enough for 500 iterations of 16 samples of 16 tokens in one epoch."""
    return write_text(tmp_path_factory.mktemp("order") / "text", 4800)


def trained_on(
    corpus: str, ranks: int = 1, micro_batch: int = 2, workers: int = 0, train_iters: int = 50
) -> list:
    """The tokens of each iteration's global batch in order, put together from what every rank
    reads."""
    config = config_from(
        Config,
        dict(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            seq_length=16,
            max_position_embeddings=16,
            lr=0.1,
            micro_batch_size=micro_batch,
            global_batch_size=16,
            train_iters=train_iters,
            data_path=(corpus,),
            split="95,5,0",
            eval_iters=0,
            tokenizer_type="NullTokenizer",
            vocab_size=211,
        ),
    )
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=211)
    plan = make_plan(config, ranks, 211)
    read = []
    for rank in range(ranks):
        axis = Axis("dp", ranks, rank, tuple(range(ranks)))
        ctx = SimpleNamespace(dp=axis, world=Axis("world"))
        data = build_data(config, plan, SimpleNamespace(ctx=ctx, rank=0), tokenizer)
        numbers = training_samples(data.train_sampler, plan.batch, plan.skips, 1, ITERATIONS)
        read.append(
            [one.rows.tolist() for one in load_samples(Samples(data.train, 211), numbers, workers)]
        )
    order = [row for parts in zip(*read, strict=True) for part in parts for row in part]
    return [order[i : i + 16] for i in range(0, len(order), 16)]


@pytest.fixture(scope="module")
def reference(corpus):
    found = trained_on(corpus)
    assert (
        len(found) == ITERATIONS
        and len({str(row) for batch in found for row in batch}) == 16 * ITERATIONS
    )
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_layout_and_workers(corpus, reference, ranks, micro_batch, workers):
    assert trained_on(corpus, ranks, micro_batch, workers) == reference


def test_length_of_the_run(corpus, reference):
    assert trained_on(corpus, train_iters=500) == reference
    assert trained_on(corpus, ranks=4, micro_batch=1, workers=2, train_iters=500) == reference
