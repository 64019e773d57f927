"""What a run will be, as its flags and its plan say: texts by label, which a run and --dry-run
print first."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from megatron.arguments import to_args_text
from megatron.config.plan import fit
from megatron.config.plan.fit import GIB
from megatron.config.plan.plan import (
    Plan,
    by_muon,
    shards,
)
from megatron.config.tree import Config

WIDTH = 100
LABEL = 15
MIB = 2**20


def entry(label: str, text: str) -> str:
    """A label and its text, wrapped next to it."""
    return _wrapped(text, f" {label:<{LABEL - 1}}", " " * LABEL)


def _wrapped(text: str, first: str, others: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
        break_long_words=False,
    )


def entries(config: Config, plan: Plan, own_model: bool = False) -> dict[str, str]:
    """What follows from flags and plan: texts by label. Of a script's `own_model` nothing is known
    yet."""
    m = config.model
    active = f", {plan.num_active:,} active" if m.num_experts else ""
    padding = f", {plan.num_padding:,} of them padding" if plan.num_padding else ""
    padded = (
        ""
        if plan.padded_vocab_size == plan.vocab_size
        else f", padded to {plan.padded_vocab_size:,}"
    )
    model = (
        f"{plan.num_parameters:,} parameters{active}{padding}: "
        f"{_count(m.num_layers, 'layer')}, hidden {m.hidden_size}, {m.blocks_text}, "
        f"sequence {m.seq_length}, {m.normalization}, {m.activation}, "
        f"positions {m.positions}"
    )
    texts = {
        "model": "what the script's model_provider returns" if own_model else model,
        "tokenizer": f"{config.data.tokenizer}, vocabulary {plan.vocab_size:,}{padded}",
        "batch": batch_text(config, plan),
        "layout": layout_text(config, plan) if plan.world_size > 1 else "",
        "training": training_text(config, plan),
        "optimizer": optimizer_text(config),
        "trained": "" if own_model else _trained_text(config, plan),
        "by Muon": "" if own_model else _by_muon_text(config, plan),
        "learning rate": schedule_text(config, plan),
        "memory": "" if own_model else memory_text(config, plan),
    }
    return {label: text for label, text in texts.items() if text}


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def batch_text(config: Config, plan: Plan) -> str:
    """How a global batch is composed."""
    size = plan.batch.final_global_batch_size
    accumulation = plan.num_microbatches(plan.train_iters)
    text = (
        f"{_count(size, 'sample')} = micro-batch {config.training.micro_batch_size} x "
        f"accumulation {accumulation} x data-parallel {plan.data_parallel_size}; "
        f"{size * config.model.seq_length:,} tokens"
    )
    phases = plan.batch.phases
    return (
        text
        if plan.batch.is_constant
        else f"{text}; ramp-up from {_count(phases[0].global_batch_size, 'sample')}"
    )


def layout_text(config: Config, plan: Plan) -> str:
    """The axes of more than one rank, and how their work is shared."""
    p = config.parallel
    sizes = {
        "data": plan.data_parallel_size,
        "tensor": p.tensor_model_parallel_size,
        "pipeline": p.pipeline_model_parallel_size,
        "context": p.context_parallel_size,
    }
    text = f"{plan.world_size} ranks = " + " x ".join(
        f"{name} {size}" for name, size in sizes.items() if size > 1
    )
    chunks = len(plan.layers_per_stage[0])
    details = [f"{chunks} virtual pipeline stages per rank"] * (chunks > 1)
    details += ["sequence parallel"] * (p.sequence_parallel and p.tensor_model_parallel_size > 1)
    shares = shards(config, plan)
    what = ["weights"] * p.shares_weights + ["gradients"] * p.shares_gradients
    what.append("optimizer state")
    details += [f"{', '.join(what)} sharded over {shares} ranks"] * (shares > 1)
    if p.expert_model_parallel_size * p.expert_tensor_parallel > 1 and config.model.num_experts:
        experts = f"experts: expert {p.expert_model_parallel_size}"
        details.append(f"{experts} x expert-tensor {p.expert_tensor_parallel}")
    return "; ".join([text, *details])


def training_text(config: Config, plan: Plan) -> str:
    """Length of the run, and when it is evaluated."""
    t = config.training
    samples = plan.targets.train
    skipped = plan.skips.count_in(1, plan.train_iters)
    text = (
        f"{_count(plan.train_iters, 'iteration')}, {_count(samples, 'sample')}, "
        f"{samples * config.model.seq_length:,} tokens"
    )
    text += f" ({_count(skipped, 'iteration')} will be skipped)" if skipped else ""
    if t.exit_interval:
        text += f"; exits at multiples of {_count(t.exit_interval, 'iteration')}"
    if t.skip_train:
        text = "none (--skip-train)"
    if not t.eval_iters:
        return f"{text}; no validation"
    size = t.eval_iters * plan.evaluation_batch.global_batch_size
    extent = "all of the validation data" if config.data.full_validation else _count(size, "sample")
    start = f" from {t.start_eval_at_iter:,} on" if t.start_eval_at_iter else ""
    return f"{text}; validation every {t.eval_interval:,}{start}: {extent}"


def optimizer_text(config: Config) -> str:
    """The update rule, or rules, and its constants."""
    o = config.optimizer
    name = f"Adam (betas {o.adam_beta1:g} {o.adam_beta2:g}, eps {o.adam_eps:g})"
    if o.optimizer == "sgd":
        name = f"SGD (momentum {o.sgd_momentum:g})"
    elif o.optimizer == "muon":
        name = f"{_muon_text(config)} and {name}"
    decay = f"weight decay {o.weight_decay:g}"
    if o.weight_decay_incr_style != "constant":
        decay = (
            f"weight decay {o.start_weight_decay:g} to {o.end_weight_decay:g} "
            f"({o.weight_decay_incr_style})"
        )
    if config.model.use_mup:
        decay += f", {_mup_text(config)}"
    return f"{name}, {decay}, " + (f"clipping {o.clip_grad:g}" if o.clip_grad else "no clipping")


def _mup_text(config: Config) -> str:
    """The width relative to that of the tuned learning rate, and what follows."""
    m = config.model.mup_width
    scaled = {
        "sgd": f"learning rate of embeddings, norms and biases x {m:g}",
        "adam": f"learning rate and eps of matrices / {m:g}",
        "muon": f"Adam's learning rate and eps of matrices / {m:g}",
    }[config.optimizer.optimizer]
    return f"muP of width {m:g} x {config.model.mup_base_hidden_size}: {scaled}"


def _muon_text(config: Config) -> str:
    """Muon's constants."""
    c = config.muon
    precision: str = config.precision.main_dtype
    if c.muon_fp32_matmul_prec == "medium" or (
        c.muon_fp32_matmul_prec is None and not (config.precision.fp64 or config.training.on_cpu)
    ):
        precision = "bfloat16"
    return c.text(precision)


