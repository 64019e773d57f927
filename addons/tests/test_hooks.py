"""The order of the hooks with all features on: that of the table of docs/design.md."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from megatron.training import hooks
from megatron.training.feature import Loop, features_of
from megatron.training.hook import Hook
from megatron.training.hooks import placed
from tests.core.training.tiny_run import make_run
from tests.forkrun import ROOT


class Named(Hook):
    """What `build_hooks` is given."""


Skipping, Evaluation, SavePolicy = (
    type(name, (Named,), {}) for name in ("Skipping", "Evaluation", "SavePolicy")
)


def test_the_order_is_that_of_the_table(tmp_path):
    """All features on: the order of docs/design.md, which gives the reasons."""
    run = make_run(
        manual_gc=True,
        control_file=str(tmp_path / "control"),
        log_straggler=True,
        gpu_sniff_test_interval=1,
        check_weight_hash_across_dp_replicas_interval=1,
        data_ledger=str(tmp_path / "ledger"),
        profile=True,
        spike_action="rewind",
        save=str(tmp_path / "save"),
        save_interval=5,
        save_hf_interval=5,
        verify_step_interval=2,
        phase_transition_iterations="2",
        ema_decay=0.9,
    )
    run.services.signals.monitor = SimpleNamespace(limits=None)
    core = hooks.build_hooks(run, None, Evaluation(), SavePolicy(), Skipping())
    lines = SimpleNamespace(writers=[SimpleNamespace(takes_points=True)])
    loop = Loop(run, None, lines, 0.0, None)
    of_features = [hook for each in features_of(run.config) for hook in each.hooks(loop)]
    kinds = [type(hook).__name__ for hook in placed(core, of_features)]
    table = (ROOT / "docs" / "design.md").read_text().partition("| hook |")[2].partition("\n\n")[0]
    names = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row[:40])]
    assert len(kinds) >= 9 and kinds == [name for name in names if name in kinds]
    assert Path(tmp_path / "control").read_text() == "0\n"
