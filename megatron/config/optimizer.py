"""Flags of the optimizer, the learning rate and weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import Needs, arg

_WARM_UP = Needs(
    "a warm-up",
    lambda v: v["lr_warmup_iters"] or v["lr_warmup_samples"] or v["lr_warmup_fraction"],
)
_DECAY = Needs(
    "a decay (--lr-decay-style is constant)", lambda v: v["lr_decay_style"] != "constant"
)
_ADAM = Needs("--optimizer adam or muon", lambda v: v["optimizer"] != "sgd")
# the styles that end in an anneal of --lr-wsd-decay-iters
ANNEALED = ("WSD", "WSD-S", "power")
_ANNEAL = Needs("--lr-decay-style WSD, WSD-S or power", lambda v: v["lr_decay_style"] in ANNEALED)
# the warm-up ends before the decay does, of a constant rate too
_HORIZON = Needs(_DECAY.condition, lambda v: _DECAY.met(v) or _WARM_UP.met(v) or v["lr_init_iters"])


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning rate, weight decay."""

    optimizer: Literal["adam", "sgd", "muon"] = arg(
        "adam", parse=lambda word: "muon" if word == "dist_muon" else word
    )
    """adam (AdamW), sgd, or muon (Muon for the matrices of the layers, AdamW for the rest;
    dist_muon is the same)"""

    train_only: tuple[str, ...] = arg((), metavar="GLOB")
    """train the parameters whose names match, as in decoder.layers.*.mlp.*; all others are frozen:
    no gradient, no optimizer state, the same bits afterwards (default: train all)"""

    lr: float = arg(None, missing="give the peak learning rate, as in --lr 3e-4", minimum=0)
    """peak learning rate"""

    min_lr: float = arg(0.0, needs=_DECAY, minimum=0)
    """minimum learning rate, reached at the end of the decay"""

    decoupled_lr: float | None = arg(None, minimum=0)
    """peak learning rate of the word embedding and the output layer (default: --lr)"""

    decoupled_min_lr: float | None = arg(None, requires="decoupled_lr", needs=_DECAY, minimum=0)
    """minimum of --decoupled-lr (default: --min-lr)"""

    lr_decay_style: Literal[
        "constant", "linear", "cosine", "inverse-square-root", "WSD", "WSD-S", "power"
    ] = arg("linear")
    """shape of the learning-rate decay"""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt", "inverse"] = arg(
        "exponential", needs=_ANNEAL
    )
    """shape of the final decay of --lr-decay-style WSD or power, of each of WSD-S; inverse: 1 /
    rate is linear"""

    lr_wsd_decay_iters: int | None = arg(None, needs=_ANNEAL, minimum=1)
    """iterations of the final decay of --lr-decay-style WSD or power, of each of WSD-S"""

    lr_wsd_decay_samples: int | None = arg(None, needs=_ANNEAL, minimum=1)
    """samples of the final decay of --lr-decay-style WSD or power, of each of WSD-S"""

    lr_wsd_decay_end_iters: tuple[int, ...] | None = arg(
        None, needs=("lr_decay_style", "WSD-S"), minimum=1
    )
    """iterations at which the earlier decays of --lr-decay-style WSD-S end and --lr applies again;
    the last decay ends at --lr-decay-iters"""

    lr_wsd_decay_end_samples: tuple[int, ...] | None = arg(
        None, needs=("lr_decay_style", "WSD-S"), minimum=1
    )
    """samples at which the earlier decays of --lr-decay-style WSD-S end and --lr applies again; the
    last decay ends at --lr-decay-samples"""

    lr_power_amplitude: float = arg(4.0, needs=("lr_decay_style", "power"), above=0)
    """A of --lr-decay-style power: A x global batch size x tokens^E, at most --lr"""

    lr_power_exponent: float = arg(-0.51, needs=("lr_decay_style", "power"), below=0)
    """E of --lr-decay-style power"""

    lr_decay_iters: int | None = arg(None, needs=_HORIZON, minimum=1)
    """iterations until the learning rate reaches --min-lr (default: --train-iters)"""

    lr_decay_samples: int | None = arg(None, needs=_HORIZON, minimum=1)
    """samples until the learning rate reaches --min-lr (default: --train-samples)"""

    lr_warmup_fraction: float | None = arg(None, minimum=0, below=1)
    """learning-rate warm-up as a fraction of --lr-decay-iters or --lr-decay-samples"""

    lr_warmup_iters: int = arg(0, minimum=0)
    """iterations of linear learning-rate warm-up"""

    lr_warmup_samples: int = arg(0, minimum=0)
    """samples of linear learning-rate warm-up"""

    lr_warmup_init: float = arg(0.0, needs=_WARM_UP, minimum=0)
    """learning rate at the start of the warm-up"""

    lr_init_iters: int = arg(0, minimum=0)
    """iterations with learning rate 0 before the warm-up, in which Adam's state adapts"""

    lr_warmup_first_step: bool = arg(False, needs=_WARM_UP)
    """first warm-up iteration has learning rate lr / W for a warm-up of W iterations instead of
    0"""

    weight_decay: float = arg(
        0.01,
        needs=Needs(
            "--weight-decay-incr-style constant (--start-weight-decay and --end-weight-decay set "
            "it)",
            lambda v: v["weight_decay_incr_style"] == "constant",
        ),
        minimum=0,
    )
    """decoupled weight decay; not applied to biases and 1-D parameters"""

    start_weight_decay: float | None = arg(None, minimum=0)
    """initial weight decay, with --weight-decay-incr-style linear or cosine"""

    end_weight_decay: float | None = arg(None, minimum=0)
    """final weight decay, with --weight-decay-incr-style linear or cosine"""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = arg("constant")
    """shape of the increase from --start-weight-decay to --end-weight-decay"""

    apply_wd_to_all: bool = arg(False)
    """apply weight decay to norms and biases, too"""

    apply_wd_to_qk_layernorm: bool = arg(False, needs="qk_layernorm")
    """apply weight decay to the norms of queries and keys, too"""

    adam_beta1: float = arg(0.9, needs=_ADAM, minimum=0, below=1)
    """Adam's beta1, decay of the first moment"""

    adam_beta2: float = arg(0.999, needs=_ADAM, minimum=0, below=1)
    """Adam's beta2, decay of the second moment"""

    adam_beta2_schedule_c: float = arg(0.0, needs=_ADAM, minimum=0)
    """with c > 0, Adam's beta2 is 1 - k^-c after k updates, at least --adam-beta2 (PaLM: 0.8)"""

    adam_eps: float = arg(1e-8, needs=_ADAM, above=0)
    """Adam's epsilon"""

    use_precision_aware_optimizer: bool = arg(
        False, requires=("optimizer", "adam"), excludes=("fp64",)
    )
    """Adam whose gradients and moments have the dtypes of --main-grads-dtype, --exp-avg-dtype and
    --exp-avg-sq-dtype; computed in fp32"""

    exp_avg_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = arg(
        "fp32", requires="use_precision_aware_optimizer"
    )
    """dtype in which --use-precision-aware-optimizer stores Adam's first moment (fp8 is stored in
    bf16)"""

    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = arg(
        "fp32", requires="use_precision_aware_optimizer"
    )
    """dtype in which --use-precision-aware-optimizer stores Adam's second moment (fp8 is stored in
    bf16)"""

    sgd_momentum: float = arg(0.9, needs=("optimizer", "sgd"), minimum=0, below=1)
    """momentum of --optimizer sgd"""

    clip_grad: float = arg(1.0, minimum=0)
    """clip gradients to this global L2 norm; 0 disables clipping"""

    override_opt_param_scheduler: bool = arg(
        False,
        per_run=True,
        needs="load",
        flag="--override-opt_param-scheduler",
        alias=("--override-opt-param-scheduler",),
    )
    """on resume, use the command line's scheduler values instead of the checkpoint's"""

    use_checkpoint_opt_param_scheduler: bool = arg(
        False,
        excludes=("override_opt_param_scheduler",),
        per_run=True,
        needs="load",
        flag="--use-checkpoint-opt_param-scheduler",
        alias=("--use-checkpoint-opt-param-scheduler",),
    )
    """on resume, use the checkpoint's scheduler values instead of the command line's"""

    @property
    def moment_dtypes(self) -> dict[str, str]:
        """{exp_avg or exp_avg_sq: torch dtype} of the moments that are stored in less than the
        dtype of the main weights."""
        narrow = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
        typed = {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        return {key: narrow[dtype] for key, dtype in typed.items() if dtype in narrow}

    @property
    def weight_decay_range(self) -> tuple[float, float]:
        """Weight decay at the start and at the end of the run; equal where it is constant."""
        if self.weight_decay_incr_style == "constant":
            return self.weight_decay, self.weight_decay
        assert self.start_weight_decay is not None and self.end_weight_decay is not None, self
        return self.start_weight_decay, self.end_weight_decay
