"""Bugs planted into what a run does about spikes; the test named beside each must fail on a copy that has it."""
from __future__ import annotations

import pytest

from tests.planted.bugs import Bug, applies, caught

ACTIONS, POLICY = "tests/spikes/test_actions.py", "megatron/training/spike_policy.py"
POLICIES = "tests/spikes/test_policy.py"
T15 = f"{ACTIONS}::test_t15_rewind_from_memory_is_the_run_started_again[async save, a worker]"
T16 = f"{ACTIONS}::test_t16_a_nan_gradient_or_a_spike_changes_nothing"
NOT_ADMITTED = "                self._release_gradients()\n                return StepResult(False, norm, None)\n"
QUICK = {
    "an update that is multiplied by zero instead of left out": Bug(
        "megatron/optimizer/optimizer.py", NOT_ADMITTED, "                factor = 0.0\n", f"{T16}[adam]"),
    "moments that decay in an update that is left out": Bug(
        "megatron/optimizer/optimizer.py", NOT_ADMITTED,
        "                [state['exp_avg'].mul_(0.9) for state in self.inner.state.values()]\n" + NOT_ADMITTED,
        f"{T16}[adam]"),
    "a loss scale that counts an update that is left out": Bug(
        "megatron/optimizer/optimizer.py", NOT_ADMITTED,
        "                self.grad_scaler and self.grad_scaler.update(found_inf)\n" + NOT_ADMITTED,
        f"{T16}[fp16 with its scale]"),
    "a norm that is not measured without clipping": Bug(
        "megatron/optimizer/optimizer.py", "self.clip_grad > 0.0 or admit:\n            with",
        "self.clip_grad > 0.0:\n            with",
        f"{T16}[no clipping]"),
    "a flagged value that enters the window": Bug(
        "megatron/training/spikes.py", 'if kind not in ("loss", "grad-norm"):', "if True:",
        "tests/spikes/test_detector.py::test_t13_every_iteration_of_a_cluster_is_found"),
    "a detector that goes on from its own state": Bug(
        POLICY, 'self._detector.load_state_dict(state["detector"])', "pass",
        f"{POLICIES}::test_its_state_goes_through_json_and_on_and_an_empty_one_is_a_fresh_start"),
    "a range that does not begin before its first mark": Bug(
        POLICY, "start, end = (row.mark - 1,", "start, end = (row.mark,",
        f"{POLICIES}::test_what_is_skipped_begins_before_the_first_mark_and_ends_after_the_last"),
    "a state that changes while a save is under way": Bug(
        "megatron/training/spikes.py", 'return {"loss": list(self._loss.values)', 'return {"loss": self._loss.values',
        f"{POLICIES}::test_a_state_that_was_given_does_not_change"),
}
RUNS = {
    "a schedule that adds up what it goes back to": Bug(
        "megatron/optimizer/scheduler.py", "self.num_steps = 0\n        self.step(_first", "self.step(_first", T15),
    "samples that are not opened anew": Bug(
        "megatron/training/loop.py", "                        samples = self.open_training_samples()\n", "", T15),
    "a copy without the optimizer": Bug(
        "megatron/training/rewind.py", "[tensor for *_, own in checkpointing.own_tensors(run) for _, tensor in own]",
        "[tensor for name, *_, own in checkpointing.own_tensors(run) for _, tensor in own if name[:4] != 'opti']", T15),
    "a step count that is not taken back": Bug(
        "megatron/training/checkpointing.py", "        run.optimizer.load_counters(state.optimizer)\n    else:",
        "        run.optimizer.step_count = state.optimizer['step']\n    else:", T15),
    "a detector that is not taken back": Bug(
        "megatron/training/checkpointing.py", "run.spikes.load_state_dict(state.spikes)", "pass", T15),
    "a copy made of what a spike has touched": Bug(
        "megatron/training/rewind.py", "for n in there if n < asked.start)", "for n in there if n <= asked.start)", T15),
    "checkpoints of what was left that a resume may find": Bug(
        "megatron/training/loop.py", "        self._past.put_aside()\n", "", T15),
    "a row of spikes that is charged one by one": Bug(
        POLICY, 'elif finding.kind == "non-finite":', "else:",
        f"{ACTIONS}::test_t17_a_lasting_shift_of_the_loss_ends_no_run"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name if number < 2 else pytest.param(name, marks=pytest.mark.sweep)
                                  for number, name in enumerate(QUICK)])
def test_a_planted_bug_of_an_action_is_caught(name, tmp_path):
    caught(QUICK[name], tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", RUNS)
def test_a_planted_bug_of_a_whole_run_is_caught(name, tmp_path):
    caught(RUNS[name], tmp_path)


def test_every_bug_still_applies():
    assert [name for name, bug in (QUICK | RUNS).items() if not applies(bug)] == []
