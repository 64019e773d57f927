"""What a step sends where largest attention scores are recorded, in layouts of several ranks."""

import pytest

from tests.core.parity.layouts import CP, FULL, MLA, SELECTIVE, TP
from tests.core.parity.test_communication import Case, check, data  # noqa: F401

pytestmark = pytest.mark.campaign
CASES = {
    "cp2, latent attention, QK-clip, full recompute": Case(
        2, (CP, "2", *MLA, "--qk-clip", *FULL), {}
    ),
    "cp2 tp2, all_gather, GQA, largest scores, core again": Case(
        4,
        (
            *(CP, "2", TP, "2", "--cp-comm-type", "all_gather", "--group-query-attention"),
            *("--num-query-groups", "2", "--log-max-attention-logit", *SELECTIVE),
        ),
        {},
    ),
    "cp4 tp2, a2a, one shared query group, largest scores, core again": Case(
        8,
        (
            *(CP, "4", TP, "2", "--cp-comm-type", "a2a", "--group-query-attention"),
            *("--num-attention-heads", "8", "--num-query-groups", "2"),
            *("--log-max-attention-logit", *SELECTIVE),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_what_was_worked_out(name, tmp_path, data):  # noqa: F811
    check(CASES[name], tmp_path / "run", data)
