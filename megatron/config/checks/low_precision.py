"""Rules of gradients and Adam moments in 16 bits, as in Megatron unless noted."""

from collections.abc import Iterator

from megatron.config.checks.facts import Facts

MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
# Below this share a change of the second moment can be rounded away: half the distance of two
# neighbouring numbers of the format (fp16 stores the root, whose change is half as large).
_SMALLEST_CHANGE = {"bfloat16": 2.0**-8, "float16": 2.0**-10}


def rule(f: Facts) -> Iterator[str]:
    """One line for each rule that these flags break."""
    if f["bf16"] and f["main_grads_dtype"] == "bf16" and f["accumulate_allreduce_grads_in_fp32"]:
        yield (
            f"{f.say('main_grads_dtype')} and --accumulate-allreduce-grads-in-fp32: two dtypes of "
            "the same gradients; give only one of them [flags-exclude-each-other]"
        )
    for name in MOMENTS:
        if f[name] == "fp16" and f.ok("clip_grad") and not 0.0 < f["clip_grad"] <= 1.0:
            yield (
                f"{f.say(name)}: needs --clip-grad above 0 and at most 1, since larger gradients "
                f"can exceed the range of fp16; use bf16 instead of fp16, or such a --clip-grad "
                "[flag-needs-other-flag]"
            )


def notes(f: Facts) -> Iterator[str]:
    """What takes more memory than requested, and a second moment that cannot decay."""
    for name in MOMENTS:
        if f[name] == "fp8":
            yield (
                f"{f.say(name)}: stored in bf16, 2 bytes per parameter instead of 1 "
                "[more-memory-than-requested]"
            )
    if f["use_precision_aware_optimizer"] and f["bf16"]:
        yield (
            "--use-precision-aware-optimizer: main weights are stored in fp32, 4 bytes per "
            "parameter; Megatron-LM stores only the 2 that bf16 weights lack "
            "[more-memory-than-requested]"
        )
    stored = f.config.optimizer.moment_dtypes.get("exp_avg_sq")
    if stored and f.ok("adam_beta2"):
        grows = f["adam_beta2_schedule_c"] > 0.0
        if grows or 1.0 - f["adam_beta2"] < _SMALLEST_CHANGE[stored]:
            beta2 = "--adam-beta2-schedule-c" if grows else f.say("adam_beta2")
            yield (
                f"{f.say('exp_avg_sq_dtype')}: with {beta2} a step changes the second moment by "
                "less than its dtype resolves, so that it cannot decay; use --adam-beta2 0.99 or "
                "less, or --exp-avg-sq-dtype fp32 [second-moment-cannot-decay]"
            )
