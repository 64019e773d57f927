"""A run of one rank in fp64, built for single steps, and samples for it."""

from collections.abc import Iterator

import torch

from megatron.arguments import config_from
from megatron.config.plan.plan import make_plan
from megatron.data.tokenizers.build import build_tokenizer
from megatron.features.registry import RunConfig
from megatron.parallel.context import ParallelContext
from megatron.timers import Timers
from megatron.training.batch import MicroBatch
from megatron.training.build import build_run
from megatron.training.launch.initialize import Runtime
from megatron.training.run import Run

EOD = 52
BASE = dict(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=12,
    max_position_embeddings=12,
    micro_batch_size=2,
    global_batch_size=4,
    train_iters=10,
    lr=0.01,
    vocab_size=53,
    mock_data=True,
    make_vocab_size_divisible_by=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    fp64=True,
    clip_grad=1e9,
    tokenizer_type="NullTokenizer",
    device="cpu",
    weight_decay=0.0,
)


def make_run(rank: int = 0, world: int = 1, **changes) -> Run:
    """The run of these fields on a rank of `world` (which then is a group already)."""
    config = config_from(RunConfig, BASE | changes)
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=config.data.vocab_size)
    runtime = Runtime(
        torch.device("cpu"), ParallelContext(config.parallel, world, rank), world, rank
    )
    return build_run(
        config, make_plan(config, world, tokenizer.vocab_size), runtime, Timers(), tokenizer
    )


def samples(rows: int = 4, seed: int = 0) -> torch.Tensor:
    """[rows, s+1] with end-of-document tokens spread unevenly, so that micro-batches have different
    counts."""
    tokens = torch.randint(0, 50, (rows, 13), generator=torch.Generator().manual_seed(seed))
    tokens[0, [2, 5, 9]] = EOD
    tokens[1, 7] = EOD
    return tokens


def micro_batches(rows: torch.Tensor, size: int) -> Iterator[MicroBatch]:
    """Samples [rows, s+1], `size` at a time."""
    return iter([MicroBatch(some) for some in rows.split(size)])
