"""From the values of an InternLM config to this suite's flags: each key has one rule here; a key
without one is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .sections import Args, Section

DTYPES = {
    "torch.float16": ["--fp16"],
    "torch.half": ["--fp16"],
    "torch.bfloat16": ["--bf16"],
    "torch.float32": [],
    "torch.tf32": ["--tf32"],
}
CONTENTS = ("model", "sampler", "optimizer", "scheduler", "all")
# ckpt_type -> the converter's command
CHECKPOINT_TYPES = {
    "internlm": "internlm-import",
    "internevo": "internlm-import",
    "hf": "hf-import",
    "hf_llama": "hf-import",
}
MODELS = ("INTERNLM", "INTERNLM2_PUBLIC", "LLAMA2")  # model_type
INIT_STDS = tuple(
    f"{name}_init_std"
    for name in (
        "embedding",
        "attn_wqkv",
        "attn_other",
        "ffn_uplayer",
        "ffn_other",
        "out_head",
    )
)
SECTIONS = (
    "ckpt",
    "data",
    "grad_scaler",
    "hybrid_zero_optimizer",
    "loss",
    "adam",
    "lr_scheduler",
    "beta2_scheduler",
    "model",
    "parallel",
    "monitor",
)


def to_flags(values: Mapping[str, Any], world_size: int) -> Args:
    """The flags of a config for `world_size` ranks."""
    args = Args()
    sections = {}
    for name in SECTIONS:
        keys = values.get(name, {})
        if not isinstance(keys, Mapping):
            args.problems.append(f"{name} = {keys!r}: must be a dict")
            keys = {}
        sections[name] = Section(name, keys, args)
    for name in ("model", "data", "adam", "lr_scheduler"):
        if name not in values:
            args.problems.append(f"{name}: is missing; a config has this dict")
    kind = _top(values, args)
    dtype = _model(sections["model"], kind)
    layout = _parallel(sections["parallel"], world_size)
    _data(sections["data"], layout["dp"])
    _optimizer(sections, layout, dtype)
    _checkpoints(sections["ckpt"])
    monitor = sections["monitor"]
    alert = monitor.unread.get("alert")
    if isinstance(alert, Mapping) and alert.get("enable_feishu_alert"):
        monitor.refuse(
            "alert.enable_feishu_alert",
            True,
            "no alert is sent here; set it to False and let the scheduler report the exit code, "
            "which is not 0 when a run fails",
        )
    monitor.ignore("alert", why="no webhook here; logs and exit codes say what happened")
    monitor.ignore(
        "tensorboard", why="its queue has no counterpart; tensorboard_folder is --tensorboard-dir"
    )
    for section in sections.values():
        section.done()
    return args


def _top(values: Mapping[str, Any], args: Args) -> str:
    args.flag("--log-interval", 1, "--log-format internlm --log-accuracy")
    args.flag("--seed", 1024, why="train.py's own default")
    top = Section(
        "top level",
        {k: v for k, v in values.items() if k not in SECTIONS and not k.isupper()},
        args,
    )
    if top.switch("cudnn_deterministic", False):
        args.flag("--cudnn-deterministic")
    if top.switch("cudnn_benchmark", False):
        args.flag("--cudnn-benchmark")
    top.only("use_fp32_norm", False, "norms have the parameters' format here")
    kind = top.take("model_type", MODELS[0], lambda v: v in MODELS, f"one of {', '.join(MODELS)}")
    folder = top.text("tensorboard_folder")
    enabled = top.switch("enable_tb", True)
    if enabled and folder:
        args.flag("--tensorboard-dir", folder)
    elif enabled:
        args.note("enable_tb = True, InternLM's default: for TensorBoard add --tensorboard-dir DIR")
    top.ignore("resume_tb_folder", "metric_dtype", "grad_profiling", why="has no counterpart")
    top.done()
    return kind


def _model(model: Section, kind: str) -> str:
    newer = kind != MODELS[0]
    biases = not newer or not model.switch("no_bias", False)
    family = "Llama 2" if kind == "LLAMA2" else "InternLM2" if newer else "InternLM"
    where = "biases on attention alone" if biases else "no biases"
    model.args.section(f"Architecture: {family}'s, with {where}")
    hidden, layers, heads = (
        model.integer(key, default, 1)
        for key, default in (("hidden_size", 2048), ("num_layers", 48), ("num_attention_heads", 32))
    )
    model.flag("--num-layers", layers, "--hidden-size", hidden, "--num-attention-heads", heads)
    _mlp(model, hidden)
    norm = model.text("norm_type", "rmsnorm")
    model.flag(
        "--normalization",
        "RMSNorm" if norm == "rmsnorm" else "LayerNorm",
        "--norm-epsilon",
        float(model.number("layer_norm_epsilon", 1e-5)),
    )
    model.flag("--position-embedding-type rope --untie-embeddings-and-output-weights")
    model.flag("--disable-bias-linear", *["--add-qkv-bias --add-attention-output-bias"] * biases)
    model.only(
        "use_scaled_init",
        True,
        "only the layer-wise deviations are built in (--init-scheme internlm)",
    )
    model.flag("--init-scheme internlm2" if newer else "--init-scheme internlm")
    model.flag(
        "--tokenizer-type NullTokenizer --vocab-size",
        model.integer("vocab_size", 50304, 1),
        "--make-vocab-size-divisible-by 1",
        why="samples are tokens already; no padding",
    )
    model.flag(
        "--hidden-dropout",
        model.number("drop_rate", 0),
        "--attention-dropout",
        model.number("attn_drop_rate", 0),
    )
    scale = model.number("embed_grad_scale", 1)
    if scale != 1:
        model.flag("--embed-grad-scale", scale)
    dtype = _dtype_and_memory(model)
    if newer:
        _newer_model(model, kind, heads)
    else:
        if model.switch("qk_interleaved", False):
            model.flag("--rotary-interleaved")
        model.only(
            "num_kv_attention_heads",
            heads,
            "INTERNLM models have as many keys and values as num_attention_heads",
        )
    _without_flag(model)
    return dtype


def _mlp(model: Section, hidden: int) -> None:
    ratio = model.number("mlp_ratio", 4.0)
    model.only("use_swiglu", True, "InternLM's gelu MLP is not translated")
    if ratio == 8 / 3:
        model.flag("--swiglu --ffn-multiple-of", 256)
        return
    width = -(-int(hidden * ratio) // 256) * 256
    model.flag("--swiglu --ffn-hidden-size", width, why=f"mlp_ratio {ratio:g}")


def _dtype_and_memory(model: Section) -> str:
    """The dtype of weights and of residuals, what is recomputed, how many virtual stages."""
    dtype = model.take(
        "dtype", "torch.float16", lambda v: v in [*DTYPES], "one of " + ", ".join(DTYPES)
    )
    for word in DTYPES[dtype]:
        model.flag(word)
    if model.switch("residual_in_fp32", False):
        model.flag("--fp32-residual-connection")
    checkpoint = model.take(
        "checkpoint",
        False,
        lambda v: isinstance(v, bool | int | float) and 0 <= v <= 1,
        "True, False or a share between 0 and 1",
    )
    if checkpoint:
        model.flag("--recompute-fraction", float(checkpoint))
    chunks = model.integer("num_chunks", 1, 1)
    if chunks > 1:
        model.flag("--num-virtual-stages-per-pipeline-rank", chunks)
    return dtype


def _without_flag(model: Section) -> None:
    """Keys of models that no run here has, and those that change no number."""
    model.only("use_dynamic_ntk_rope", False, "is for inference")
    model.only("is_reward", False, "there is no reward head")
    model.only("num_experts", 1, "there are no experts")
    model.ignore("max_position_embeddings", why="the rotary table is as long as a sample")
    model.ignore(
        "embed_split_hidden",
        why="the table is split by vocabulary over tensor-parallel ranks: the same numbers",
    )
    model.ignore("parallel_output", why="logits stay split over tensor-parallel ranks")
    model.ignore("apply_post_layer_norm", "dropout_selective_checkpoint", why="changes no number")
    model.ignore("use_flash_attn", why="attention within samples is exact with every kernel")


def _newer_model(model: Section, kind: str, heads: int) -> None:
    """What InternLM2 and Llama 2 have beyond InternLM."""
    groups = model.integer("num_kv_attention_heads", heads, 1) or heads
    if groups != heads:
        model.flag("--group-query-attention --num-query-groups", groups)
    if not model.switch("adapt_hf", kind == "INTERNLM2_PUBLIC"):
        model.flag("--rotary-interleaved", why="adapt_hf=False: pairs of neighbours are rotated")
    base = model.number("rope_base", 10000)
    if base != 10000:
        model.flag("--rotary-base", base)
    for name in INIT_STDS:
        model.only(name, 0.02, "only the default is built in (--init-scheme internlm2)")
    model.only("init_type", "normal", "only normal initial values are built in")
    model.only("deepnorm", False, "is not built in")
    model.only("norm_head", False, "is not built in")


def _parallel(parallel: Section, world_size: int) -> dict[str, int]:
    """{"dp": data-parallel size, "zero": ranks that share one optimizer (1: each has all of it),
    "fsdp": do they share gradients and weights, too?}."""
    parallel.args.section(f"Layout of {world_size} ranks")

    sequence = parallel.switch("sequence_parallel", False)
    tensor, mode = _axis(parallel, "tensor")
    pipeline, _ = _axis(parallel, "pipeline")
    weight, _ = _axis(parallel, "weight")
    if weight > 1:
        parallel.refuse(
            "weight", weight, "weight parallelism (isp) is not built in; use tensor with mtp or msp"
        )
    parallel.flag(
        "--tensor-model-parallel-size",
        tensor,
        "--pipeline-model-parallel-size",
        pipeline,
        *["--sequence-parallel"] * (tensor > 1 and (sequence or mode == "msp")),
    )
    zero, fsdp = _zero(parallel)
    dp, remainder = divmod(world_size, tensor * pipeline)
    if remainder or not dp:
        parallel.args.problems.append(
            f"parallel: {world_size} ranks (--world-size) are not a multiple of tensor {tensor} x "
            f"pipeline {pipeline}; give the number of ranks of the run"
        )
        dp = 1
    zero = dp if zero <= 0 else min(zero, dp)
    if dp % zero:
        parallel.refuse("zero1", zero, f"the {dp} data-parallel ranks are not a multiple of it")
    if zero > 1:
        instances = ["--num-distributed-optimizer-instances", dp // zero] if zero < dp else []
        sharded = ["--use-distributed-optimizer"]
        if fsdp:  # torch's, which also gathers ahead
            sharded = ["--data-parallel-sharding-strategy optim_grads_params"]
            sharded += ["--overlap-grad-reduce", "--overlap-param-gather"]
        parallel.flag(*sharded, *instances)
    return {"dp": dp, "zero": zero, "fsdp": fsdp}


def _sized(parallel: Section, key: str, usual: int) -> tuple[int, Section]:
    """(size, what else is said of it) of a number or of a dict."""
    value = parallel.take(
        key,
        usual,
        lambda v: type(v) is int or isinstance(v, Mapping),
        "a number or a dict with a size",
    )
    inner = Section(f"parallel.{key}", value if isinstance(value, Mapping) else {}, parallel.args)
    return inner.integer("size", usual, -1) if isinstance(value, Mapping) else value, inner


def _axis(parallel: Section, key: str) -> tuple[int, str | None]:
    """(size, mode, which only tensor parallelism has)."""
    count, inner = _sized(parallel, key, 1)
    mode = inner.text("mode", "mtp") if key == "tensor" else None
    if mode not in (None, "mtp", "msp"):
        inner.refuse(
            "mode",
            mode,
            "only mtp and msp (Megatron's tensor and sequence parallelism) are built in",
        )
    inner.ignore(
        "interleaved_overlap",
        why="sends and receives of an interleaved pipeline overlap by default",
    )
    inner.ignore("overlap", "memory_pool", why="has no counterpart")
    inner.done()
    return max(1, count), mode


def _zero(parallel: Section) -> tuple[int, bool]:
    """(ranks that share one optimizer; 0 or less: all, whether they share everything)."""
    size, inner = _sized(parallel, "zero1", -1)
    fsdp = inner.switch("fsdp", False)
    inner.done()
    return size, fsdp


def _data(data: Section, dp: int) -> None:
    data.args.section("Data and batch")
    length = data.integer("seq_len", None, 1)
    micro = data.integer("micro_bsz", 1, 1)
    count = data.integer("micro_num", 1, 1)
    if length is None:
        data.args.problems.append(
            "data.seq_len: is missing; give the tokens of one attention segment"
        )
    data.flag("--seq-length", length, "--max-position-embeddings", length)
    data.flag(
        "--micro-batch-size",
        micro,
        "--global-batch-size",
        micro * count * dp,
        why=f"micro_bsz {micro} x micro_num {count} x {dp} data-parallel ranks",
    )
    data.flag("--packed-samples", *["--pack-into-one"] * data.switch("pack_sample_into_one", False))
    validation = _data_paths(data)
    steps = data.integer("total_steps", None, 1)
    if steps is None:
        data.args.problems.append("data.total_steps: is missing; give the steps of the run")
    data.flag("--train-iters", steps)
    _validation(data, validation)
    _skipped(data)
    _rampup(data)
    if gc := data.integer("empty_cache_and_diag_interval", 0):
        data.flag("--manual-gc --manual-gc-interval", gc)
    data.only("min_length_dict", {}, "lengths by file are not built in; use min_length")
    data.only("type", "tokenized", "only tokenized files are read")
    data.ignore(
        "packed_length", "gradient_accumulation", "batch_size", why="follows from the others"
    )
    data.ignore("diag_outlier_ratio", "num_worker", "seed", why="has no counterpart")
    data.ignore(
        "use_packed_dataset",
        "fixed_random_dataset_seqlen",
        why="is InternEvo's later key and has no counterpart",
    )
    data.ignore(
        "valid_pack_mode", why="validation rows are packed; the mean over tokens is the same"
    )
    data.ignore(
        "use_shm", "shm_path", why="indices are memory maps, which the ranks of a node share"
    )


def _data_paths(data: Section) -> str | None:
    """Where the samples are; the folder of the validation."""
    least = data.integer("min_length", 0)
    folder = data.text("train_folder")
    validation = data.text("valid_folder")
    if folder is None:
        data.flag(
            "--dummy-data internlm",
            why="no train_folder: the generated samples of the demos, short ones too",
        )
    else:
        if least:
            data.flag("--min-sample-length", least)
        data.flag("--train-data-path", folder)
        if validation:
            data.flag(
                "--valid-data-path",
                validation,
                "--multiple-validation-sets",
                why="each directory with .bin files has a validation of its own",
            )
    return validation


def _validation(data: Section, folder: str | None) -> None:
    every = data.integer("valid_every", 0)
    data.ignore(
        "valid_micro_num", why="a validation reads all of it, in batches of the training's size"
    )
    if every and folder:
        data.flag("--eval-interval", every, "--full-validation")
    else:
        data.flag(
            "--eval-iters", 0, why="no valid_folder: no validation" if every else "valid_every 0"
        )


def _rampup(data: Section) -> None:
    ramp = data.text("rampup_batch_size", "")
    if ramp:
        if len(ramp.split()) != 3 or not all(word.isdecimal() for word in ramp.split()):
            data.refuse(
                "rampup_batch_size",
                ramp,
                "must be three whole numbers: start, increment, steps of each",
            )
        else:
            data.flag("--rampup-micro-batches", *ramp.split())


def _skipped(data: Section) -> None:
    """skip_batches counts from 0, as the log of InternLM does; --train-range-to-skip counts from
    1."""
    text = data.text("skip_batches", "")
    if not text:
        return
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            data.refuse("skip_batches", text, f"{part!r} is neither a batch nor a range first-last")
            return
        ranges += [int(match[1]) + 1, int(match[2] or match[1]) + 1]
    data.flag("--train-range-to-skip", *ranges, why=f"batches {text}, which count from 0")


def _optimizer(sections: Mapping[str, Section], layout: Mapping[str, int], dtype: str) -> None:
    sections["adam"].args.section("Optimizer")
    _learning_rate(sections["adam"], sections["lr_scheduler"])
    _adam(sections["adam"], sections["beta2_scheduler"])
    smoothing = sections["loss"].number("label_smoothing", 0)
    if smoothing:
        sections["adam"].flag("--label-smoothing", smoothing)
    sections["loss"].ignore("moe_loss_coeff", why="there are no experts")
    zero = sections["hybrid_zero_optimizer"]
    sections["adam"].flag("--clip-grad", float(zero.number("clip_grad_norm", 0.0)))
    gradients = zero.switch("overlap_sync_grad", False) | zero.switch(
        "zero_overlap_communication", False
    )
    if gradients and layout["dp"] > 1 and not layout["fsdp"]:
        sections["adam"].flag("--overlap-grad-reduce")
    _zero_partition(zero, layout, gradients)
    if layout["fsdp"]:
        zero.ignore("reduce_bucket_size", why="fsdp reduces layer by layer")
    elif bucket := zero.integer("reduce_bucket_size", 0):
        sections["adam"].flag("--ddp-bucket-size", bucket)
    _scaler(sections["grad_scaler"], dtype)


def _learning_rate(adam: Section, rate: Section) -> None:
    adam.flag(
        "--lr",
        adam.number("lr", 1e-4),
        "--min-lr",
        rate.number("eta_min", 0.0),
        "--lr-decay-style cosine",
    )
    total = rate.integer("total_steps", None, 1)
    if total is None:
        adam.args.problems.append(
            "lr_scheduler.total_steps: is missing; give the steps of the whole schedule"
        )
        total = 1
    adam.flag("--lr-decay-iters", total)
    warmup = int(total * rate.number("warmup_ratio", 0.0))
    if warmup:
        adam.flag(
            "--lr-warmup-iters",
            warmup,
            "--lr-warmup-first-step",
            why="InternLM's first step has lr / warm-up",
        )
    if init := rate.integer("init_steps", 0):
        adam.flag("--lr-init-iters", init)
    rate.only("last_epoch", -1, "a schedule continues by --load, not from a number")


def _adam(adam: Section, beta2: Section) -> None:
    beta2_start = adam.number("adam_beta2", 0.95)
    adam.flag(
        "--adam-beta1",
        adam.number("adam_beta1", 0.9),
        "--adam-beta2",
        beta2.number("init_beta2", beta2_start),
        "--adam-eps",
        float(adam.number("adam_eps", 1e-8)),
    )
    c = beta2.number("c", adam.number("adam_beta2_c", 0))
    if c > 0:
        adam.flag("--adam-beta2-schedule-c", c)
    beta2.take("cur_iter", -1, lambda v: v in (-1, 0), "-1: the schedule continues by --load")
    adam.flag(
        "--weight-decay",
        adam.number("weight_decay", 0.01),
        "--apply-wd-to-all",
        why="norms and biases, too",
    )


def _zero_partition(zero: Section, layout: Mapping[str, int], gradients: bool) -> None:
    """Who has which optimizer state: overlap_sync_param chooses InternLM's rule."""
    if layout["zero"] <= 1 or layout["fsdp"]:
        why = "fsdp gathers ahead" if layout["fsdp"] else "goes with a zero1 of more than 1 alone"
        zero.ignore("overlap_sync_param", why=why)
    elif zero.switch("overlap_sync_param", False):
        zero.flag(
            "--zero-partition whole-params",
            why="overlap_sync_param: whole parameters in the model's order",
        )
        if gradients:
            zero.flag("--overlap-param-gather")
    else:
        zero.note(
            "optimizer state is split evenly; InternLM without overlap_sync_param gives out "
            "whole parameters by size"
        )
    zero.ignore(
        "use_split_tensor_optim",
        "all_gather_size",
        why="how InternEvo splits and gathers weights, no number",
    )


