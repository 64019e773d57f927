"""Modules that only some runs need: the one file of megatron/ that imports its own by name.

A module is listed with the flags that need it, is loaded at the place that uses it, and is not
imported by a statement anywhere on the way from pretrain_gpt.py. Whether a run can use it is
checked before, with the other rules of the command line. tests/house/walls.py holds the table
against the calls, and each call against the layers.
"""

from __future__ import annotations

import importlib
from types import ModuleType

MODULES = {
    "megatron.args_file": "an @FILE, or the args file of a checkpoint",
    "megatron.command_help": "--help, a flag that does not exist",
    "megatron.config.megatron_compat.flags": "a flag of Megatron-LM without a field; argument dump",
    "megatron.config.megatron_compat.deepspeed": "--deepspeed_config",
    "megatron.config.checks.kernels": "a choice of kernels",
    "megatron.config.checks.layout": "several ranks, or flags about them",
    "megatron.config.checks.low_precision": "gradients or moments in 16 bits",
    "megatron.config.checks.moe": "--num-experts",
    "megatron.config.checks.fp8": "--fp8-format",
    "megatron.kernels.cuda.triton_kernels": "CUDA, where Triton is installed",
    "megatron.kernels.cuda.fp8_triton": "--fp8-format on CUDA, where Triton is installed",
    "megatron.kernels.fp8_selection": "--fp8-format",
    "megatron.kernels.transformer_engine": "--transformer-impl transformer_engine",
    "megatron.parallel.fp8": "--fp8-format",
    "megatron.config.checks.data_paths": "a flag that names files of data",
    "megatron.config.checks.packed": "--packed-samples",
    "megatron.config.plan.batch_ramps": "--rampup-batch-size, --rampup-micro-batches, "
    "--step-batch-size-schedule",
    "megatron.config.plan.experts": "--num-experts",
    "megatron.config.plan.pipeline_layout": "--pipeline-model-parallel-layout, "
    "--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split",
    "megatron.config.plan.zero_partition": "--zero-partition whole-params",
    "megatron.optimizer.precision_aware": "--use-precision-aware-optimizer; other moments",
    "megatron.optimizer.scaler": "--fp16 or --loss-scale",
    "megatron.training.logging.subset_metrics": "--log-subsets, --log-format internlm",
    "megatron.data.blend.blended_dataset": "data in files: not --mock-data",
    "megatron.data.dry_run": "data in files: not --mock-data",
    "megatron.data.megatron_order": "data in files: not --mock-data",
    "megatron.model.all_heads_norm": "--qk-layernorm-all-heads",
    "megatron.model.moe": "--num-experts",
    "megatron.model.xielu": "--xielu",
    "megatron.training.routers": "--num-experts",
    "megatron.config.skip_flags": "--train-range-to-skip, --iterations-to-skip",
    "megatron.config.megatron_compat.argument_dump": "--log-format, --print-arguments all",
    "megatron.config.checkpoint_args": "--use-checkpoint-args",
    "megatron.checkpoint.lock": "--save",
    "megatron.checkpoint.object_store": "--save, --load or --snapshot-dir is a URL",
    "megatron.data.cyclic_sampler": "--dataloader-type cyclic",
    "megatron.data.epoch.build": "--data-order epoch",
    "megatron.data.ledger": "--data-ledger",
    "megatron.data.packed.build": "--packed-samples",
    "megatron.data.tokenizers.bpe": "--tokenizer-type GPT2BPE, HuggingFace or TikTokenizer",
    "megatron.data.tokenizers.sentencepiece": "the SentencePiece types of --tokenizer-type",
    "megatron.training.launch.control_file": "--control-file",
    "megatron.training.launch.hang": "pretrain_gpt.py as a program",
    "megatron.training.launch.hang_watch": "pretrain_gpt.py as a program",
    "megatron.training.launch.own_watch": "pretrain_gpt.py as a program, of one rank",
    "megatron.training.launch.rendezvous": "more than one rank",
    "megatron.training.launch.start_watch": "more than one rank; torchrun",
    "megatron.training.dry_run": "--dry-run",
    "megatron.training.logging.megatron_format": "--timing-log-level, --log-format megatron",
    "megatron.training.logging.megatron_lines": "--log-format megatron, aurora, internlm",
    "megatron.training.logging.metrics_file": "--metrics-file",
    "megatron.training.logging.points": "--tensorboard-dir, --wandb-project",
    "megatron.training.logging.internlm_format": "--log-format internlm, counts of subsets",
    "megatron.training.logging.run_events": "--save",
    "megatron.training.logging.straggler": "--log-straggler",
    "megatron.training.logging.tensorboard": "--tensorboard-dir",
    "megatron.training.logging.wandb": "--wandb-project",
    "megatron.training.profiler": "--profile",
    "megatron.training.rollback": "--spike-action skip-update or rewind",
    "megatron.training.skipping.skip_plan": "flags that skip iterations, --load, or skips.jsonl",
    "megatron.training.spikes.actions": "--spike-action skip-update or rewind",
    "megatron.training.verify_step": "--verify-step-interval",
    "megatron.training.weight_check": "--check-weight-hash-across-dp-replicas-interval",
    "megatron.analysis.trace.dry_run": "--trace",
    "megatron.analysis.open_eval_tasks": "--eval-tasks",
    "megatron.analysis.goodput_points": "--save with --tensorboard-dir or --wandb-project",
    "megatron.parallel.cross_entropy": "--tensor-model-parallel-size above 1",
    "megatron.parallel.repeated_sums": "--verify-step-interval",
    "megatron.parallel.pipeline": "--pipeline-model-parallel-size above 1",
    "megatron.parallel.ring_attention": "--context-parallel-size above 1",
    "megatron.parallel.warm_up": "more than one rank on an accelerator",
    "megatron.parallel.shared_sums": "--tensor-model-parallel-size above 1",
    "megatron.checkpoint.async_writer": "--async-save",
    "megatron.checkpoint.local_copies": "--non-persistent-ckpt-type local, or a run that had it",
    "megatron.checkpoint.retention": "--keep-last, --snapshot-interval",
    "megatron.config.checks.local_copies": "--non-persistent-ckpt-type local, --replication",
    "megatron.training.checkpointing.local_copies": "--non-persistent-ckpt-type local",
    "megatron.training.checkpointing.snapshots": "--snapshot-interval",
}


def load(name: str) -> ModuleType:
    """The module of MODULES with that name, imported at its first use."""
    if name not in MODULES:
        raise KeyError(f"{name} is not in megatron.optional.MODULES")
    return importlib.import_module(name)
