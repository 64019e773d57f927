"""Batch, length of the run, evaluation, exits, recompute, skipping. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The training loop."""

    micro_batch_size: int | None = arg(None, help="samples of one forward pass on one rank")
    global_batch_size: int | None = arg(
        None, help="samples of one step (default: micro-batch size x data-parallel size)"
    )
    rampup_batch_size: tuple[int, ...] | None = arg(
        None, nargs=3, help="START INCREMENT SAMPLES: grow the global batch from START over SAMPLES"
    )
    rampup_micro_batches: tuple[int, ...] | None = arg(
        None,
        nargs=3,
        dump=False,
        help="START INCREMENT ITERATIONS: micro-batches of a step on each data-parallel rank, "
        "growing every so many iterations up to --global-batch-size (InternLM)",
    )
    step_batch_size_schedule: str | None = arg(
        None,
        nargs="words",
        help='"0:768 250B:1536": global batch from so many tokens on',
        dump=False,
    )
    decrease_batch_size_if_needed: bool = arg(
        False, help="round a batch that does not fit down instead of failing", dump=False
    )
    train_iters: int | None = arg(None, help="steps over all runs")
    train_samples: int | None = arg(None, help="samples over all runs")
    seed: int = arg(1234, help="the one seed: weights, data order, dropout")
    eval_iters: int = arg(100, help="global batches of one validation, and of the test")
    eval_interval: int = arg(1000, help="iterations between validations")
    skip_train: bool = arg(False, help="evaluate only")
    exit_interval: int | None = arg(None, help="leave when the iteration is a multiple of this")
    exit_duration_in_mins: float | None = arg(None, help="leave after so many minutes")
    exit_signal_handler: bool = arg(
        False, help="save and leave on SIGTERM or SIGUSR1; a second signal leaves at once"
    )
    check_for_nan_in_loss_and_grad: bool = arg(
        True,
        off="--no-check-for-nan-in-loss-and-grad",
        help="go on when a loss or gradient is not finite",
    )
    recompute_activations: bool = arg(False, help="the same as --recompute-granularity selective")
    recompute_granularity: Literal["full", "selective"] | None = arg(
        None, help="recompute whole layers or core attention in the backward pass"
    )
    recompute_method: Literal["uniform", "block"] | None = arg(
        None, help="with full: chunks of so many layers, or the first so many layers"
    )
    recompute_num_layers: int | None = arg(None, help="layers of one recompute unit")
    recompute_fraction: float | None = arg(
        None,
        dump=False,
        help="recompute the first so much of each stage's layers (InternLM's model.checkpoint)",
    )
    deterministic_mode: bool = arg(
        False, help="deterministic kernels only, or an error", dump=False
    )
    cudnn_benchmark: bool = arg(False, help="let cudnn choose kernels by timing them", dump=False)
    cudnn_deterministic: bool = arg(False, help="deterministic cudnn kernels", dump=False)
    torch_compile: bool = arg(
        False, help="compile every transformer layer with torch.compile", dump=False
    )
    check_weight_hash_across_dp_replicas_interval: int | None = arg(
        None,
        dump=False,
        help="iterations between comparisons of the weights of data-parallel ranks by hash; the "
        "run ends if they differ (default: never)",
    )
    manual_gc: bool = arg(False, help="collect garbage only every --manual-gc-interval steps")
    manual_gc_interval: int = arg(0, help="steps between manual collections; 0: never")
    manual_gc_eval: bool = arg(
        True,
        off="--no-manual-gc-eval",
        alias=("--disable-manual-gc-eval",),
        help="no manual collection around evaluation",
    )
    train_range_to_skip: tuple[str, ...] | None = arg(
        None,
        extend=True,
        dump=False,
        help="a b [c d ...]: iterations a to b (both included) are not trained",
    )
    iterations_to_skip: tuple[str, ...] | None = arg(
        None,
        extend=True,
        dump=False,
        help="iterations that are not trained, by their number in the log, from 1",
    )
    forget_skip: tuple[str, ...] | None = arg(
        None,
        extend=True,
        dump=False,
        help="ids of recorded ranges, which the start lists, that are to be trained after all",
    )
    device: Literal["auto", "cpu", "cuda", "xpu"] = arg(
        "auto",
        help="device to train on; auto: CUDA, else XPU (Intel GPU, untested), else the CPU",
        dump=False,
    )
    dry_run: bool = arg(
        False,
        help="print the plan, the data and the kernels, and exit; needs no data, checkpoint or "
        "launcher",
        dump=False,
    )
    world_size: int | None = arg(
        None, help="ranks to plan for, with --dry-run (otherwise the launcher's)", dump=False
    )

    @property
    def recompute(self) -> str | None:
        """`full`, `selective` or None, whichever way it was spelled."""
        if self.recompute_fraction is not None:
            return "full"
        return "selective" if self.recompute_activations else self.recompute_granularity

    def recomputed_runs(self, layers: int) -> list[int]:
        """The lengths of the runs of layers that keep only their input, of a stage's chunk of so
        many; the first ones."""
        if self.recompute != "full":
            return []
        if self.recompute_fraction is not None:
            return [1] * int(layers * self.recompute_fraction)
        step = self.recompute_num_layers or 1
        if self.recompute_method == "block":
            return [1] * min(step, layers)
        return [min(step, layers - start) for start in range(0, layers, step)]
