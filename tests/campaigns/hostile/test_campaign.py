"""Damaged and hostile files of every kind, by the thousand: each is refused with a message or read,
and nothing else happens.

No exception but the documented ones, no more than 10 s and 2 x the file + 500 MB, no program
started, nothing written outside, and no content accepted that a checksum shows to be another, or
that a second reader understands otherwise. One seed makes one input:
`tests.campaigns.hostile.campaign.one_input`.
"""

import importlib
import multiprocessing
import os
from pathlib import Path

import pytest

from tests.campaigns.hostile.forged import gadget
from tests.forkrun import ROOT, run_ranks

QUICK = 5  # damaged inputs of each kind
COUNTS = [
    pytest.param(QUICK, 0, id="quick", marks=pytest.mark.campaign),
    *(pytest.param(3000, part, id=f"3000-{part}", marks=pytest.mark.sweep) for part in range(4)),
]


def attack(rank: int, world: int, home: str, count: int, part: int):
    """One quarter of the kinds (`part`) for a campaign, all of them in few inputs."""

    from tests.campaigns.hostile import kinds, run_kinds, tool_kinds
    from tests.campaigns.hostile.campaign import run

    os.environ["CANARY"] = str(Path(home) / "canary")
    os.environb[b"HOSTILE_PAYLOAD"] = gadget(0)
    multiprocessing.current_process().daemon = False  # preprocess_data.py has workers
    os.fsync = lambda _: None
    folder = Path(home) / "cases"
    folder.mkdir()
    rooms = [*ROOT.glob("tests/features/*/hostile_kinds.py")]
    rooms += ROOT.glob("addons/**/hostile_kinds.py")
    features = [
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for path in sorted(rooms)
    ]
    every = [kind for each in (kinds, run_kinds, tool_kinds, *features) for kind in each.KINDS]
    found = [kind for kind in every if kind.runs_here()]
    return run(found if count == QUICK else found[part::4], count, folder)


@pytest.mark.parametrize(("count", "part"), COUNTS)
def test_every_file_is_read_or_refused(memory_path, count, part):
    counts, bad = run_ranks(1, attack, str(memory_path), count, part, seconds=3600)[0]
    for kind, outcomes in counts.items():
        print(f"{kind}: {outcomes}")
    assert not bad, "\n".join(
        [f"{len(bad)} of {sum(sum(c.values()) for c in counts.values())}", *bad[:20]]
    )