def _scaler(scaler: Section, dtype: str) -> None:
    fp16 = Section(
        "grad_scaler.fp16",
        scaler.take("fp16", {}, lambda v: isinstance(v, Mapping), "a dict"),
        scaler.args,
    )
    values = [
        ("--initial-loss-scale", fp16.number("initial_scale", 2**16)),
        ("--min-loss-scale", fp16.number("min_scale", 1)),
        ("--loss-scale-window", fp16.integer("growth_interval", 1000, 1)),
        ("--loss-scale-growth-factor", scaler.number("growth_factor", 2)),
        ("--loss-scale-backoff-factor", scaler.number("backoff_factor", 0.5)),
        ("--max-loss-scale", scaler.number("max_scale", 2**24)),
        ("--hysteresis", scaler.integer("hysteresis", 2, 1)),
    ]
    fp16.done()
    if DTYPES[dtype] == ["--fp16"]:
        scaler.flag(*(word for pair in values for word in pair))
    elif dtype == "torch.bfloat16":
        scaler.note(
            "grad_scaler: bf16 needs no loss scale; InternLM multiplies by one all the same"
        )


def _checkpoints(ckpt: Section) -> None:
    ckpt.args.section("Checkpoints")
    saves = ckpt.switch("enable_save_ckpt", True)
    save = _folder(ckpt, "save_ckpt_folder")
    every = ckpt.integer("checkpoint_every", 0)
    snapshot = _folder(ckpt, "snapshot_ckpt_folder")
    often = ckpt.integer("oss_snapshot_freq", 0)
    load_given = ckpt.switch("load_given_ckpt", False)  # the older name of auto_resume=False
    resume = ckpt.switch("auto_resume", not load_given)
    ahead = ckpt.switch("async_upload", False)
    if saves and save:
        if not every:
            ckpt.args.problems.append(
                "ckpt.checkpoint_every: is missing; give the steps between checkpoints"
            )
        ckpt.flag("--save", save, "--save-interval", every)
        if ahead and save.startswith("s3://"):
            ckpt.flag("--async-save")
        if snapshot and often > 1:
            ckpt.flag("--snapshot-interval", often, "--snapshot-dir", snapshot)
    else:
        ckpt.note("enable_save_ckpt is False: nothing is saved")
    if resume:
        if saves and save:
            ckpt.flag(
                "--load",
                save,
                why="auto_resume: resumes where the last run stopped, if there was one",
            )
        ckpt.ignore(
            "load_ckpt_info",
            "load_ckpt_folder",
            "load_model_only_folder",
            "load_optimizer",
            why="not read while auto_resume is on, as in InternLM (its default is True)",
        )
    else:
        _load(ckpt)
    if control := ckpt.text("stop_file_path"):
        ckpt.flag("--control-file", control)
    ckpt.ignore(
        "async_upload_tmp_folder",
        why="uploads are staged by the run itself",
    )
    ckpt.ignore(
        "enable_internevo2hf_ckpt",
        why="convert_checkpoint.py hf-export writes Hugging Face folders",
    )
    ckpt.ignore("universal_ckpt", why="every checkpoint here loads in every layout")


