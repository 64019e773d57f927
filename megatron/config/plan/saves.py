"""What the checkpoints of a run take: bytes on the disk of --save, and of host memory while one is
written."""

from collections.abc import Iterator
from math import lcm

from megatron.config.plan.fit import gib, state_of_a_rank
from megatron.config.plan.plan import BYTES, Plan, by_muon
from megatron.config.plan.state_bytes import moment_bytes
from megatron.config.tree import Config


def checkpoint_bytes(config: Config, plan: Plan) -> int:
    """Bytes of the tensors of a checkpoint: each once, whatever the layout."""
    precision = config.precision
    weights = plan.num_parameters * BYTES[precision.params_dtype]
    if config.checkpoint.no_save_optim:
        return weights
    main = BYTES[precision.main_dtype]
    trained = sum(spec.size for spec in plan.trained)
    matrices = sum(spec.size for spec in plan.trained if by_muon(config, spec))
    averages = sum(demands.averages for demands in config.demands)
    copies = main * ((precision.fp16 or precision.bf16) + averages) + moment_bytes(config)
    return weights + trained * copies - (2 - config.muon.states) * matrices * main


def checkpoints_kept(config: Config, plan: Plan) -> int:
    """How many are on the disk at most: while one is written, too."""
    c = config.checkpoint
    each = c.save_interval or plan.train_iters or 1
    saved = -(-plan.train_iters // each)
    if c.keep_last is None:
        return saved
    always = plan.train_iters // lcm(each, c.keep_every) if c.keep_every else 0
    return min(saved, c.keep_last + always + 1)


def save_lines(config: Config, plan: Plan) -> Iterator[str]:
    """What a dry run says of them."""
    if not config.checkpoint.save:
        return
    size, kept = checkpoint_bytes(config, plan), checkpoints_kept(config, plan)
    yield (
        f"checkpoints: {size:,} bytes ({gib(size)}) each, at most {kept:,} on the disk of --save: "
        f"{gib(size * kept)}"
    )
    if config.checkpoint.async_save:
        held = state_of_a_rank(config, plan)
        yield f"  in host memory: for --async-save at most {held:,} bytes ({gib(held)}) per rank"
