"""The optimizer, learning rate and weight decay over the run. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.arguments import arg


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning rate, weight decay."""

    optimizer: Literal["adam", "sgd"] = arg("adam", help="adam (AdamW) or sgd")
    lr: float | None = arg(None, help="peak learning rate")
    min_lr: float = arg(0.0, help="floor of the decay")
    decoupled_lr: float | None = arg(
        None,
        help="peak learning rate of the word embedding and the output layer (default: --lr)",
        dump=False,
    )
    decoupled_min_lr: float | None = arg(
        None, help="floor of --decoupled-lr (default: --min-lr)", dump=False
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = arg(
        "linear", help="shape of the decay"
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = arg(
        "exponential", help="shape of WSD's anneal", dump=False
    )
    lr_wsd_decay_iters: int | None = arg(None, help="iterations of WSD's anneal", dump=False)
    lr_wsd_decay_samples: int | None = arg(None, help="samples of WSD's anneal", dump=False)
    lr_decay_iters: int | None = arg(
        None, help="iterations until the floor (default: --train-iters)"
    )
    lr_decay_samples: int | None = arg(
        None, help="samples until the floor (default: --train-samples)"
    )
    lr_warmup_fraction: float | None = arg(None, help="share of the decay horizon that warms up")
    lr_warmup_iters: int = arg(0, help="iterations of warm-up")
    lr_warmup_samples: int = arg(0, help="samples of warm-up")
    lr_warmup_init: float = arg(0.0, help="learning rate where the warm-up starts")
    lr_init_iters: int = arg(
        0, dump=False, help="iterations at a learning rate of 0 before the warm-up (Adam's state)"
    )
    lr_warmup_first_step: bool = arg(
        False,
        dump=False,
        help="count the warm-up from its first step on: that of W "
        "has lr / W, as InternLM's, where Megatron's has 0",
    )
    weight_decay: float = arg(
        0.01, help="decoupled weight decay; none on biases and 1-D parameters"
    )
    start_weight_decay: float | None = arg(
        None, help="weight decay at the start, with an increment style"
    )
    end_weight_decay: float | None = arg(
        None, help="weight decay at the end, with an increment style"
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = arg(
        "constant", help="shape of its increase"
    )
    apply_wd_to_all: bool = arg(
        False, help="weight decay on norms and biases, too (InternLM)", dump=False
    )
    apply_wd_to_qk_layernorm: bool = arg(
        False, help="weight decay on the norms of queries and keys, too", dump=False
    )
    adam_beta1: float = arg(0.9, help="decay of Adam's first moment")
    adam_beta2: float = arg(0.999, help="decay of Adam's second moment")
    adam_beta2_schedule_c: float = arg(
        0.0,
        dump=False,
        help="with c > 0 the second moment's decay is 1 - k^-c after k "
        "updates, at least --adam-beta2 (PaLM: 0.8)",
    )
    adam_eps: float = arg(1e-8, help="Adam's epsilon")
    sgd_momentum: float = arg(0.9, help="momentum of SGD")
    clip_grad: float = arg(
        1.0, help="global gradient norm at which gradients are clipped; 0 turns it off"
    )
    override_opt_param_scheduler: bool = arg(
        False,
        flag="--override-opt_param-scheduler",
        alias=("--override-opt-param-scheduler",),
        help="on resume the scheduler's values are the command line's",
    )
    use_checkpoint_opt_param_scheduler: bool = arg(
        False,
        flag="--use-checkpoint-opt_param-scheduler",
        alias=("--use-checkpoint-opt-param-scheduler",),
        help="on resume the scheduler's values are the checkpoint's",
    )

    @property
    def weight_decay_range(self) -> tuple[float, float]:
        """Weight decay at the start and at the end of the run; equal where it is constant."""
        if self.weight_decay_incr_style == "constant":
            return self.weight_decay, self.weight_decay
        assert self.start_weight_decay is not None and self.end_weight_decay is not None, self
        return self.start_weight_decay, self.end_weight_decay