def _trained_text(config: Config, plan: Plan) -> str:
    """With --train-only, how much of the model is trained."""
    if not config.optimizer.train_only:
        return ""
    size = sum(spec.size for spec in plan.trained)
    return (
        f"{size:,} parameters in {_count(len(plan.trained), 'tensor')} (--train-only "
        f"{' '.join(config.optimizer.train_only)}); frozen {plan.num_parameters - size:,}, without "
        "gradients and optimizer state"
    )


def _by_muon_text(config: Config, plan: Plan) -> str:
    """Of an optimizer with two rules, the weights that each updates."""
    if config.optimizer.optimizer != "muon":
        return ""
    from megatron.config.plan.muon_matrices import stacks

    chosen = [spec for spec in plan.trained if by_muon(config, spec)]
    count = sum(
        stack.number for spec in chosen for stack in stacks(config.muon, spec.matrices, spec.shape)
    )
    size = sum(spec.size for spec in chosen)
    rest = sum(spec.size for spec in plan.trained) - size
    return f"{count:,} matrices of {size:,} parameters; by Adam {rest:,}"


def schedule_text(config: Config, plan: Plan) -> str:
    """Warm-up, peak, decay and floor of the learning rate."""
    o = config.optimizer
    by_samples = config.training.train_iters is None
    unit = "sample" if by_samples else "iteration"
    horizon = (
        o.lr_decay_samples or config.training.train_samples
        if by_samples
        else o.lr_decay_iters or plan.train_iters
    )
    if o.lr_warmup_fraction is not None:
        warmup = f"{o.lr_warmup_fraction:g} of the decay"
    else:
        length = o.lr_warmup_samples if by_samples else o.lr_warmup_iters
        warmup = _count(length, unit) if length else ""
    text = f"{o.lr:g}"
    if o.lr_decay_style == "constant":
        text += ", constant"
    elif o.lr_decay_style == "inverse-square-root":
        text += f", inverse-square-root decay, at least {o.min_lr:g}"
    elif o.lr_decay_style == "WSD-S":
        ends = (o.lr_wsd_decay_end_samples if by_samples else o.lr_wsd_decay_end_iters) or ()
        text += f", WSD-S decays to {o.min_lr:g} at {unit}s " + ", ".join(
            f"{end:,}" for end in (*ends, horizon)
        )
    elif o.lr_decay_style == "power":
        text += (
            f" or {o.lr_power_amplitude * plan.batch.final_global_batch_size:g} x tokens^"
            f"{o.lr_power_exponent:g}, decay to {o.min_lr:g} at {unit} {horizon:,}"
        )
    else:
        text += f", {o.lr_decay_style} decay to {o.min_lr:g} at {unit} {horizon:,}"
    return f"{text}; warm-up {warmup}" if warmup else f"{text}; no warm-up"


def memory_text(config: Config, plan: Plan) -> str:
    """An estimate of what the fullest rank holds."""
    most = fit.fullest(config, plan).kinds
    total = sum(most.values())
    size, unit = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    shares = ", ".join(f"{name} {n / size:.2f}" for name, n in most.items() if n)
    return f"~{total / size:.2f} {unit} per rank: {shares}"


def checkpoint_text(config: Config) -> str:
    """Where checkpoints are written, and how often."""
    c = config.checkpoint
    if not c.save or config.training.skip_train:
        return "no checkpoint will be saved" + ("" if c.save else " (no --save)")
    often = (
        f"every {_count(c.save_interval, 'iteration')} and at the end"
        if c.save_interval
        else "at the end"
    )
    keeping = f", keeping the last {c.keep_last}" if c.keep_last else ""
    return f"saved to {c.save} {often}{keeping}"


def changed_arguments(config: Config) -> list[str]:
    """The flags that differ from their defaults, several per line, with the shell's quoting and
    continuation."""
    return wrapped_flags(to_args_text(config, leave_out=("local_rank",)).splitlines())


def wrapped_flags(flags: Sequence[str]) -> list[str]:
    """Flags with their values in lines of at most 100 columns, where they fit, that can be pasted
    into a shell."""
    lines: list[str] = []
    for flag in flags:
        if lines and len(lines[-1]) + 1 + len(flag) + 2 <= WIDTH:
            lines[-1] += f" {flag}"
        else:
            lines.append(f"   {flag}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def noted(notes: Sequence[str]) -> list[str]:
    """Notes and warnings under one label."""
    return [" notes", *(_wrapped(text, "   ", "     ") for text in notes)] if notes else []
