"""The teacher as flags and files tell of it, without torch: its configuration in this run's layout,
what is wrong with it, and its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint import state_reader
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.state import RunState
from megatron.config import saved_flags
from megatron.config.checkpoint import is_url
from megatron.config.checks.facts import Facts
from megatron.config.load_order import newest_with_good_args
from megatron.config.model import ModelConfig
from megatron.config.plan.costs import MicroBatchSizes
from megatron.config.plan.parameters import count_parameters, parameter_table
from megatron.config.plan.plan import BYTES, Plan, layer_split, rank_axes
from megatron.config.run_directory import ARGS, STATE, vouched_file
from megatron.config.tree import Config
from megatron.problems import Problems

from .settings import Settings

FLAG = "--export-kd-teacher-load"
FINAL_NORM = "decoder.final_layernorm"
# Of logits that the loss takes at a time, on a CPU and elsewhere.
BLOCKS = (1 << 18, 1 << 24)


class Saved(NamedTuple):
    """A checkpoint as its small files tell of it."""

    folder: Path
    config: Config
    state: RunState


def saved_in(path: str) -> Saved | None:
    """The checkpoint that a run directory or a path of one means; None where there is none that can
    be read here, of which the load says why."""
    folder = _folder(path)
    return _saved(folder, (folder / ARGS).stat().st_mtime_ns) if folder else None


def _folder(path: str) -> Path | None:
    folder = newest_with_good_args(path) if os.path.isdir(path) else None
    return folder if folder and (folder / ARGS).is_file() else None


@lru_cache(maxsize=8)
def _saved(folder: Path, changed: int) -> Saved | None:
    state = vouched_file(folder, STATE)
    try:
        if state is not None:
            config = saved_flags.read(folder / ARGS).config
            return Saved(folder, config, state_reader.parse(state, str(folder)))
    except (Problems, CheckpointError):
        pass
    return None


def missing(path: str) -> Iterator[str]:
    """What a run would not find."""
    if is_url(path):
        yield f"{FLAG} {path}: must be a directory; copy the checkpoint to one [kd-teacher-missing]"
    elif _folder(path) is None:
        yield (
            f"{FLAG} {path}: no checkpoint of this suite there; give a directory that --save "
            "named, or an iter_XXXXXXX in it; checkpoints of others: python "
            "tools/convert_checkpoint.py [kd-teacher-missing]"
        )


def as_teacher(config: Config, saved: Config) -> Config:
    """The configuration of the teacher in a run of `config`: its own architecture, by this suite's
    own kernels, in the run's dtype and layout, for the run's sequences; of MTP nothing."""
    m = saved.model
    types = config.model.cp_comm_type
    model = replace(
        m,
        seq_length=config.model.seq_length,
        max_position_embeddings=m.max_position_embeddings or m.seq_length,
        mtp_num_layers=None,
        hybrid_layer_pattern=m.hybrid_layer_pattern and m.hybrid_layer_pattern.split("/")[0],
        cp_comm_type=types if len(types) == 1 else ("p2p",),
    )
    return replace(
        config,
        model=model,
        precision=replace(config.precision, fp8=None),
        training=replace(config.training, torch_compile=False),
        kernels=replace(
            config.kernels,
            transformer_impl="local",
            cuda_graph_impl="none",
            enable_cuda_graph=False,
        ),
    )


def layer_names(model: ModelConfig, layers: range | None = None) -> set[str]:
    """Modules whose outputs are hidden states; of these layers, or all."""
    names = {FINAL_NORM}
    for number in range(model.num_layers) if layers is None else layers:
        layer = f"decoder.layers.{number}"
        names |= {layer, *(f"{layer}.{norm}" for norm in model.layer(number).norms)}
    return names


def problems(facts: Facts, path: str, settings: Settings) -> Iterator[str]:
    """One line for each reason why this run cannot learn from the teacher in `path`, or not so."""
    config = facts.config
    if settings.skip_lm_loss:
        for name in ("label_smoothing", "z_loss_coeff"):
            if facts[name]:
                yield (
                    f"{facts.say(name)}: is of the loss of the labels, which is not trained; omit "
                    "it, or give --export-kd-cfg with skip_lm_loss: false "
                    "[flags-exclude-each-other]"
                )
    if facts.bad or not facts.ok("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        return
    student = config.model
    yield from _student_layers(facts, settings)
    saved = saved_in(path)
    if saved is None:
        return
    teacher = as_teacher(config, saved.config).model
    told = f"{FLAG} {path}"
    yield from _vocabulary(told, config, saved)
    positions = teacher.max_position_embeddings or 0
    if teacher.positions != "none" and positions < student.seq_length:
        yield (
            f"{told}: it has {positions} positions, and {facts.say('seq_length')} is more; give a "
            "shorter one, or another teacher [kd-teacher-differs]"
        )
    names = layer_names(teacher)
    for pair in settings.pairs:
        if pair.teacher not in names:
            yield _no_layer(pair.teacher, "teacher")
    if settings.pairs and teacher.hidden_size != student.hidden_size:
        yield (
            f"{told}: --hidden-size {teacher.hidden_size}, and this run has "
            f"{student.hidden_size}: hidden states of other widths cannot be compared without a "
            "projection, which is not trained here; omit intermediate_layer_pairs "
            "[kd-teacher-differs]"
        )
    judged = Facts(as_teacher(config, saved.config), facts.world_size, ())
    for block in teacher.blocks:
        for line in block.refuses(judged):
            yield f"{told}: of the teacher {line}"


def _vocabulary(told: str, config: Config, saved: Saved) -> Iterator[str]:
    """Ids must be the same tokens."""
    from megatron.data.tokenizers.build import tokenizer_from

    try:
        now = tokenizer_from(config.data).identity()
    except (ValueError, OSError):  # is said elsewhere
        return
    trained = saved.state.data.get("tokenizer") or {}
    differ = {key for key in {*trained, *now} if trained.get(key) != now.get(key)}
    if trained and (differ := differ - {"files", "extends"}):
        which = ", ".join(f"{key} {trained.get(key)} and {now.get(key)}" for key in sorted(differ))
        yield (
            f"{told}: teacher and run have other tokenizers ({which[:300]}); a distribution over "
            "tokens can be learned in the same vocabulary alone; give the teacher's tokenizer "
            "[kd-teacher-differs]"
        )


def _student_layers(facts: Facts, settings: Settings) -> Iterator[str]:
    """Layers of the student whose outputs cannot be seen."""
    config = facts.config
    try:
        last = layer_split(config)[-1][-1]
    except ValueError:  # is another rule's
        return
    names = layer_names(config.model, last)
    inner = [pair.student for pair in settings.pairs if pair.student != FINAL_NORM]
    for name in (pair.student for pair in settings.pairs):
        if name not in layer_names(config.model):
            yield _no_layer(name, "student")
        elif name not in names:
            yield (
                f"--export-kd-cfg: {name} is not on the last stage of "
                f"{facts.say('pipeline_model_parallel_size')}, where the teacher is; give layers "
                f"{last.start} to {last.stop - 1}, or {FINAL_NORM} [kd-settings]"
            )
    for flag, hidden in (
        ("--torch-compile", facts["torch_compile"]),
        ("--recompute-granularity full", config.training.recomputed_runs(config.model.num_layers)),
    ):
        if hidden and inner:
            yield (
                f"{flag}: the output of {inner[0]}, which intermediate_layer_pairs of "
                f"--export-kd-cfg names, is not kept; give {FINAL_NORM}, or omit the flag "
                "[flags-exclude-each-other]"
            )


def _no_layer(name: str, whose: str) -> str:
    return (
        f"--export-kd-cfg: intermediate_layer_pairs: the {whose} has no {name[:80]} whose output "
        f"is a hidden state; give {FINAL_NORM}, decoder.layers.N or "
        "decoder.layers.N.input_layernorm (pre_mlp_layernorm) [kd-settings]"
    )


def memory(
    path: str, read_settings: Callable[[], Settings], config: Config, plan: Plan, stage: int
) -> int:
    """Bytes on a rank of a stage of the plan: of its weights, whole on each data-parallel rank, and
    of what is kept of a micro-batch's forward pass, its logits, which become their gradient, and
    hidden states. Beside them blocks of logits in wider dtype or, where labels are trained, too,
    the sum of both gradients."""
    saved = saved_in(path)
    if saved is None or stage != len(plan.layers_per_stage) - 1:
        return 0
    try:
        settings = read_settings()
    except ValueError:  # which the check has said
        settings = Settings()
    teacher = as_teacher(config, saved.config)
    sizes = MicroBatchSizes(teacher, plan)
    elements = sizes.tokens * sizes.vocab
    logits = elements * sizes.itemsize
    block = min(elements, max(BLOCKS[not config.training.on_cpu], sizes.vocab))
    more = max(4 * block * sizes.wide, 0 if settings.skip_lm_loss else logits)
    hidden = len(settings.pairs) * sizes.rows * sizes.hidden * sizes.itemsize
    return weight_bytes(teacher, plan) + logits + more + hidden


def weight_bytes(teacher: Config, plan: Plan) -> int:
    """Of its weights on a rank of the last stage."""
    table = parameter_table(teacher.model, plan.padded_vocab_size, plan.vocab_size)
    return count_parameters(table, rank_axes(teacher)) * BYTES[teacher.precision.params_dtype]


def flops(path: str, config: Config, plan: Plan) -> int:
    """Operations of its forward pass for a sample."""
    saved = saved_in(path)
    if saved is None:
        return 0
    from megatron.training.logging.flops import count_flops

    teacher = as_teacher(config, saved.config).model
    return count_flops(teacher, plan.padded_vocab_size).forward * teacher.seq_length


def described(path: str, nbytes: int, config: Config, plan: Plan) -> str:
    """A line about it, of which a rank has `nbytes`, for a dry run."""
    saved = saved_in(path)
    if saved is None:
        return f"teacher ({FLAG} {path}): not on this machine; the plan is without it"
    from megatron.training.logging.flops import flops_per_sample

    teacher = as_teacher(config, saved.config)
    size = count_parameters(parameter_table(teacher.model, plan.padded_vocab_size, plan.vocab_size))
    share = flops(path, config, plan) / flops_per_sample(config, plan)
    return (
        f"teacher ({FLAG} {path}): iteration {saved.state.iteration}, {size:,} parameters; "
        f"{nbytes:,} bytes per rank of the last stage, of them "
        f"{weight_bytes(teacher, plan):,} of weights; its forward pass is {100 * share:.0f} % of "
        "the FLOPs that TFLOP/s count"
    )
