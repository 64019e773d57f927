"""megatron-core's own training on CPUs, for the converter's tests: its pipeline schedule, DDP and
distributed optimizer over gloo, and its save as torch_dist; imports it inside functions only."""

from __future__ import annotations

import multiprocessing.dummy
import types

import pytest
import torch
import torch.distributed as dist

from megatron.addons.convert.tests.megatron_files import SIZE, VOCAB, arguments, built
from megatron.data.build import Builder
from megatron.data.request import DataRequest
from tests.peers.megatron_core_models import let_it_run_on_a_cpu

MICRO = 2
MICRO_BATCHES = 2
BATCH = MICRO * MICRO_BATCHES
SAVED_AT = 3  # iterations
STEPS = 10  # after that
LENGTH = SIZE["seq_length"]
SCHEDULE = dict(lr_warmup_steps=2 * BATCH, lr_decay_steps=(SAVED_AT + STEPS) * BATCH)
RATES = dict(lr=3e-3, min_lr=3e-4)
DECAY = 0.1
# the same for a run of this suite
FLAGS = (
    f"--mock-data --micro-batch-size {MICRO} --global-batch-size {BATCH} --lr {RATES['lr']} "
    f"--min-lr {RATES['min_lr']} --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters "
    f"{SAVED_AT + STEPS} --train-iters {SAVED_AT + STEPS} --weight-decay {DECAY} --clip-grad 1.0 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --eval-iters 0 --log-interval 1 --num-workers 0 "
    "--device cpu --hidden-dropout 0 --attention-dropout 0"
).split()


def samples() -> list[torch.Tensor]:
    """The rows of a run of this suite with FLAGS, [LENGTH + 1] each."""
    total = (SAVED_AT + STEPS) * BATCH
    request = DataRequest(
        sizes=(total, 0, 0),
        sequence_length=LENGTH,
        seed=1234,
        vocab_size=VOCAB,
        eod=VOCAB - 1,
        identity={},
        before=None,
        micro_batch_size=MICRO,
        global_batch_size=BATCH,
    )
    data = Builder(types.SimpleNamespace(), request).mock((total, 0, 0), VOCAB, VOCAB - 1)[0]
    return [torch.from_numpy(data[number]).long() for number in range(total)]


def _without_cuda(patch) -> None:
    """Where it asks for CUDA's tensors or its stream, give it those of the CPU."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    let_it_run_on_a_cpu(patch)
    patch.setattr(torch.Tensor, "cuda", lambda self, *args, **more: self)
    patch.setattr(torch.cuda, "synchronize", lambda *args: None)
    patch.setattr(torch.cuda, "empty_cache", lambda *args: None)
    plain_type = torch.Tensor.type

    def cuda_type(self, *args, **more):
        found = plain_type(self, *args, **more)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    patch.setattr(torch.Tensor, "type", cuda_type)
    for name in ("tensor", "zeros", "empty", "ones"):
        plain = getattr(torch, name)

        def made(*args, plain=plain, **more):
            return plain(*args, **(more | {"device": "cpu"} if "device" in more else more))

        patch.setattr(torch, name, made)
    # gloo has no reduce-scatter; data-parallel groups here are single ranks
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        patch.setattr(dist, name, _alone)
        patch.setattr(torch.distributed.distributed_c10d, name, _alone)
    patch.setattr(filesystem_async, "_process_memory", lambda: 0)
    threads = types.SimpleNamespace(get_context=lambda kind: multiprocessing.dummy)
    patch.setattr(filesystem_async, "mp", threads)


def _alone(output, source, *args, group=None, **more):
    assert dist.get_world_size(group) == 1
    output.copy_(source)


def train_and_save_on_a_rank(rank, world, flags, tp, pp, folder, metadata):
    """Train to SAVED_AT, save there, train STEPS more: the losses of these (on the last stage, else
    zeros), and this rank's weights at the end by our names."""
    patch = pytest.MonkeyPatch()
    _without_cuda(patch)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import (
        OptimizerConfig,
        get_megatron_optimizer,
        get_standard_config_overrides,
    )
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if world == 1:  # a rank alone is in no group yet
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = built(flags, tp, pp).train()
    model.config.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=40000),
        model,
    )
    config = OptimizerConfig(
        optimizer="adam",
        weight_decay=DECAY,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        **RATES,
    )
    optimizer = get_megatron_optimizer(config, [model], get_standard_config_overrides(config))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=RATES["lr"],
        min_lr=RATES["min_lr"],
        lr_decay_style="cosine",
        start_wd=DECAY,
        end_wd=DECAY,
        wd_incr_steps=(SAVED_AT + STEPS) * BATCH,
        wd_incr_style="constant",
        **SCHEDULE,
    )
    step = get_forward_backward_func()
    rows = torch.stack(samples()).view(-1, MICRO, LENGTH + 1)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    positions = torch.arange(LENGTH).expand(MICRO, LENGTH)
    losses = []

    def forward(batches, model):
        tokens = next(batches)
        output = model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:])
        return output, lambda loss: (loss.mean(), {"loss": loss.detach().mean()})

    for iteration in range(SAVED_AT + STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        first = iteration * MICRO_BATCHES
        found = step(
            forward_step_func=forward,
            data_iterator=iter(rows[first : first + MICRO_BATCHES]),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            forward_only=False,
        )
        optimizer.step()
        scheduler.step(BATCH)
        losses.append(sum(float(one["loss"]) for one in found) / MICRO_BATCHES)
        if iteration + 1 == SAVED_AT:
            _save(folder, rank, flags, tp, pp, metadata, model, optimizer, scheduler)
    parallel_state.destroy_model_parallel()
    return losses[SAVED_AT:]


def _save(folder, rank, flags, tp, pp, metadata, model, optimizer, scheduler):
    """As Megatron-LM does."""
    from megatron.core import dist_checkpointing

    args = arguments(flags, tp, pp)
    vars(args).update(consumed_train_samples=SAVED_AT * BATCH, consumed_valid_samples=0)
    weights = model.module.sharded_state_dict(metadata=metadata)
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": SAVED_AT,
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata),
        "opt_param_scheduler": scheduler.state_dict(),
        "num_floating_point_operations_so_far": 0,
    }
    target = folder / f"iter_{SAVED_AT:07d}"
    if rank == 0:
        target.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    dist.barrier()
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
