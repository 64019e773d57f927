"""--non-persistent-ckpt-type local: parts on nodes, which here are directories of one machine
(%n in the path, two ranks or one to a node), and what a restart takes when some of them are gone,
damaged or of another run."""

import functools
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.checkpoint import file_transfer, lock, reading
from megatron.checkpoint.file_transfer import Route
from megatron.checkpoint.filesystem import CheckpointError, Disk
from megatron.checkpoint.local_copies import (
    NEWEST,
    LocalSave,
    read_newest,
    verify,
    write_newest,
)
from megatron.config.checkpoint import CheckpointConfig
from megatron.training import loop
from megatron.training.checkpointing.local_copies import partners
from tests.core.training.checkpointing.refusing_disk import FULL
from tests.forkrun import RanksFailed, run_ranks
from tests.problems import raises
from tests.runs import EXACT, SMALL, Finished, same_tensors, train, with_flags

BASE = (
    *SMALL,
    *"--train-iters 7 --split 100,0,0 --eval-iters 0 --save-interval 3".split(),
)
LOCAL = "--snapshot-interval 1 --non-persistent-ckpt-type local".split()
SHARDS = "--use-distributed-optimizer"
LAYOUTS = {
    "dp 2": (2, [SHARDS]),
    "tp 2 x dp 2": (4, [SHARDS, "--tensor-model-parallel-size", "2"]),
    "pp 2 x dp 2": (4, [SHARDS, "--pipeline-model-parallel-size", "2"]),
    "tp 2 x pp 2": (
        4,
        ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
    ),
    "dp 4, every rank a whole optimizer": (4, []),
    "dp 2, bf16, an asynchronous save": (2, [SHARDS, "--bf16", "--async-save"]),
}


class Place:
    """A run of a layout in a folder, on two nodes."""

    def __init__(self, folder: Path, data: str, layout: str):
        self.folder = folder
        self.data = data
        self.world, self.layout = LAYOUTS[layout]

    def run(self, *extra: str, **more) -> Finished:
        save = str(self.folder / "save")
        argv = [*BASE, *self.layout, "--data-path", self.data, "--save", save, "--load", save]
        return train(self.folder, with_flags(argv, *extra), **{"world": self.world, **more})

    def local(self, *extra: str, **more) -> Finished:
        folder = str(self.folder / "node-%n")
        return self.run(*LOCAL, "--non-persistent-local-ckpt-dir", folder, *extra, **more)

    def node(self, number: int) -> Path:
        return self.folder / f"node-{number}"

    def part(self, rank: int, holder: int) -> Path:
        """The newest part of a rank that a holder has."""
        node = self.node(holder // (self.world // 2))
        (part,) = node.glob(f"*/*/{rank:05d}-on-{holder:05d}")
        return part

    def parts(self) -> set[str]:
        return {
            f"{path.parent.name} {int(path.parts[-3][5:12])}"
            for number in (0, 1)
            for path in self.node(number).glob("*/*/*-on-*/manifest.json")
        }


@pytest.fixture
def two_nodes(monkeypatch):
    def with_ranks(world: int) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world // 2))

    return with_ranks


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data):
    """The undisturbed run of a layout, which makes no local copies."""

    @functools.cache
    def of(layout: str) -> Finished:
        return Place(tmp_path_factory.mktemp("straight"), data, layout).run()

    return of


def flip(part: Path) -> None:
    """Change one bit of a part's tensors."""
    (path,) = part.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(bytes(content))


def first_row(finished: Finished, before: int) -> int:
    """The first iteration that was trained after so many lines of the metrics file."""
    lines = (finished.folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[before])["iteration"]


def rows_of(place: Place) -> int:
    return len((place.folder / "metrics.jsonl").read_text().splitlines())


def killed(place: Place, *extra: str) -> int:
    """A run killed in iteration 6, when 3 is on the disk and 5 in local copies; rows so far."""
    place.local(*extra, kill_at=6)
    return rows_of(place)


