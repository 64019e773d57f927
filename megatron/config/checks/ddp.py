"""Rules of gradient buckets, their overlap and the sharded optimizer, as in Megatron."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.parallel import ParallelConfig


def problems(p: ParallelConfig, world_size: int) -> Iterator[str]:
    """One line for each rule that these flags break on `world_size` ranks."""
    instances = p.num_distributed_optimizer_instances
    if instances <= 1:
        return
    flag = f"--num-distributed-optimizer-instances {instances}"
    ranks = data_ranks(p, world_size)
    if ranks and ranks % instances:
        fit = ", ".join([str(n) for n in range(1, ranks + 1) if ranks % n == 0][:12])
        yield (
            f"{flag}: data x context parallel size {ranks} is not a multiple of it; use {fit} "
            "[optimizer-instances-do-not-divide-ranks]"
        )


def notes(p: ParallelConfig, world_size: int) -> Iterator[str]:
    """One line for each of these flags that changes nothing on `world_size` ranks."""
    is_set = {
        "--use-distributed-optimizer": p.use_distributed_optimizer,
        f"--data-parallel-sharding-strategy {p.data_parallel_sharding_strategy}": (
            p.data_parallel_sharding_strategy != "no_shard"
        ),
        "--overlap-grad-reduce": p.overlap_grad_reduce,
        "--overlap-param-gather": p.overlap_param_gather,
        f"--zero-partition {p.zero_partition}": p.zero_partition != "even",
    }
    buckets = {
        f"--ddp-bucket-size {p.ddp_bucket_size}": p.ddp_bucket_size is not None,
        f"--ddp-num-buckets {p.ddp_num_buckets}": p.ddp_num_buckets is not None,
    }
    if p.shares_gradients:
        yield from (
            f"{flag}: no effect where gradients are shared, each layer in a bucket of its own "
            "[flag-has-no-effect]"
            for flag, on in buckets.items()
            if on
        )
    if max(data_ranks(p, world_size), p.expert_replicas(world_size)) <= 1:
        yield from (
            f"{flag}: no effect with one data-parallel rank [flag-has-no-effect]"
            for flag, on in (is_set | buckets).items()
            if on
        )


def data_ranks(p: ParallelConfig, world_size: int) -> int:
    """Data x context parallel size: the ranks that hold the same weights and see other tokens; 0 if
    the world size does not fit."""
    model = p.tensor_model_parallel_size * p.pipeline_model_parallel_size
    return 0 if model < 1 or world_size % model else world_size // model