def _load(ckpt: Section) -> None:
    """What a run without auto_resume begins with: load_ckpt_info, else the older keys, as InternLM
    reads them."""
    info = ckpt.take(
        "load_ckpt_info", None, lambda v: v is None or isinstance(v, Mapping), "a dict"
    )
    folder, content, kind = _load_info(ckpt, info) if info is not None else _older_load(ckpt)
    if not folder:
        return
    model_only = set(content) == {"model"}
    if CHECKPOINT_TYPES[kind] == "hf-import" and not model_only:
        ckpt.args.problems.append(
            f"ckpt.load_ckpt_info.content = {content!r}: a checkpoint of type {kind} has weights "
            'alone; give ("model",)'
        )
    optimizer = bool({"all", "optimizer"} & set(content))
    ckpt.flag(
        "--load",
        folder,
        *["--finetune"] * model_only,
        *["--no-load-optim"] * (not model_only and not optimizer),
        "--exit-on-missing-checkpoint",
    )
    tool = CHECKPOINT_TYPES[kind]
    ckpt.note(
        "a checkpoint of another suite is converted first: python tools/convert_checkpoint.py "
        f"{tool} {folder} DIR, and --load DIR here"
        + " (--args FILE, this file, converts the optimizer too)"
        * (tool == "internlm-import")
    )


