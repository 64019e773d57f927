"""Our contestant in the benchmarks of a training step: the iteration of pretrain_gpt.py, one call
per step.

bench/step/worker.py builds `Ours` of other checkouts too, with the arguments that it has
here.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

from sizes import Size, command_line
from torch import Tensor, nn

from megatron.config import command_line as megatron_command_line
from megatron.features.registry import RunConfig
from megatron.parallel.sharding import sharding_of
from megatron.training import build, build_data, loop
from megatron.training.launch import initialize
from megatron.training.logging.flops import flops_per_sample
from megatron.training.logging.training_log import TrainingLog
from megatron.training.result import IterationResult
from pretrain_gpt import forward_step


class KeepingLog(TrainingLog):
    """The training log, which also keeps the last iteration's result."""

    last: IterationResult

    def add(self, result: IterationResult) -> None:
        """As TrainingLog's."""
        self.last = result
        super().add(result)


class Ours:
    """The iteration of pretrain_gpt.py, built by the functions it is built by there: samples, step,
    counters, log line.

    `environ` is the launcher's, where there are several ranks. `text` holds what such a run prints;
    `weights()` are the parameters by Megatron's global names.
    """

    def __init__(
        self,
        size: Size,
        dtype: str,
        device: str,
        extra: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ):
        words = command_line(size, dtype, device, extra)
        line = megatron_command_line.read(words, environ or {}, tree=RunConfig)
        config = line.config
        self.text = io.StringIO()
        with contextlib.redirect_stdout(self.text):
            tokenizer = build.make_tokenizer(config)
            plan = build.plan_run(config, line.world_size, tokenizer.vocab_size)
            assert plan.padded_vocab_size == size.vocab, (plan.padded_vocab_size, size.vocab)
            runtime = initialize.initialize(config)
            timers = initialize.build_timers(config, runtime)
            self._log = KeepingLog(config, plan, timers, runtime.ctx.world, [])
            self.run = build.build_run(config, plan, runtime, timers, tokenizer)
            data = build_data.build_data(config, plan, runtime, tokenizer)
        self.flops_per_sample = flops_per_sample(config, plan)
        self.device = runtime.device
        self._trainer = loop.Trainer(self.run, data, forward_step, self._log, time.time())
        self._samples = self._trainer.open_training_samples()
        gc.freeze()  # as pretrain_gpt.py when its loop starts

    def step(self) -> float | None:
        """One iteration."""
        with contextlib.redirect_stdout(self.text):
            self._trainer.train_one(self.run.progress.iteration + 1, self._samples)
        return self._log.last.loss

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank."""
        return self.run.model.parameters()

    def weights(self) -> dict[str, Tensor]:
        """Copies of the main weights (fp32), by global name."""
        tensors = self.run.optimizer.tensors()
        params = {sharding_of(p).name: p.detach() for p in self.run.model.parameters()}
        return {
            name: tensors.get(f"optimizer.fp32_param.{name}", p).clone()
            for name, p in params.items()
        }

    def first_samples(self, steps: int) -> list[Tensor]:
        """The micro-batches [b, s+1] of the next `steps` steps; the run itself does not move."""
        count = steps * self.run.plan.num_microbatches(self.run.progress.iteration + 1)
        samples = itertools.islice(self._trainer.open_training_samples(), count)
        return [micro_batch.rows for micro_batch in samples]
