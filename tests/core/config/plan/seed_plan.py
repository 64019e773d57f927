"""The flags of the seed's run and its plan, with changes."""

from megatron.arguments import config_from
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config

SEED = dict(
    num_layers=24,
    hidden_size=1024,
    num_attention_heads=16,
    micro_batch_size=4,
    global_batch_size=8,
    seq_length=1024,
    max_position_embeddings=1024,
    train_iters=1000,
    eval_interval=1,
    eval_iters=10,
    fp16=True,
    lr=1.5e-4,
    split="949,50,1",
)


def plan(world_size: int = 1, vocab_size: int = 50257, **changes):
    """Config and plan for this many ranks."""
    config = config_from(Config, SEED | changes)
    return config, make_plan(config, world_size, vocab_size)
