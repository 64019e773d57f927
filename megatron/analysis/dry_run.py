"""--dry-run: the plan, what would be read of which data set, the kernels, and what features add."""

from megatron import launcher, log
from megatron.config.checks.rules import WOULD_STOP
from megatron.config.command_line import CommandLine, refuse
from megatron.config.plan import fit, tables
from megatron.config.plan.plan import Plan
from megatron.data.plan_table import plan_table, validation_note
from megatron.data.request import DataRequest
from megatron.data.tokenizers.planned import planned_vocabulary
from megatron.training import preflight
from megatron.training.feature import data_source, features_of
from megatron.training.script_step import as_batch_step


def report(line: CommandLine) -> None:
    """Print all of it on rank 0. Exits as `preflight.check_dry` does; raises as they do."""
    if line.rank:
        return
    plan = tables.print_plan(line, planned_vocabulary(line.config.data))
    if line.script.model_provider:
        log.print_line(
            "model: what model_provider returns; a dry run does not call it, all figures are those "
            "of the GPT of the flags",
        )
    limit = line.config.training.device_memory
    fits, text = True, ""
    if limit is not None:
        fits, text = fit.verdict(line.config, plan, int(limit * fit.GIB))
        if fits:
            log.print_line(f"memory: {text}")
    lines, problems = _data_lines(line, plan)
    log.print_line("\n".join(lines))
    if not problems:
        order, problems = _order_line(line, plan)
        if order:
            log.print_line(f"order of the data: {order}")
    log.print_line("\n".join(_kernel_lines(line)))
    preflight.check_dry(line, plan, problems)
    step = as_batch_step(line.script)
    for feature in features_of(line.config):
        for row in feature.dry_run(line, plan, step):
            log.print_line(row)
    stops = sum(note.startswith(WOULD_STOP) for note in line.notes)
    if stops:
        log.print_line(
            f"on this machine a real run would stop ({stops} line{'s' * (stops > 1)} at the top); "
            "the plan needs none of these files, and the exit code is 0",
        )
    if not fits:
        refuse([f"--device-memory {limit:g}: {text} [not-enough-memory]"], launcher.info())


def _data_lines(line: CommandLine, plan: Plan) -> tuple[list[str], list[str]]:
    """The table of the data, if they are on this machine, and what a run would end with there."""
    if line.script.datasets_provider:
        return [
            "data: what train_valid_test_datasets_provider returns; a dry run does not call it"
        ], []
    data = line.config.data
    targets = plan.targets
    valid = None if data.full_validation and targets.valid else targets.valid
    try:
        request = DataRequest(
            sizes=(targets.train, valid, targets.test),
            sequence_length=line.config.model.seq_length,
            micro_batch_size=line.config.training.micro_batch_size,
            global_batch_size=plan.batch.final_global_batch_size,
        )
        rows = data_source(line.config).plan_rows(data, request)
    except (ValueError, OSError) as error:
        if isinstance(error, ValueError) and not _elsewhere(line, error):
            return ["data: a run would end with the error below"], [str(error)]
        return [f"data: cannot be read on this machine: {error}"], []
    return ["data:", *plan_table(rows), *validation_note(rows)] if rows else [
        "data: mock data (--mock-data)"
    ], []


def _order_line(line: CommandLine, plan: Plan) -> tuple[str, list[str]]:
    """How the order of a resumed run's data compares with the checkpoint's, and what the run would
    end with there."""
    state = preflight.resumed_state(line)
    saved = {} if state is None else state.data.get("order") or {}
    if state is None or not saved or line.config.training.skip_train:
        return "", []
    if line.script.datasets_provider:
        return "not compared with the checkpoint's: the data are the script's own", []
    try:
        from megatron.training.build_data import order_change, planned_order

        tokenizer = preflight.build_tokenizer(line.config)
        order = planned_order(line.config, plan, tokenizer, saved, state.consumed_train_samples)
    except (ImportError, ValueError, OSError) as error:
        return f"cannot be compared with the checkpoint's on this machine: {error}", []
    try:
        warning = order_change(line.config, saved, order, state.iteration)
    except ValueError as error:
        return "a run would end with the error below", [str(error)]
    return f"WARNING: {warning}" if warning else "that of the checkpoint", []


def _elsewhere(line: CommandLine, error: ValueError) -> bool:
    """Whether data cannot be read because a file of theirs is not on this machine."""
    stops = [note for note in line.notes if note.startswith(WOULD_STOP)]
    missing = any("[data-" in note or str(error) in note for note in stops)
    return missing or isinstance(error.__cause__, OSError)


def _kernel_lines(line: CommandLine) -> list[str]:
    """Which kernels a run would use here. It needs torch, which the plan does not."""
    try:
        from megatron.training.logging.preamble import kernel_lines

        return kernel_lines(line.config)
    except (ImportError, ValueError) as error:
        return [f"kernels: not known on this machine: {error}"]
