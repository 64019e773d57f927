"""Flags of the training loop: batch size, length of the run, evaluation, exits, recomputation,
skipping."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatron import host
from megatron.arguments import Needs, arg

_VALIDATION = Needs("validation (--eval-iters is 0)", lambda v: v["eval_iters"])
_RECOMPUTATION = Needs(
    "--recompute-granularity full",
    lambda v: v["recompute_granularity"] or v["recompute_activations"],
)
_SELECTIVE = Needs(
    "--recompute-granularity selective",
    lambda v: (
        v["recompute_granularity"] == "selective"
        or v["recompute_activations"]
        or v["moe_layer_recompute"]
    ),
)


def _gib(word: str) -> float:
    """GiB of 80, 80GB, 80 GiB or 81920MiB. Raises ValueError."""
    match = re.fullmatch(r"(.*?)\s*(?:([gm])i?b?)?", word, re.IGNORECASE | re.DOTALL)
    assert match, "any text does"
    try:
        number = float(match[1])
    except ValueError:
        raise ValueError("not a size; write 80, 80GB or 80GiB [value-malformed]") from None
    return number / 1024 if match[2] in ("m", "M") else number


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch, length of training, evaluation, device."""

    micro_batch_size: int = arg(
        None, missing="give the samples of one forward pass on one rank", minimum=1
    )
    """samples per micro-batch: one forward pass on one rank"""

    global_batch_size: int | None = arg(None, minimum=1)
    """samples per iteration, over all ranks and micro-batches (default: micro-batch size x
    data-parallel size)"""

    rampup_batch_size: tuple[int, ...] | None = arg(None, nargs=3)
    """START INCREMENT SAMPLES: increase the global batch size from START to --global-batch-size in
    steps of INCREMENT over SAMPLES samples"""

    rampup_micro_batches: tuple[int, ...] | None = arg(None, nargs=3)
    """START INCREMENT ITERATIONS: micro-batches per iteration on each data-parallel rank, increased
    by INCREMENT every ITERATIONS iterations up to --global-batch-size"""

    step_batch_size_schedule: str | None = arg(None, nargs="words")
    """"0:768 250B:1536": global batch sizes, each with the number of tokens from which it
    applies"""

    decrease_batch_size_if_needed: bool = arg(False)
    """round a global batch size down that is not divisible by micro-batch size x data-parallel
    size, instead of failing"""

    train_iters: int | None = arg(None, minimum=1)
    """iterations to train, over all resumes"""

    train_samples: int | None = arg(None, minimum=1)
    """samples to train, over all resumes; instead of --train-iters"""

    seed: int = arg(1234, minimum=1, maximum=2**32 - 1)
    """random seed of initial values, data order and dropout"""

    eval_iters: int = arg(100, minimum=0)
    """global batches per validation, and of the test at the end"""

    eval_interval: int = arg(1000, needs=_VALIDATION, minimum=1)
    """iterations between validations"""

    eval_global_batch_size: int | None = arg(None, needs=_VALIDATION, minimum=1)
    """samples per batch of validation and test, over all ranks (default: the global batch size of
    training)"""

    eval_micro_batch_size: int | None = arg(None, needs=_VALIDATION, minimum=1)
    """samples per micro-batch of validation and test (default: --micro-batch-size)"""

    start_eval_at_iter: int | None = arg(None, needs=_VALIDATION, minimum=0)
    """no validation before this iteration, except the one after training (default: the first is
    after --eval-interval iterations)"""

    skip_train: bool = arg(False)
    """only evaluate; no training"""

    exit_interval: int | None = arg(None, minimum=1, per_run=True)
    """exit when the iteration is a multiple of this"""

    exit_duration_in_mins: float | None = arg(None, above=0, per_run=True)
    """exit after this many minutes"""

    exit_signal_handler: bool = arg(False)
    """on SIGTERM or SIGUSR1 save a checkpoint and exit; a second signal exits immediately"""

    check_for_nan_in_loss_and_grad: bool = arg(True, off="--no-check-for-nan-in-loss-and-grad")
    """continue when a loss or gradient is NaN or infinite"""

    recompute_activations: bool = arg(False)
    """the same as --recompute-granularity selective"""

    recompute_granularity: Literal["full", "selective"] | None = arg(None)
    """activation recomputation in the backward pass: full (whole layers) or selective
    (--recompute-modules)"""

    recompute_modules: tuple[str, ...] = arg(
        ("core_attn",),
        needs=_SELECTIVE,
        choices=(
            *("core_attn", "mlp", "moe", "moe_act", "shared_experts"),
            *("layernorm", "mla_up_proj"),
        ),
    )
    """with --recompute-granularity selective, what is recomputed in the backward pass: core_attn
    (core attention), mlp (MLPs of dense layers), moe (MLPs of MoE layers), moe_act (activation
    function of experts), shared_experts, mla_up_proj (queries, keys and values of MLA, from their
    latents); layernorm is accepted and keeps its activations"""

    moe_layer_recompute: bool = arg(False, needs="num_experts")
    """recompute the MLPs of MoE layers in the backward pass: the same as moe in
    --recompute-modules, with --recompute-granularity selective"""

    recompute_method: Literal["uniform", "block"] | None = arg(None, needs=_RECOMPUTATION)
    """with --recompute-granularity full: uniform (all layers, in units of --recompute-num-layers)
    or block (only the first --recompute-num-layers layers of each stage)"""

    recompute_num_layers: int | None = arg(None, needs=_RECOMPUTATION, minimum=1)
    """with --recompute-granularity full: layers per recomputed unit (uniform), or number of
    recomputed layers (block)"""

    recompute_fraction: float | None = arg(None, minimum=0, maximum=1)
    """fraction of each stage's layers to recompute, the first ones"""

    deterministic_mode: bool = arg(False)
    """use only deterministic kernels; an operation without one is an error"""

    cudnn_benchmark: bool = arg(False, excludes=("deterministic_mode", "cudnn_deterministic"))
    """let cuDNN select kernels by timing them"""

    cudnn_deterministic: bool = arg(False)
    """use only deterministic cuDNN kernels"""

    torch_compile: bool = arg(False)
    """compile every transformer layer with torch.compile"""

    manual_gc: bool = arg(False)
    """disable Python's automatic garbage collection; collect every --manual-gc-interval
    iterations"""

    manual_gc_interval: int = arg(0, minimum=0, needs="manual_gc")
    """with --manual-gc: iterations between garbage collections; 0: never"""

    manual_gc_eval: bool = arg(True, needs="manual_gc", off="--no-manual-gc-eval")
    """with --manual-gc: no garbage collection before and after evaluation"""

    train_range_to_skip: tuple[str, ...] | None = arg(None, extend=True)
    """a b [c d ...]: skip iterations a to b, both included"""

    iterations_to_skip: tuple[str, ...] | None = arg(None, extend=True)
    """iterations to skip, by their number in the log, counted from 1"""

    device: Literal["auto", "cpu", "cuda", "xpu"] = arg("auto")
    """device to train on; auto: CUDA, else XPU (Intel GPU, untested), else the CPU"""

    dry_run: bool = arg(False, per_run=True)
    """print the plan, the data and the kernels, and exit; needs no data, checkpoint or launcher:
    what is not on this machine is said, with exit code 0, and files that are here are compared with
    the flags, with exit code 2"""

    device_memory: float | None = arg(
        None, above=0, parse=_gib, nargs="words", metavar="X", requires="dry_run", per_run=True
    )
    """with --dry-run: memory of each device in GiB, as GPUs are named (80, 80GB or 80GiB for an
    H100): say whether the run fits, and flags that need less if it does not"""

    verbose: bool = arg(False, requires="dry_run", per_run=True)
    """with --dry-run: the kernels that are not used too, and why"""

    world_size: int | None = arg(None, minimum=1, per_run=True)
    """with --dry-run: number of ranks to plan for (default: the launcher's)"""

    @property
    def on_cpu(self) -> bool:
        """Is this planned for a CPU: one that was asked for, or what this machine trains on?"""
        elsewhere = self.world_size is not None or self.device_memory is not None
        return self.device == "cpu" or (
            self.device == "auto" and not elsewhere and not host.shows_accelerator()
        )

    @property
    def recompute(self) -> str | None:
        """`full`, `selective` or None, whichever way it was spelled."""
        if self.recompute_fraction is not None:
            return "full"
        selective = self.recompute_activations or self.moe_layer_recompute
        return "selective" if selective else self.recompute_granularity

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The parts of layers that selective recomputation recomputes."""
        if self.recompute != "selective":
            return ()
        return (*self.recompute_modules, *(("moe",) if self.moe_layer_recompute else ()))

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