def resumed(place: Place, straight, layout: str, at: int, before: int, *extra: str) -> str:
    """The log of the run started again, which went on after iteration `at` and gives the same."""
    finished = place.local(*extra)
    text = finished.first_rank_log
    assert first_row(finished, before) == at + 1, text
    whole = straight(layout)
    assert finished.series(*EXACT) == whole.series(*EXACT)
    same_tensors(finished.tensors(), whole.tensors())
    assert not list(place.folder.glob("node-*/*")), "local copies remain after the end"
    return text


def source_of(text: str, place: Place) -> str:
    """What the log says of where the state came from."""
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith(" loading") and str(place.folder / "node-%n") in line and "part" in line
    )
    return line


@pytest.mark.parametrize(
    "layout",
    [one if one == "dp 2" else pytest.param(one, marks=pytest.mark.sweep) for one in LAYOUTS],
)
def test_a_lost_node_is_read_from_its_mirrors(layout, tmp_path, data, straight, two_nodes):
    place = Place(tmp_path, data, layout)
    two_nodes(place.world)
    before = killed(place, "--replication")
    half = place.world // 2
    # with --async-save those of 5 may be lost with the process
    at = 4 if "--async-save" in place.layout and "00000-on-00000 4" in place.parts() else 5
    assert place.parts() == {
        f"{part:05d}-on-{holder:05d} {at}"
        for part in range(place.world)
        for holder in (part, (part + half) % place.world)
    }
    shutil.rmtree(place.node(1))
    line = source_of(resumed(place, straight, layout, at, before, "--replication"), place)
    for rank in range(half, place.world):
        assert re.search(rf"\brank {rank} [^,;]*mirror[^,;]* rank {rank - half}\b", line), line


@pytest.mark.sweep
@pytest.mark.parametrize("damage", ["one", "both", "file gone", "a manifest"])
def test_damaged_parts(damage, tmp_path, data, straight, two_nodes):
    """One: its mirror. Both: the checkpoint before."""
    place = Place(tmp_path, data, "dp 2")
    two_nodes(2)
    before = killed(place, "--replication")
    if damage == "file gone":
        (place.part(1, 1) / "weights_00001.safetensors").unlink()
    elif damage == "a manifest":
        manifest = place.part(1, 1) / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"sums"', '"Sums"', 1))
    else:
        flip(place.part(1, 1))
    if damage == "both":
        flip(place.part(1, 0))
    at = 3 if damage == "both" else 5
    text = resumed(place, straight, "dp 2", at, before, "--replication")
    warned = [line for line in text.splitlines() if line.startswith("WARNING")]
    assert any("[checkpoint-damaged]" in line or "00001" in line for line in warned), text
    assert ("[local-copies-damaged]" in text) == (damage == "both")


@pytest.mark.campaign
@pytest.mark.parametrize("between", ["copies", pytest.param("no copies", marks=pytest.mark.sweep)])
def test_copies_of_a_line_that_was_left(between, tmp_path, data, straight, two_nodes):
    """A run that went back to 3 and came to no save of its own makes the copies of 5 useless."""
    place = Place(tmp_path, data, "dp 2")
    two_nodes(2)
    killed(place, "--replication")
    if between == "copies":
        place.local("--replication", "--ckpt-step", "3", kill_at=1)
    else:
        place.run("--ckpt-step", "3", kill_at=1)
    before = rows_of(place)
    finished = place.local("--replication")
    assert first_row(finished, before) == 4
    same_tensors(finished.tensors(), straight("dp 2").tensors())


def lose_the_lock(save: str) -> None:
    """A hook: before iteration 4 another job takes the directory over."""
    step = loop.train_step

    def taken(run, *args, **kwargs):
        if run.progress.iteration == 3:
            (mine,) = Path(save).glob(".lock.*")
            owner = replace(lock._owner(mine), token="another")
            mine.with_name(".lock.000009").write_text(json.dumps(owner.__dict__))
        return step(run, *args, **kwargs)

    loop.train_step = taken


