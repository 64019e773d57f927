"""Rows of docs/parity.md: a run in stages in a layout against the same stages in one process."""

from pathlib import Path

from tests.core.parity.layouts import DISTRIBUTED, LLAMA, SP, TP, Case

STAGES = (*LLAMA, "--stages", str(Path(__file__).with_name("base_change.toml")))
CASES = {
    "tp2 sp, rotary base changed by a stage": Case(STAGES, 2, (TP, "2", SP), saves=True),
    "dp2, distributed optimizer, rotary base changed by a stage": Case(
        STAGES, 2, DISTRIBUTED, saves=True
    ),
}
