"""`Engine`: the training step for loops of one's own, such as reinforcement learning. Model, plan,
step and checkpoints are those of pretrain_gpt.py; data, loss and loop are the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

from megatron import log, program
from megatron.arguments import Flag, flags_of
from megatron.checkpoint.safetensors_file import row_major
from megatron.config.command_line import CommandLine
from megatron.config.data import DataConfig
from megatron.config.script import Script
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.tree import Config
from megatron.training import preflight, step
from megatron.training.checkpointing import save
from megatron.training.checkpointing.save_services import save_services
from megatron.training.feature import Feature
from megatron.training.launch import initialize
from megatron.training.result import IterationResult
from megatron.training.run import Run

from .batches import Batches, LossFunction
from .offloading import Offloaded, memory_of

Flags = Sequence[str] | Mapping[str, Any]

# What the loop of pretrain_gpt.py alone reads, beside the flags that name and order data.
_OF_THE_LOOP = frozenset(
    ("eval_iters", "eval_interval", "start_eval_at_iter", "full_validation", "skip_train")
    + ("save_interval", "snapshot_interval", "snapshot_dir", "control_file")
    + ("non_persistent_ckpt_type", "non_persistent_local_ckpt_dir")
    + ("replication", "replication_jump", "replication_factor")
    + ("exit_interval", "exit_duration_in_mins", "exit_signal_handler")
    + ("manual_gc", "manual_gc_interval", "manual_gc_eval")
    + ("train_range_to_skip", "iterations_to_skip")
    + ("log_interval", "metrics_file", "progress", "log_subsets", "log_accuracy")
    + ("log_throughput", "log_params_norm", "timing_log_level", "timing_log_option")
)
# Of the flags of data, those that say what a batch's tokens mean.
_OF_A_BATCH = frozenset(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"))


def words_of(flags: Flags) -> list[str]:
    """A command line of flags by name: {"num_layers": 2, "bf16": True} is --num-layers 2 --bf16.
    None and False leave a flag out; a list or tuple has several values."""
    if not isinstance(flags, Mapping):
        return list(flags)
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += map(str, value if isinstance(value, (list, tuple)) else [value])
    return words


class Engine:
    """A model with its optimizer on this rank. Every rank makes one, and calls the same methods in
    the same order. A context manager; `close` ends it.

    `run` (`megatron.training.run.Run`) has model, configuration, plan and counters.
    """

    def __init__(self, flags: Flags):
        """Connect the ranks, build the model, load the checkpoint of --load. `flags`: a command
        line of pretrain_gpt.py, as a list of words or by name (`words_of`), without data.

        Leaves with exit code 2 where flags are wrong. Raises ValueError and CheckpointError."""
        program.check_packages()
        script = Script(self._refuse_data, datasets_provider=self._refuse_data)
        line = program.read_command_line(words_of(flags), script)
        _check(line.config)
        log.show_details(not line.config.logging.is_short)
        _note_loop(line)
        self._stack = ExitStack()
        try:
            tokenizer = preflight.check(line)
            services = self._stack.enter_context(save_services(line))
            rendezvous, join = program.connect(line.config)
            self._stack.callback(initialize.finish, rendezvous)
            run, *_ = program.begin(line, tokenizer, services, join)
        except BaseException:
            self._stack.close()
            raise
        self.run: Run = run
        self._gradients: step.Gradients | None = None
        self._offloaded: Offloaded | None = None
        self._loss_fn: LossFunction | None = None

    @classmethod
    def initialize(cls, flags: Flags) -> Engine:
        """The same, by the name that other engines have."""
        return cls(flags)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect the ranks, and release the directory of --save."""
        self._stack.close()

    @staticmethod
    def _refuse_data(*_: Any) -> Any:
        raise AssertionError("an engine reads no data")

    @property
    def iteration(self) -> int:
        """Steps so far, with those before the checkpoint that was loaded."""
        return self.run.progress.iteration

    @property
    def rows(self) -> int:
        """Samples of a batch on this rank: of the next step, micro-batch times accumulation."""
        plan = self.run.plan
        return plan.num_microbatches(self.iteration + 1) * plan.batch.micro_batch_size

    # --- a step

    def forward_backward(
        self, batch: Mapping[str, torch.Tensor], loss_fn: LossFunction, *, entropy: bool = False
    ) -> dict[str, float | None]:
        """Gradients of one global batch, of which this data-parallel rank has `rows` samples, in
        micro-batches: the mean loss ("loss") and the metrics of all ranks. `step` uses them.

        batch: "tokens" int64 [rows, s + 1], which the model reads and predicts; and tensors
        [rows, s] of the predicted tokens: "loss_mask" (experts do not count tokens where it is 0)
        and any others. Those of ranks that share a sample are alike.
        `loss_fn(log_probs, data)` is called on the last pipeline stage for each micro-batch, with
        log_probs [b, s] of the predicted tokens (fp32 at least, with gradients) and the tensors of
        the batch, with `entropy` also "entropy" [b, s] (with gradients, and with a copy of the
        logits); with context parallelism s is this rank's part. It returns (sum, count) or (sum,
        count, metrics), as forward_step of pretrain_gpt.py: the loss is all sums over all counts.
        Raises ValueError for a batch of another shape, and for a second call before `step`.
        """
        self._check_loaded("forward_backward")
        if self._gradients is not None:
            raise ValueError(
                f"forward_backward: the gradients of the batch before are not used yet; call "
                f"step(), or give one batch of {self.rows} samples (--global-batch-size says how "
                "many) [engine-order]"
            )
        if loss_fn is not self._loss_fn:  # which may have other metrics than the one before
            self._loss_fn, self.run.metric_names = loss_fn, None
        batches = Batches(self.run, batch, self.rows, self.run.plan.batch.micro_batch_size)
        forward_step = batches.forward_step(loss_fn, entropy)
        gradients = step.compute_gradients(
            self.run, forward_step, batches.read(), self.iteration + 1
        )
        self._gradients = gradients
        totals = gradients.totals
        return {"loss": totals.loss / max(1.0, totals.tokens), **totals.metrics}

    def step(self) -> IterationResult:
        """Clip the gradients, update the weights, advance the learning rate: `grad_norm` before it
        was clipped, `learning_rate` of the next step, `skipped` where there was no update. Raises
        NotFinite for a loss or a norm that is none, and ValueError without gradients."""
        if self._gradients is None:
            raise ValueError(
                "step: there are no gradients; call forward_backward first [engine-order]"
            )
        gradients, self._gradients = self._gradients, None
        return self.run.advance(step.apply_gradients(self.run, self.iteration + 1, gradients))

    def eval(
        self, batch: Mapping[str, torch.Tensor], *, entropy: bool = False
    ) -> dict[str, torch.Tensor]:
        """ "log_probs" [rows, s] of the predicted tokens, and "entropy" if it is asked for, without
        dropout and gradients, on all ranks that share the samples; as many rows as are given, a
        multiple of the micro-batch and on every rank the same number."""
        self._check_loaded("eval")
        run = self.run
        size = run.plan.evaluation_batch.micro_batch_size
        rows = len(batch["tokens"]) if "tokens" in batch else 0
        batches = Batches(run, batch, max(size, -(-rows // size) * size), size)
        found: dict[str, torch.Tensor] = {}

        def take(log_probs: torch.Tensor, data: Mapping[str, torch.Tensor]) -> Any:
            outputs = {"log_probs": log_probs, **({"entropy": data["entropy"]} if entropy else {})}
            for name, values in outputs.items():
                whole = found.setdefault(name, batches.empty(values.dtype))
                batches.place(whole, values)
            return log_probs.sum(), log_probs.numel()

        report: Callable[[str], None] = lambda text: None  # noqa: E731
        step.evaluate(
            run, batches.forward_step(take, entropy), batches.read(), batches.count, report
        )
        return batches.shared(found, ["log_probs", *["entropy"] * entropy])

    # --- weights

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of the model as a Hugging Face model, on this rank's device, layer
        by layer: those of tools/convert_checkpoint.py hf-export, bit for bit. All ranks iterate, to
        the end; at most one layer is in memory beyond the model. A tensor is the caller's: later
        steps do not change it. Raises ConversionError (a ValueError) where no family of models can
        express this one."""
        self._check_loaded("weights")
        try:
            from ..convert.families import family_of
            from ..convert.huggingface import hf_tensors
            from ..convert.live import RunModel, RunTensors
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("megatron.addons.convert"):
                raise
            raise ValueError(
                "weights: needs the add-on convert, which is not in this installation "
                "[addon-missing]"
            ) from None
        c = self.run.config.checkpoint
        model = RunModel(RunTensors(self.run), self.run, Path(c.save or c.load or "."))
        family = family_of(model.model, model.base)
        with model:
            for entry in hf_tensors(model, family, model.vocab_size()):
                yield entry.key, row_major(entry)

    # --- memory

    def offload(self) -> None:
        """Move weights and optimizer state to the host, and free the gradients, until `reload`;
        nothing else may be called meanwhile. On a CPU the gradients alone are freed."""
        self._check_loaded("offload")
        if self._gradients is not None:
            raise ValueError("offload: gradients are not used yet; call step() [engine-order]")
        device = self.run.runtime.device
        if device.type == "cpu":
            log.print_rank_0("offload: the device is a CPU; gradients are freed, the rest stays")
        self._offloaded = Offloaded(*memory_of(self.run), copies=device.type != "cpu")

    def reload(self) -> None:
        """Undo `offload`."""
        if self._offloaded is not None:
            self._offloaded.back()
            self._offloaded = None

    def _check_loaded(self, call: str) -> None:
        if self._offloaded is not None:
            raise ValueError(f"{call}: the model is offloaded; call reload() [engine-order]")

    # --- checkpoints

    def save(self) -> str:
        """Write a checkpoint of this iteration to --save, whose path is returned; complete when it
        returns. Raises CheckpointError, and ValueError without --save."""
        self._check_loaded("save")
        directory = self.run.config.checkpoint.save
        if not directory:
            raise ValueError("save: nowhere to save; give --save DIR [flag-missing]")
        pending = save.save_checkpoint(self.run)
        if pending is not None:
            save.finish_save(self.run, pending)
        return directory

    def load(self) -> str | None:
        """Load the newest checkpoint of --load again, or that of --ckpt-step: weights, optimizer
        and counters; its path, or None where there is none. Raises CheckpointError."""
        self._check_loaded("load")
        from megatron.training.checkpointing.start import load_checkpoint

        self._gradients = None
        return load_checkpoint(self.run)


def _note_loop(line: CommandLine) -> None:
    """Say which flags have no effect. Raises ValueError for those that ask for other steps than an
    engine makes."""
    flags = flags_of(type(line.config))
    typed = [flags[name] for name in line.typed if name in flags]
    by_verdict = {
        verdict: [flag.spelling for flag in typed if verdict_on(flag, line.config) == verdict]
        for verdict in ("refused", "noted")
    }
    if refused := by_verdict["refused"]:
        raise ValueError(
            f"{', '.join(refused)}: not possible with Engine: a part of what it does is in the "
            "loop or the data of pretrain_gpt.py; omit it [engine-flag]"
        )
    if noted := by_verdict["noted"]:
        log.print_rank_0(
            f"note: {', '.join(noted)}: of the loop of pretrain_gpt.py, without effect in Engine"
        )


def verdict_on(flag: Flag, config: Config) -> Literal["taken", "noted", "refused"]:
    """What an engine does with a typed flag. It refuses what changes steps by a part in the loop
    (an average that nothing updates, losses by source) or samples, and what makes no steps."""
    group = getattr(config, flag.group)
    if not isinstance(group, Feature):
        if flag.name == "dry_run":
            return "refused"
        of_data = hasattr(DataConfig, flag.name) and not hasattr(TokenizerConfig, flag.name)
        unread = of_data and flag.name not in _OF_A_BATCH
        return "noted" if unread or flag.name in _OF_THE_LOOP else "taken"
    feature = type(group)
    if feature.data_source is not Feature.data_source:
        return "refused"
    if feature.hooks is not Feature.hooks:
        demands = group.demands(config)
        changes = feature.built is not Feature.built or demands.subsets or demands.vetoes
        return "refused" if changes else "noted"
    return "taken" if feature.dry_run is Feature.dry_run else "refused"


def _check(config: Config) -> None:
    """Raise ValueError for what log-probabilities are not with, or what an engine has not."""
    for flag, value, reason in (
        ("--label-smoothing", config.model.label_smoothing, "losses are no log-probabilities"),
        ("--z-loss-coeff", config.model.z_loss_coeff, "losses have another gradient"),
        ("--mtp-num-layers", config.model.mtp_num_layers, "its losses read samples ahead"),
        ("--cuda-graph-impl", config.kernels.cuda_graphs, "graphs hold one loss"),
        ("--packed-samples", config.packed, "rows have one sample each"),
    ):
        if value:
            raise ValueError(f"{flag}: not possible with Engine: {reason}; omit it [engine-flag]")
