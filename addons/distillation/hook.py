"""The teacher in a run: its model, the objective with it, and what a checkpoint remembers of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from megatron import log
from megatron.checkpoint import reading
from megatron.checkpoint.filesystem import CheckpointError
from megatron.config.plan.parameters import parameter_table
from megatron.kernels.select import choose_kernels
from megatron.model.blocks.module import LayerInputs
from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import all_reduce, gather_objects, my_slice, reduce_from
from megatron.parallel.sharding import local_box, sharding_of
from megatron.training.batch import Batch
from megatron.training.checkpointing.load import read_into
from megatron.training.checkpointing.saved_args import saved_config
from megatron.training.hook import Hook
from megatron.training.run import Run
from megatron.training.step import LM_LOSS, ForwardStep, Losses

from .loss import divergence, hidden_losses
from .settings import OUTPUT, Settings
from .teacher import FLAG, as_teacher

NAME = "distillation"  # of `progress.features`


def distill(run: Run, path: str, settings: Settings) -> None:
    """From now on the run learns from the teacher in `path`, which the ranks of the last pipeline
    stage have. Raises ValueError and CheckpointError, on all ranks alike."""
    problem: ValueError | CheckpointError | None = None
    try:
        if run.pipeline.is_last(len(run.model) - 1):
            teacher = load_teacher(run, path)
            run.objective = Distillation(teacher, settings).objective
    except (ValueError, CheckpointError) as error:
        problem = error
    for each in filter(None, gather_objects(problem, run.runtime.ctx.world)):
        raise each


def opened(path: str) -> reading.Checkpoint:
    """The checkpoint of the teacher. Raises CheckpointError."""
    stored = reading.load(path)
    if stored is None:
        raise CheckpointError(f"{FLAG} {path}: no checkpoint there [kd-teacher-missing]")
    return stored


def load_teacher(run: Run, path: str) -> GPTModel:
    """The whole teacher in the layout of the run, split over tensor and expert parallel ranks
    alone; frozen. Raises ValueError and CheckpointError."""
    stored = opened(path)
    config = as_teacher(run.config, saved_config(stored))
    dtype = getattr(torch, config.precision.params_dtype)
    ctx = copy(run.runtime.ctx)
    ctx.shares_weights = False
    plan = run.plan
    teacher = GPTModel(
        config.model,
        config.precision,
        ctx,
        parameter_table(config.model, plan.padded_vocab_size, plan.vocab_size),
        plan.vocab_size,
        dtype,
        run.runtime.device,
        kernels=choose_kernels(run.runtime.device, dtype, config),
    )
    with stored.reader() as reader, torch.no_grad():
        for parameter in teacher.parameters():
            sharding = sharding_of(parameter)
            box = local_box(sharding, ctx)
            read_into(parameter, reader, sharding.name, sharding, box, plan.vocab_size)
        reader.wait()
    log.print_rank_0(f" teacher       {stored.directory}")
    return teacher.requires_grad_(False).eval()


class Outputs:
    """The outputs of these modules of a model while it is open, by name."""

    def __init__(self, model: GPTModel, names: Iterable[str]):
        self._modules = {name: model.get_submodule(name) for name in names}
        self._seen: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Outputs:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(partial(self._keep, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, name: str, module: Any, inputs: Any, output: torch.Tensor) -> None:
        if name in self._seen:
            raise ValueError(
                f"{FLAG}: forward_step calls the model twice for a micro-batch; call it once, or "
                "omit the flag [kd-forward-step]"
            )
        self._seen[name] = output

    def take(self, name: str) -> torch.Tensor:
        """One of them. Raises ValueError where the model was not called."""
        if name not in self._seen:
            raise ValueError(
                f"{FLAG}: forward_step does not call the model; call it once for each micro-batch, "
                "or omit the flag [kd-forward-step]"
            )
        return self._seen[name]


class Distillation:
    """The loss with a teacher, as that of Megatron-LM's distillation."""

    def __init__(self, teacher: GPTModel, settings: Settings):
        self._teacher = teacher
        self._settings = settings

    def objective(self, forward_step: ForwardStep) -> ForwardStep:
        """What a step calls in place of `forward_step`."""
        return partial(self._step, forward_step)

    def _step(
        self, forward_step: ForwardStep, batch: Batch, model: GPTModel
    ) -> Losses | torch.Tensor:
        if model.output_layer is None:
            return forward_step(batch, model)
        # The teacher first: while nothing of the student is kept for backward.
        of_teacher = self._outputs(batch)
        pairs = self._settings.pairs
        with Outputs(model, {OUTPUT, *(pair.student for pair in pairs)}) as of_student:
            output = forward_step(batch, model)
        assert not isinstance(output, torch.Tensor), "forward_step: (loss sum, number of tokens)"
        loss, tokens, *optional = output
        metrics = dict(optional[0]) if optional else {}
        kd = self._logits_loss(of_student, of_teacher, model, batch)
        metrics["logits distillation loss"] = (kd.detach(), tokens)
        if pairs:
            hidden = self._hidden_loss(of_student, of_teacher, batch)
            metrics["intermediate distillation loss"] = (hidden.detach(), tokens)
            kd = kd + self._as_large(hidden, kd) * hidden
        total = kd
        if not self._settings.skip_lm_loss:
            total = loss + self._settings.kd_loss_scale * self._as_large(kd, loss) * kd
        metrics.setdefault(LM_LOSS, (loss.detach(), tokens))
        metrics["total loss"] = (total.detach(), tokens)
        return total, tokens, metrics

    @torch.no_grad()
    def _outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Logits before their cap [s, b, padded vocabulary / tp] and hidden states of the teacher,
        without dropout."""
        teacher = self._teacher
        assert teacher.embedding is not None and teacher.output_layer is not None, "a whole model"
        names = dict.fromkeys(pair.teacher for pair in self._settings.pairs)
        s = batch.tokens.shape[1] * teacher.ctx.cp.size
        with Outputs(teacher, names) as outputs:
            x = teacher.embedding(batch.tokens, batch.position_ids)
            x = teacher.decoder(x, LayerInputs(None, batch.document_ids), s, batch.position_ids)
        hidden = {name: outputs.take(name) for name in names}
        return {OUTPUT: teacher.output_layer(x), **hidden}

    def _logits_loss(
        self,
        of_student: Outputs,
        of_teacher: Mapping[str, torch.Tensor],
        model: GPTModel,
        batch: Batch,
    ) -> torch.Tensor:
        """The sum over the tokens that count."""
        losses = divergence(
            of_student.take(OUTPUT),
            of_teacher[OUTPUT],
            vocab_size=model.vocab_size,
            tp=model.ctx.tp,
            temperature=self._settings.logit_kl_temperature,
            softcaps=(model.softcap, self._teacher.softcap),
        )
        return _sum(losses, batch.loss_mask)

    def _hidden_loss(
        self, of_student: Outputs, of_teacher: Mapping[str, torch.Tensor], batch: Batch
    ) -> torch.Tensor:
        """The same of the pairs of layers, their mean. With sequence parallelism each rank has
        hidden states of other tokens."""
        ctx = self._teacher.ctx
        mask = batch.loss_mask
        if mask is not None and ctx.sequence_parallel:
            mask = my_slice(mask, ctx.tp, 1)
        losses = [
            _sum(hidden_losses(of_student.take(p.student), of_teacher[p.teacher], p.loss), mask)
            for p in self._settings.pairs
        ]
        total = torch.stack(losses).mean()
        return reduce_from(total, ctx.tp) if ctx.sequence_parallel else total

    def _as_large(self, loss: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The factor that makes `loss` as large as `other`, of the micro-batch on all
        context-parallel ranks; 1 where one of them is 0."""
        values = torch.stack((loss.detach().double(), other.detach().double()))
        loss, other = all_reduce(values, self._teacher.ctx.cp)
        both = (loss > 0) & (other > 0)
        return torch.where(both, other / loss.where(both, 1.0), 1.0).to(other.dtype)


def _sum(losses: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return losses.sum() if mask is None else (losses * mask).sum()


class TeacherRecord(Hook):
    """Checkpoints have which teacher and settings they were trained with; a resume with others says
    so."""

    def __init__(self, run: Run, path: str, settings: Settings):
        def record() -> dict[str, Any]:
            stored = opened(path)
            return {
                "teacher": stored.manifest.crc32,
                "iteration": stored.iteration,
                "settings": {**asdict(settings), "pairs": [list(p) for p in settings.pairs]},
            }

        now = run.of_rank_0(record)
        before = run.progress.features.get(NAME)
        if isinstance(before, dict) and run.progress.iteration:
            differ = [key for key, value in now.items() if before.get(key) != value]
            if differ:
                log.print_rank_0(
                    f"WARNING: {FLAG} {path}: the checkpoint was distilled with another "
                    f"{', '.join(differ)}: {[before.get(key) for key in differ]}, now "
                    f"{[now[key] for key in differ]} [kd-teacher-changed]"
                )
        run.progress.features[NAME] = now
