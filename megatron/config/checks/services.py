"""Rules of skipped iterations."""

from megatron.config.checks.batch import schedule_of
from megatron.config.checks.facts import Facts


def skipped(f: Facts) -> list[str]:
    """Skipped iterations that cannot be read."""
    return read_skips(f)[0]


def read_skips(f: Facts) -> tuple[list[str], list[str]]:
    """(problems, warnings) of the iterations to skip."""
    if f["train_range_to_skip"] is None and f["iterations_to_skip"] is None:
        return [], []
    from megatron.config.skip_flags import parse_skips

    iterations = f["train_iters"] if f.ok("train_iters") else None
    schedule = schedule_of(f)
    if schedule and f.ok("train_samples"):
        iterations = schedule.train_iters_from_samples(f["train_samples"])
    try:
        skips = parse_skips(
            f["train_range_to_skip"],
            iterations,
            iterations_to_skip=f["iterations_to_skip"],
            samples_in=schedule.samples_in if schedule else None,
            seq_length=f["seq_length"],
        )
    except ValueError as error:
        return str(error).split("\n"), []
    return [], [f"WARNING: {line}" for line in skips.warnings] + skips.infos
