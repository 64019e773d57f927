"""One optimizer step in mixed precision: unscale, find overflows, clip, update main weights, copy
them to the model.

It reads `.main_grad` and `.sharding` of the parameters; reductions over other ranks are passed in
as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron.config.mup import Multipliers
from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer import adam, clip_grads
from megatron.optimizer.param_groups import build_param_groups
from megatron.parallel.sharding import sharding_of

if TYPE_CHECKING:
    from megatron.optimizer.muon import Muon
    from megatron.optimizer.precision_aware import PrecisionAwareAdamW
    from megatron.optimizer.scaler import GradScaler

# What --embed-grad-scale applies to: the tables behind an embedding's output, and the output layer.
EMBEDDINGS = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "output_layer.weight",
)
LOW_PRECISION = (torch.float16, torch.bfloat16)


class StepResult(NamedTuple):
    """ok: an update was made. grad_norm: before clipping; None after an overflow, and with
    --clip-grad 0 unless `admit` is given. num_zeros: with --log-num-zeros-in-grad."""

    ok: bool
    grad_norm: float | None
    num_zeros: int | None


class ModelRanks(NamedTuple):
    """The ranks that share the model; alone by default.

    `counts(param)` says whether this rank's copy counts in norms and zero counts; `reduce_sum` and
    `reduce_max` take and return a 0-dim float64 tensor. All ranks must call these alike, which
    holds because every rank runs the same step.
    """

    counts: Callable[[torch.Tensor], bool] = lambda param: True
    reduce_sum: clip_grads.Reduce = clip_grads.identity
    reduce_max: clip_grads.Reduce = clip_grads.identity


ALONE = ModelRanks()


class MixedPrecisionOptimizer:
    """Adam, SGD, or Muon and Adam, on the fp32 (or fp64) main weights of `params`.

    A bf16 or fp16 parameter gets an fp32 main copy; an fp32 or fp64 one is its own main weight (its
    storage is shared, so whoever loads weights must copy into the parameter and not rebind it).
    Gradients are read from `param.main_grad` at each step, without a copy unless its type differs
    from the main weight's; with --use-precision-aware-optimizer then only a piece at a time.

    `params` may as well be flat views of parts of parameters (`GradBuffers.owned`): all that is
    read of them is `main_grad`, and of `sharding` the name and global shape. `multipliers` of these
    two scale a weight's learning rate and Adam's epsilon. Empty ones stand for
    parameters that others update: every rank has the same groups.

    `span(name)` gives a context manager around each part of a step (Megatron's timer names).
    `rescale`: called after an update with each parameter and its main weight, which it may change.
    """

    rescale: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        config: OptimizerConfig,
        *,
        muon: Muon | None = None,
        multipliers: Callable[[str, Sequence[int], bool], Multipliers] | None = None,
        grad_scaler: GradScaler | None = None,
        embed_grad_scale: float = 1.0,
        log_num_zeros_in_grad: bool = False,
        ranks: ModelRanks = ALONE,
        span: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        assert config.clip_grad >= 0.0 and config.optimizer in adam.STATE_KEYS, config
        self.kind = config.optimizer
        self.clip_grad = config.clip_grad
        self.log_num_zeros_in_grad = log_num_zeros_in_grad
        self.grad_scaler = grad_scaler
        self.step_count = 0
        self._ranks = ranks
        self._span = span
        groups = build_param_groups(params, config, muon is not None, multipliers)
        assert groups, "no parameters"
        self._device = groups[0]["params"][0].device
        # of a sharded parameter this rank may have nothing; the group stays
        for group in groups:
            nonempty = [i for i, param in enumerate(group["params"]) if param.numel()]
            group["params"] = [group["params"][i] for i in nonempty]
            group["names"] = [group["names"][i] for i in nonempty]
        self._params = [param for group in groups for param in group["params"]]
        self._names = [name for group in groups for name in group["names"]]
        self._scales = [embed_grad_scale if name in EMBEDDINGS else 1.0 for name in self._names]
        self._counts = [bool(ranks.counts(param)) for param in self._params]
        self._main = [_main_weight(param) for param in self._params]
        # what a feature keeps of each main weight, by key: checkpoints have it under
        # optimizer.KEY.NAME, and without such a tensor it starts as the main weight
        self.kept: dict[str, list[torch.Tensor]] = {}
        by_param = dict(zip(map(id, self._params), self._main, strict=True))
        for group in groups:
            group["params"] = [by_param[id(param)] for param in group["params"]]
        self._beta2 = (config.adam_beta2, config.adam_beta2_schedule_c)
        self._has_float64 = any(main.dtype == torch.float64 for main in self._main)
        self._precision_aware: PrecisionAwareAdamW | None = None
        shardings = {
            name: sharding_of(p) for name, p in zip(self._names, self._params, strict=True)
        }
        self.inner = muon.build(groups, config, shardings) if muon else _inner(groups, config)
        if config.use_precision_aware_optimizer:
            from megatron.optimizer.precision_aware import PrecisionAwareAdamW

            assert isinstance(self.inner, PrecisionAwareAdamW), config
            self._precision_aware = self.inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: a scheduler writes `lr` and `weight_decay` into them."""
        return self.inner.param_groups

    @property
    def weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter (or part of one) and its main weight, which may be its memory."""
        return list(zip(self._params, self._main, strict=True))

    @property
    def loss_scale(self) -> float:
        """What to multiply the loss by before backward (1.0 without a scaler)."""
        return 1.0 if self.grad_scaler is None else self.grad_scaler.scale

    @property
    def adam_beta2(self) -> float:
        """Decay of the second moment in the next update: with --adam-beta2-schedule-c, 1 -
        updates^-c where it is larger."""
        least, c = self._beta2
        return max(least, 1.0 - self.step_count**-c) if c > 0.0 and self.step_count else least

    @property
    def implementation(self) -> str:
        """ "fused" or "foreach": which of torch's kernels make the update."""
        return "fused" if self.param_groups[0]["fused"] else "foreach"

    @torch.no_grad()
    def step(
        self, grad_factor: float = 1.0, admit: Callable[[float], bool] | None = None
    ) -> StepResult:
        """Use the gradients once; on an overflow (with a scaler) adapt the scale and change nothing
        else.

        `grad_factor` multiplies all gradients (say 1 / tokens) in the same pass that unscales and
        clips them. Gradients are read twice and written at most once: one pass for norm and
        overflow together, one multiplication if its factor is not 1 (torch's fused Adam does it
        itself), then the update. At most one host sync (another when zeros are counted). Without a
        scaler a NaN or infinite norm is reported as it is, and the update is made: the loop decides
        what that means. `admit(norm)`, if given, is asked first, unless there is an overflow; where
        it says no nothing is changed, the scaler neither.
        """
        grads = self._attach_gradients()
        norm = None
        factor = grad_factor / self.loss_scale
        if self.grad_scaler is not None or self.clip_grad > 0.0 or admit:
            with self._span("optimizer-unscale-and-check-inf"):
                found_inf, raw_norm = self._measure(grads)
            measured = raw_norm * factor
            if self.clip_grad > 0.0 or admit:
                norm = measured
            if not found_inf and admit and not admit(measured):
                self._release_gradients()
                return StepResult(False, norm, None)
            if self.grad_scaler is not None:
                self.grad_scaler.update(found_inf)
                if found_inf:
                    self._release_gradients()
                    return StepResult(False, None, None)
            if self.clip_grad > 0.0:
                factor *= clip_grads.clip_coefficient(measured, self.clip_grad)
        with self._span("optimizer-clip-main-grad"):
            factor = self._scale(grads, factor)
        zeros = None
        if self.log_num_zeros_in_grad:
            with self._span("optimizer-count-zeros"):
                zeros = clip_grads.count_zeros(
                    self._counted(grads), self._ranks.reduce_sum, self._device, factor
                )
        with self._span("optimizer-inner-step"):
            self._update(grads, factor)
        self.step_count += 1
        self._release_gradients()
        with self._span("optimizer-copy-main-to-model-params"):
            self._copy_main_to_model()
        return StepResult(True, norm, zeros)

    def _update(self, grads: Sequence[torch.Tensor], factor: float) -> None:
        if self._beta2[1] > 0.0:
            for group in self.param_groups:
                if not group["muon"]:
                    group["betas"] = (group["betas"][0], self.adam_beta2)
        if self._precision_aware is not None:
            self._precision_aware.update(grads, factor)
        else:
            self.inner.step()
        if self.rescale is not None:
            for param, main in zip(self._params, self._main, strict=True):
                self.rescale(param, main)

    def _scale(self, grads: Sequence[torch.Tensor], factor: float) -> float:
        """Multiply the gradients by `factor` unless the update does it; returns what is left to the
        update. torch's fused Adam does it in fp32."""
        if self._precision_aware is not None:
            return factor
        if (
            isinstance(self.inner, adam.AdamW)
            and self.implementation == "fused"
            and not self._has_float64
        ):
            self.inner.grad_scale = adam.grad_scale(factor, self._device)
            return factor
        clip_grads.scale_gradients(grads, factor)
        return 1.0

    def params_norm(self) -> float:
        """L2 norm of the main weights that count (--log-params-norm); one host sync."""
        with torch.no_grad():
            return clip_grads.global_norm(
                self._counted(self._main), self._ranks.reduce_sum, self._device
            ).item()

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copy the model's parameters to the main weights: call it when weights were loaded
        without optimizer state."""
        pairs = self._low_precision_pairs()
        if pairs:
            torch._foreach_copy_(
                [main for main, _ in pairs], [param.detach() for _, param in pairs]
            )
        self.start_kept(self.kept_tensors())

    def kept_tensors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """What features keep, by its name in a checkpoint, each tensor with its main weight."""
        return {
            f"optimizer.{key}.{name}": (tensor, main.detach())
            for key, kept in self.kept.items()
            for name, tensor, main in zip(self._names, kept, self._main, strict=True)
        }

    def start_kept(self, names: Iterable[str]) -> None:
        """Start these of `kept_tensors` from their main weights."""
        pairs = self.kept_tensors()
        for tensor, main in map(pairs.__getitem__, names):
            tensor.copy_(main)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors by global name, live (write into them to load, copy them to keep
        them).

        optimizer.exp_avg.<name>, optimizer.exp_avg_sq.<name> (Adam) or
        optimizer.momentum_buffer.<name> (Muon, SGD with momentum), NorMuon's
        optimizer.neuron_exp_avg_sq.<name>, optimizer.fp32_param.<name> for low-precision
        parameters, and what features keep; all with the parameter's local shape.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, param, main in zip(self._names, self._params, self._main, strict=True):
            for key in adam.STATE_KEYS[self.kind]:
                if key in self.inner.state[main]:
                    tensors[f"optimizer.{key}.{name}"] = self.inner.state[main][key]
            if param.dtype in LOW_PRECISION:
                tensors[f"optimizer.fp32_param.{name}"] = main.detach()
        return tensors | {name: kept for name, (kept, _) in self.kept_tensors().items()}

    def counters(self) -> dict[str, Any]:
        """The JSON-able rest of the state: optimizer kind, number of updates made, loss scale."""
        scaler = None if self.grad_scaler is None else self.grad_scaler.state_dict()
        return {"optimizer": self.kind, "step": self.step_count, "grad_scaler": scaler}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors by global name, JSON-able counters)."""
        return self.tensors(), self.counters()

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore what `counters` returned: for a loader that wrote into `tensors()` itself."""
        self.step_count = int(counters["step"])
        adam.set_step_count(self.inner.state.values(), self.step_count)
        if self.grad_scaler is not None and counters["grad_scaler"] is not None:
            self.grad_scaler.load_state_dict(counters["grad_scaler"])

    def _counted(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor for tensor, counts in zip(tensors, self._counts, strict=True) if counts]

    def _low_precision_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (m, p)
            for m, p in zip(self._main, self._params, strict=True)
            if p.dtype in LOW_PRECISION
        ]

    def _attach_gradients(self) -> list[torch.Tensor]:
        """Each main weight's `.grad`: the parameter's main_grad itself, or its copy in the main
        weight's type. The precision-aware update takes them as they are."""
        if self._precision_aware is not None:
            grads = [param.main_grad for param in self._params]
            for grad, scale in zip(grads, self._scales, strict=True):
                clip_grads.scale_gradients([grad], scale)
            return grads
        with self._span("optimizer-copy-to-main-grad"):
            grads = [
                param.main_grad.to(main.dtype)
                for param, main in zip(self._params, self._main, strict=True)
            ]
            for main, grad in zip(self._main, grads, strict=True):
                main.grad = grad
        for grad, scale in zip(grads, self._scales, strict=True):
            if scale != 1.0:
                grad.mul_(scale)
        return grads

    def _release_gradients(self) -> None:
        """Let go of the gradients, so that converted copies live only during the step."""
        for main in self._main:
            main.grad = None

    def _measure(self, grads: Sequence[torch.Tensor]) -> tuple[bool, float]:
        """(some rank's gradient is not finite, norm over those that count) of the still scaled
        gradients; one sync."""
        counted = clip_grads.sum_of_squares(self._counted(grads), self._device)
        total = self._ranks.reduce_sum(counted)
        if self.grad_scaler is None:
            return False, total.sqrt().item()
        uncounted = [grad for grad, counts in zip(grads, self._counts, strict=True) if not counts]
        own_squares = counted + clip_grads.sum_of_squares(uncounted, self._device)
        found_inf = self._ranks.reduce_max((~torch.isfinite(own_squares)).double())
        overflows, squared = torch.stack([found_inf, total]).tolist()
        return overflows > 0.0, squared**0.5

    def _copy_main_to_model(self) -> None:
        pairs = self._low_precision_pairs()
        if pairs:
            torch._foreach_copy_([param for _, param in pairs], [main for main, _ in pairs])


def _inner(groups: list[dict[str, Any]], config: OptimizerConfig) -> adam.AdamW | adam.SGD:
    """torch's optimizer that updates the main weights."""
    if config.optimizer == "sgd":
        return adam.build_sgd(groups, config)
    if not config.use_precision_aware_optimizer:
        return adam.build_adam(groups, config)
    from megatron.optimizer.precision_aware import PrecisionAwareAdamW

    return adam.build_adam(groups, config, PrecisionAwareAdamW)


def _main_weight(param: torch.Tensor) -> torch.Tensor:
    """A leaf the inner optimizer may update: an fp32 copy of a low-precision parameter, else its
    own storage."""
    main = param.detach()
    if param.dtype in LOW_PRECISION:
        main = main.float()
    return main.requires_grad_(True)