def test_a_run_that_lost_its_lock_makes_no_copy(tmp_path, data):
    place = Place(tmp_path, data, "dp 2")
    flags = with_flags(
        [*BASE, *LOCAL, "--data-path", data],
        "--save",
        str(tmp_path / "save"),
        "--save-interval",
        "7",
        "--non-persistent-local-ckpt-dir",
        str(tmp_path / "node-%n"),
    )
    with pytest.raises(RanksFailed, match="save-directory-taken-over"):
        train(tmp_path, flags, hook=functools.partial(lose_the_lock, str(tmp_path / "save")))
    assert place.parts() == {"00000-on-00000 3"}


@pytest.mark.parametrize(
    "text",
    ["{", "{}", '{"run": "../../..", "save": "", "iteration": 0, "ranks": ""}', '{"run": 5}'],
)
def test_a_damaged_file_is_refused(text, tmp_path):
    """No name in it leads out of the directory of local copies."""
    saved = LocalSave("0" * 16, "1" * 16, 4, "2 ranks")
    write_newest(tmp_path, saved)
    assert read_newest(tmp_path) == saved
    (tmp_path / NEWEST).write_text(text)
    with raises(CheckpointError, "local-copies-file-damaged"):
        read_newest(tmp_path)


def test_partners():
    """Megatron's groups: `factor` ranks, `jump` apart."""
    c = CheckpointConfig(replication=True, replication_jump=2, replication_factor=3)
    assert [partners(c, rank, 8) for rank in (0, 3, 7)] == [[0, 2, 4], [1, 3, 5], [7, 9, 11]]
    assert partners(replace(c, replication_jump=None), 9, 8) == [1, 9, 17]
    assert partners(replace(c, replication=False), 9, 8) == [9]


def transferred(rank: int, world: int, folder: str, refused: bool) -> str | None:
    """Both ranks send and receive; the disk of rank 1 is full if `refused`."""
    root = Path(folder)
    out = root / f"out-{rank}"
    into = root / f"into-{rank}"
    for path in (out, into):
        path.mkdir()
    (out / "manifest.json").write_bytes(b"m" * (rank + 1))
    (out / "tensors").write_bytes(bytes(range(251)) * (9 * rank + 1))
    file_transfer.SECTION_BYTES = 1000
    if refused and rank == 1:
        Disk.step = _refuse
    other = 1 - rank
    group = dist.group.WORLD
    try:
        file_transfer.exchange(Route(out, other, group), Route(into, other, group))
    except file_transfer.CheckpointError as error:
        return str(error)
    return None


def _refuse(self, action, path) -> None:
    if action == "write":
        raise OSError(FULL, os.strerror(FULL))


@pytest.mark.parametrize("refused", [False, True])
def test_files_arrive(refused, tmp_path):
    """Of different lengths, in pieces; a full disk of one rank does not stop the other."""
    answers = run_ranks(2, transferred, str(tmp_path), refused)
    assert [bool(text) for text in answers] == [False, refused]
    for rank in (0,) if refused else (0, 1):
        for name in ("manifest.json", "tensors"):
            sent = (tmp_path / f"out-{1 - rank}" / name).read_bytes()
            assert (tmp_path / f"into-{rank}" / name).read_bytes() == sent


def test_a_part_is_verified(tmp_path, data):
    """Every bit of it: the part of a run of one rank."""
    flags = [*BASE, *LOCAL, "--data-path", data, "--save", str(tmp_path / "save")]
    train(tmp_path, [*flags, "--non-persistent-local-ckpt-dir", str(tmp_path / "node-%n")], 1, 6)
    (part,) = tmp_path.glob("node-0/*/*/*-on-*")
    assert verify(part) is None
    flip(part)
    assert "[checkpoint-damaged]" in verify(part)
    assert reading.latest(tmp_path / "save") == 3
