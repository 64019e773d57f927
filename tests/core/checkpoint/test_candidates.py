"""Which checkpoints a load tries, and which are removed."""

from megatron.checkpoint import retention, store
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.reading import Candidate, candidates
from megatron.config import run_directory
from tests.core.checkpoint.saves import assert_good, save
from tests.problems import assert_problem, raises


def steps(path, step=None, snapshots=()):
    """(run directory's name, iteration) of what is tried."""
    return [(one.path.rpartition("/")[2], one.step) for one in candidates(path, step, snapshots)[0]]


def test_from_the_trackers_down(tmp_path):
    for iteration in (10, 20, 30, 40):
        save(tmp_path, iteration)
    assert candidates(tmp_path) == ([Candidate(str(tmp_path), one) for one in (40, 30, 20, 10)], [])
    typed = f"{tmp_path.parent}/./{tmp_path.name}/"  # paths are shown as they are typed
    assert [one.path for one in candidates(typed)[0]] == [typed] * 4
    assert candidates(tmp_path, 20) == ([Candidate(str(tmp_path), 20)], [])
    one = tmp_path / "iter_0000030"
    assert candidates(one) == ([Candidate(str(one), None)], [])
    # gone back on purpose, or damaged: never forward, but said
    (tmp_path / store.TRACKER).write_text("20")
    found, problems = candidates(tmp_path)
    assert [one.step for one in found] == [20, 10]
    assert "iteration 40 " in problems[0] and "--ckpt-step 40" in problems[0]
    # is named, is not there: it is tried, which says why it fails
    (tmp_path / store.TRACKER).write_text("50")
    assert [one.step for one in candidates(tmp_path)[0]] == [50, 40, 30, 20, 10]


def test_a_damaged_or_missing_tracker_names_the_newest(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / store.TRACKER).unlink()
    found, [problem] = candidates(tmp_path)
    assert [one.step for one in found] == [20, 10]
    assert_problem(problem, "checkpoint-tracker-missing", str(tmp_path / store.TRACKER), 20)
    # of a slot it was removed first: the rest is what an interrupted removal left
    assert candidates(tmp_path / "run", snapshots=[tmp_path]) == ([], [])
    (tmp_path / store.TRACKER).write_bytes(b"\xb20")
    found, problems = candidates(tmp_path)
    assert [one.step for one in found] == [20, 10] and store.TRACKER in problems[0]
    for iteration in (10, 20):
        store.discard(store.iteration_directory(tmp_path, iteration), store.DISK)
    with raises(CheckpointError, "checkpoint-tracker-malformed"):
        candidates(tmp_path)


def test_nothing_there(tmp_path):
    assert candidates(tmp_path) == candidates(tmp_path / "none") == ([], [])


def test_snapshots_take_their_turn(tmp_path):
    root = tmp_path / "run"
    folder = tmp_path / "snapshots"
    for iteration in (10, 20):
        save(root, iteration)
    for iteration in (15, 18, 23):
        save(retention.free_slot(run_directory.slots(folder), iteration), iteration)
    slots = run_directory.slots(folder)
    assert [retention.newest_in(slot) for slot in slots] == [23, 18]
    assert steps(root, snapshots=slots) == [("0", 23), ("run", 20), ("1", 18), ("run", 10)]
    assert steps(root, 20, slots) == [("run", 20)]
    assert steps(tmp_path / "none", snapshots=slots) == [("0", 23), ("1", 18)], (
        "killed before the first checkpoint"
    )


def test_a_slot_is_free_when_it_is_older_empty_damaged_or_of_a_line_that_was_left(tmp_path):
    first, second = run_directory.slots(tmp_path)
    assert retention.free_slot(run_directory.slots(tmp_path), 5) == first
    save(first, 5)
    assert retention.free_slot(run_directory.slots(tmp_path), 10) == second
    save(second, 10)
    assert (
        retention.free_slot(run_directory.slots(tmp_path), 15) == first
        and not list(first.iterdir())
        and assert_good(second, 10) == 0
    )
    save(first, 15)
    (first / store.TRACKER).write_text("?")
    assert (
        retention.free_slot(run_directory.slots(tmp_path), 20) == first
        and run_directory.iterations(first) == []
    )
    save(first, 90)
    assert retention.free_slot(run_directory.slots(tmp_path), 20) == first, (
        "90 is of an abandoned history"
    )