def _load_info(ckpt: Section, info: Mapping[str, Any]) -> tuple[str | None, Sequence[str], str]:
    """(folder, what of it is loaded, its type) of load_ckpt_info."""
    inner = Section("ckpt.load_ckpt_info", info, ckpt.args)
    folder = _folder(inner, "path")
    content = inner.take(
        "content",
        ("all",),
        lambda v: isinstance(v, list | tuple) and all(part in CONTENTS for part in v),
        f"some of {', '.join(CONTENTS)}",
    )
    kind = inner.take(
        "ckpt_type",
        "internlm",
        lambda v: v in [*CHECKPOINT_TYPES],
        f"one of {', '.join(CHECKPOINT_TYPES)}; convert others to a Hugging Face folder first",
    )
    inner.done()
    ckpt.ignore(
        "load_ckpt_folder",
        "load_model_only_folder",
        "load_optimizer",
        why="load_ckpt_info counts more",
    )
    return folder, content, kind


def _older_load(ckpt: Section) -> tuple[str | None, Sequence[str], str]:
    """The same of load_ckpt_folder, load_model_only_folder and load_optimizer."""
    folder = _folder(ckpt, "load_ckpt_folder")
    weights = _folder(ckpt, "load_model_only_folder")
    content: tuple[str, ...] = ("model", "sampler")
    if ckpt.switch("load_optimizer", True):
        content = ("model", "optimizer")
    if folder and weights:
        ckpt.args.problems.append(
            "ckpt.load_ckpt_folder and ckpt.load_model_only_folder: InternLM takes one of "
            "them; remove the other"
        )
    if weights:
        folder = weights
        content = ("model",)
    return folder, content, "internlm"


def _folder(section: Section, key: str) -> str | None:
    """A folder without InternLM's prefix of a backend; s3 keeps its own."""
    value = section.text(key)
    if not value:
        return None
    backend, colon, path = value.partition(":")
    if value.startswith("s3://") or not colon:
        return value
    if backend == "local":
        return path
    match = re.fullmatch(r"s3://([^./]+)\.([^/]+)(/.*)?", path)
    if backend != "boto3" or not match:
        section.refuse(key, value, "only local: and boto3:s3://bucket.address/path are translated")
        return None
    section.note(f"{key}: the endpoint was {match[2]}; set AWS_ENDPOINT_URL to it")
    return f"s3://{match[1]}{match[3] or ''}"
