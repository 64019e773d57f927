"""Rules of the length of a run, its batch size, learning rate and weight decay."""

from collections.abc import Iterator

from megatron.config.checks import batch as check_batch
from megatron.config.checks.facts import Facts
from megatron.config.optimizer import ANNEALED


def length_and_batch(f: Facts) -> Iterator[str]:
    """Length, batch and what counts in iterations or in samples."""
    if f["train_iters"] is not None and f["train_samples"] is not None:
        yield (
            f"{f.say('train_iters')} and {f.say('train_samples')}: two lengths of the same run; "
            "give only one of them [two-run-lengths]"
        )
    else:
        samples = f["train_samples"] is not None
        unit, other_unit = ("samples", "iters") if samples else ("iters", "samples")
        for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay", "lr_wsd_decay_end"):
            if (samples or f["train_iters"] is not None) and f[f"{stem}_{other_unit}"]:
                yield (
                    f"{f.say(f'{stem}_{other_unit}')}: the run is counted by --train-{unit}; use "
                    f"--{stem.replace('_', '-')}-{unit} [schedule-in-other-unit-than-run]"
                )
    if f["lr_warmup_fraction"] is not None:
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if f[name]:
                yield (
                    f"{f.say(name)} and {f.say('lr_warmup_fraction')}: two warm-ups; give only "
                    "one of them [two-warmups]"
                )
    if f.ok(*check_batch.SIZES) and not f.bad & {"global_batch_size", "seq_length"}:
        yield from check_batch.batch(f)


def learning_rate(f: Facts) -> Iterator[str]:
    """Learning rate and weight decay."""
    for name, peak in (
        ("min_lr", "lr"),
        ("lr_warmup_init", "lr"),
        ("lr_warmup_init", "decoupled_lr"),
        ("decoupled_min_lr" if f["decoupled_min_lr"] is not None else "min_lr", "decoupled_lr"),
    ):
        if f.ok(peak, name) and f[name] > f[peak]:
            yield f"{f.say(name)}: greater than {f.say(peak)}; use at most that [lr-above-peak]"
    unit = "iters" if f["train_samples"] is None else "samples"
    horizon = f"lr_decay_{unit}" if f[f"lr_decay_{unit}"] is not None else f"train_{unit}"
    if f.ok(horizon):
        yield from _warm_up(f, unit, horizon)
        yield from _wsd(f, unit, horizon)
    yield from _weight_decay(f)


def _warm_up(f: Facts, unit: str, horizon: str) -> Iterator[str]:
    """The warm-up, which follows --lr-init-iters, must end before the decay does."""
    fraction = f["lr_warmup_fraction"] is not None
    name = "lr_warmup_fraction" if fraction else f"lr_warmup_{unit}"
    if not f.ok(name, "lr_init_iters"):
        return
    warmup = f[name] * f[horizon] if fraction else f[name]
    end = f"must be less than {f.say(horizon)}, the end of the decay [lr-warmup-too-long]"
    if warmup >= f[horizon]:
        yield f"{f.say(name)}: {end}"
    elif f["lr_init_iters"] and warmup + _init(f, unit) >= f[horizon]:
        yield f"{f.say(name)}: with {f.say('lr_init_iters')} {end}"


def _init(f: Facts, unit: str) -> int:
    """--lr-init-iters in iterations or samples; 0 where the batch has problems of its own."""
    if unit == "iters":
        return f["lr_init_iters"]
    schedule = check_batch.schedule_of(f)
    return f["lr_init_iters"] * schedule.final_global_batch_size if schedule else 0


def _wsd(f: Facts, unit: str, horizon: str) -> Iterator[str]:
    if f["lr_decay_style"] not in ANNEALED:
        return
    for name in ("min_lr", "decoupled_min_lr"):
        if f["lr_wsd_decay_style"] == "inverse" and f[name] == 0:  # its rate is never 0
            yield (
                f"{f.say('lr_wsd_decay_style')}: cannot reach 0; give {f.flags[name].spelling} "
                "above 0 [wsd-inverse-decay-to-zero]"
            )
    wsd = f"lr_wsd_decay_{unit}"
    if f[wsd] is None:
        yield (
            f"{f.say('lr_decay_style')}: needs the length of its anneal; give "
            f"{f.flags[wsd].spelling} [flag-missing]"
        )
    elif f.ok(wsd) and f[wsd] > f[horizon]:
        yield (
            f"{f.say(wsd)}: longer than {f.say(horizon)}, the whole schedule; use at most "
            "that [wsd-decay-too-long]"
        )
    elif f["lr_decay_style"] == "WSD-S":
        yield from _decay_ends(f, unit, horizon)


def _decay_ends(f: Facts, unit: str, horizon: str) -> Iterator[str]:
    """Each decay of WSD-S begins after the warm-up and after the decay before it."""
    length, ends = f"lr_wsd_decay_{unit}", f"lr_wsd_decay_end_{unit}"
    if f[ends] is None:
        yield (
            f"{f.say('lr_decay_style')}: needs the {'iterations' if unit == 'iters' else unit} at "
            f"which its earlier decays end; give {f.flags[ends].spelling} [flag-missing]"
        )
        return
    warmup = f"lr_warmup_{unit}"
    if not f.ok(length, ends, warmup):
        return
    fraction = f["lr_warmup_fraction"]
    before = f[warmup] if fraction is None else fraction * f[horizon]
    before += _init(f, unit)
    phase = "the end of the warm-up"
    for end in (*f[ends], f[horizon]):
        if end - f[length] < before:
            yield (
                f"{f.say(ends)}: the decay over {f.say(length)} that ends at {end} begins before "
                f"{before:.0f}, {phase}; let the ends rise by at least its length "
                "[wsd-decays-overlap]"
            )
            return
        before, phase = end, "the end of the decay before it"


def _weight_decay(f: Facts) -> Iterator[str]:
    ends = ("start_weight_decay", "end_weight_decay")
    constant = f["weight_decay_incr_style"] == "constant"
    for name in ends:
        if constant and f[name] is not None:
            yield (
                f"{f.say(name)}: weight decay is constant; use --weight-decay, or "
                "--weight-decay-incr-style linear or cosine [weight-decay-is-constant]"
            )
        elif not constant and f[name] is None:
            yield (
                f"{f.flags[name].spelling} is missing: {f.say('weight_decay_incr_style')} "
                "needs start and end [flag-missing]"
            )
    if not constant and f.ok(*ends) and f[ends[0]] > f[ends[1]]:
        yield (
            f"{f.say(ends[0])}: greater than {f.say(ends[1])}; weight decay can only rise "
            "[weight-decay-decreases]"
        )
