"""--dry-run: the plan, and what would be read of which data set."""

from __future__ import annotations

from megatron.config.command_line import CommandLine
from megatron.config.plan import report
from megatron.config.plan.plan import Plan
from megatron.data.plan_table import plan_table
from megatron.data.request import DataRequest
from megatron.data.sources import source_of


def print_plan(line: CommandLine) -> Plan:
    """Print the plan, and the data if they are on this machine; returns the plan."""
    plan = report.print_plan(line)
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
        rows = source_of(data).plan_rows(data, request)
        lines = ["data:", *plan_table(rows)] if rows else ["data: mock data (--mock-data)"]
    except (ValueError, OSError) as error:
        lines = [f"data: cannot be read on this machine: {error}"]
    print("\n".join(lines), flush=True)
    return plan
