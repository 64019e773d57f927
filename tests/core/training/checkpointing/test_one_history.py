"""Nothing of another history is replaced, removed or loaded in silence: all pairs of four
histories, and sequences of runs, against the true line of saves that led to each checkpoint."""

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint import reading, retention, store
from megatron.checkpoint.reading import Candidate, candidates
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState
from megatron.config import run_directory
from megatron.config.checkpoint import CheckpointConfig
from megatron.optimizer import saved_schedule
from megatron.training.checkpointing import load, one_history, start
from megatron.training.run import Progress
from tests.core.checkpoint.saves import Unsynced
from tests.forkrun import RanksFailed
from tests.problems import assert_reported, codes_of
from tests.runs import SMALL, train, with_flags

LAYOUT = {"world_size": 1, "tp": 1, "pp": 1, "cp": 1, "dp": 1}
LINE = "line"  # of a test, beside the files of a checkpoint; damage leaves it whole
WEIGHTS = "weights_00000.safetensors"
Line = tuple[int, ...]  # the numbers of the saves that led to a checkpoint, its own last


@contextmanager
def _timer(name: str) -> Iterator[None]:
    yield


@pytest.fixture
def only_the_state(monkeypatch):
    """A load verifies the tensors and takes the state; the rest of a run is not there."""

    def verify(run, checkpoint, c):
        with checkpoint.reader() as reader:
            reader.verify()

    monkeypatch.setattr(load, "_take_tensors", verify)
    monkeypatch.setattr(load, "_with_optimizer", lambda c, checkpoint: True)
    monkeypatch.setattr(load, "layout_of", lambda runtime: LAYOUT)
    monkeypatch.setattr(load, "other_hardware", lambda *words: None)


@pytest.fixture(autouse=True)
def no_schedule(monkeypatch):
    """Of the runs that only do with files what a run does; whole runs have processes of their own."""
    monkeypatch.setattr(saved_schedule, "load", lambda scheduler, state: None)


@dataclass
class Disk:
    """Run directories below a folder, and what was saved last in each."""

    folder: Path
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    last: dict[str, Line] = field(default_factory=dict)

    def saved(self) -> dict[Path, Line]:
        """The line of each checkpoint that is there, under whatever name."""
        return {
            file.parent.relative_to(self.folder): line_of(file.parent)
            for file in sorted(self.folder.rglob(LINE))
        }

    def loadable(self, name: str) -> dict[Path, Line]:
        """Those of a run directory under the name that a save gave them."""
        roots = [Path(name), *(Path(name, "snapshots", slot) for slot in run_directory.SLOTS)]
        return {
            path: line
            for path, line in self.saved().items()
            if path.parent in roots and path.suffix == ""
        }

    def run(
        self,
        load_from: str | None,
        save_to: str,
        *plan: str | int,
        step: int | None = None,
        rename: bool = False,
        old: bool = False,
        finetune: bool = False,
    ) -> Line | None:
        """A run that loads and then, for each word of its plan, saves after so many iterations,
        takes a snapshot ("snapshot") or rolls back to its oldest save ("rollback"). Returns what it
        loaded, () at iteration 0, or None if it was refused before anything was changed. `old`: by
        a program that knows of no histories."""
        save = str(self.folder / save_to)
        c = CheckpointConfig(
            load=load_from and str(self.folder / load_from),
            save=save,
            ckpt_step=step,
            overwrite_newer_checkpoints=rename,
            finetune=finetune,
        )
        training = SimpleNamespace(skip_train=False)
        line = SimpleNamespace(
            config=SimpleNamespace(checkpoint=c, training=training),
            **dict.fromkeys(("load_url", "save_url", "snapshot_url")),
        )
        before = self.saved()
        if problems := list(one_history.problems(line)):
            assert codes_of(problems) == ["save-holds-checkpoints"] and not rename or finetune
            assert self.saved() == before
            return None
        one_history.make_room(line)
        run = SimpleNamespace(
            config=line.config,
            runtime=SimpleNamespace(
                rank=0, device=None, ctx=SimpleNamespace(world=SimpleNamespace(size=1))
            ),
            timers=_timer,
            progress=Progress(),
            of_rank_0=lambda action: action(),
            fp8=None,
            kernels={},
            plan=None,
            scheduler=None,
            optimizer=SimpleNamespace(
                load_counters=lambda state: None, reload_model_params=lambda: None
            ),
        )
        start.load_checkpoint(run)
        began = tuple(run.progress.features.get("line", ()))
        own: list[int] = []
        for word in plan:
            if word == "rollback":
                load.load_own(run, [Candidate(save, own[0])])
                own = own[:1]
            else:
                run.progress.iteration += 1 if word == "snapshot" else int(word)
            self.save(run, save_to, word == "snapshot", old)
            own += [run.progress.iteration] * (word != "snapshot")
        return began

    def save(self, run, name: str, snapshot: bool, old: bool) -> None:
        """What a save of the program does with files."""
        iteration = run.progress.iteration
        line = (*run.progress.features.get("line", ()), next(self.numbers))
        run.progress.features["line"] = list(line)
        state = RunState(
            iteration=iteration,
            features={"line": list(line)},
            layout=LAYOUT,
            history={} if old else run.progress.history.dump(iteration),
        )
        root = self.folder / name
        slices = [TensorSlice.whole("x", torch.tensor(line[-1]))]
        disk = Unsynced()
        folder = root / "snapshots"
        target = (
            retention.free_slot(run_directory.slots(folder), iteration, disk) if snapshot else root
        )
        checkpoint = store.save(target, iteration, slices, state, "", disk=disk)
        (checkpoint / LINE).write_text(json.dumps(line))
        if old and not snapshot:  # as an earlier program did
            for slot in run_directory.slots(folder):
                if (retention.newest_in(slot) or 0) > iteration:
                    retention.empty(slot, disk)
        self.last[name] = line


def line_of(checkpoint: Path) -> Line:
    return tuple(json.loads((checkpoint / LINE).read_text()))


def leads(first: Line, second: Line) -> bool:
    return second[: len(first)] == first


def related(first: Line, second: Line) -> bool:
    return leads(first, second) or leads(second, first)


@pytest.fixture
def histories(tmp_path_factory, only_the_state):
    """`histories(folder, old)`: a copy of four directories. a and b have nothing in common; c left
    a at iteration 4 and d left c at 6. Those whose letter is in `old` were written by an earlier
    program."""

    def copied(folder: Path, old: str = "") -> Disk:
        if old not in MADE:
            MADE[old] = made(tmp_path_factory.mktemp("histories"), old)
        shutil.copytree(MADE[old].folder, folder, dirs_exist_ok=True)
        return Disk(folder, itertools.count(1000), dict(MADE[old].last))

    return copied


MADE: dict[str, Disk] = {}


def made(folder: Path, old: str) -> Disk:
    disk = Disk(folder)
    disk.run(None, "a", 2, 2, 2, 2, 2, old="a" in old)
    disk.run(None, "b", 3, 2, 1, old="b" in old)
    disk.run("a", "c", 1, 1, 1, step=4, old="c" in old)
    disk.run("c", "d", 1, 4, 2, "snapshot", step=6, old="d" in old)
    assert all(disk.saved().values())
    return disk


NAMES = "abcd"
CAMPAIGN = pytest.mark.campaign
# one strange to the other, one that goes on from it, one that it went on from, itself
QUICK = (("a", "b"), ("d", "a"), ("c", "d"), ("c", "c"))
PAIRS = [
    pytest.param(*pair, marks=[] if pair in QUICK else CAMPAIGN)
    for pair in itertools.product(NAMES, NAMES)
]


def test_the_whole_program(tmp_path):
    """Refused, also by a dry run, before anything is done; renamed if asked for; and without its
    tracker the directory goes on from what it saved last."""
    argv = [*SMALL, *"--mock-data --train-iters 8 --eval-iters 0".split()]
    other, ck = str(tmp_path / "other"), str(tmp_path / "ck")
    train(tmp_path, [*argv, "--save", other, "--exit-interval", "5"])
    train(tmp_path, with_flags(argv, "--seed", "7", "--save", ck, "--save-interval", "1"))
    before = {path: path.read_bytes() for path in Path(ck).rglob("*") if path.is_file()}
    words = [*argv, "--load", other, "--save", ck, "--save-interval", "1", "--exit-interval", "7"]
    for more in ([], ["--dry-run"]):
        with pytest.raises(RanksFailed, match=r"exit codes \[2\]") as refused:
            train(tmp_path, [*words, *more])
        assert_reported(str(refused.value), "save-holds-checkpoints", ck, other, "iteration 5")
    assert before == {path: path.read_bytes() for path in Path(ck).rglob("*") if path.is_file()}
    done = train(tmp_path, [*words, "--overwrite-newer-checkpoints"])
    assert run_directory.iterations(ck) == [6, 7] and done.resumes == [5]
    aside = sorted(path.name for path in Path(ck).glob("*.other-history"))
    assert aside == [f"iter_{n:07d}.other-history" for n in range(1, 9)]
    (Path(ck) / store.TRACKER).unlink()
    assert train(tmp_path, [*argv, "--load", ck, "--save", ck]).resumes[-1] == 7
    [run] = reading.load(other).state.history["branches"]
    branches = reading.load(ck, 8).state.history["branches"]
    assert branches[0] == run and [iteration for _, iteration in branches] == [5, 7, 8]


def test_a_run_that_starts_at_iteration_0(histories, tmp_path):
    disk = histories(tmp_path)
    (tmp_path / "void").mkdir()
    shutil.copytree(tmp_path / "d" / "snapshots", tmp_path / "e" / "snapshots")
    before = disk.saved()
    for save_to in ("a", "e"):
        assert disk.run(None, save_to, 1) is disk.run("void", save_to, 1) is None
        assert disk.run("b", save_to, 1, finetune=True) is None
    assert disk.run("a", "a", 1, finetune=True) is None
    assert disk.run("a", "a", 1, finetune=True, rename=True) is None, (
        "it would load what it renames"
    )
    assert disk.saved() == before
    assert disk.run("a", "tuned", 1, finetune=True) == disk.run(None, "new", 1) == ()
    assert disk.run("new", "new", 1) and disk.run("tuned", "new", 1) is None
    assert disk.run(None, "a", 1, rename=True) == ()
    assert disk.run("a", "a") == disk.last["a"] and len(disk.last["a"]) == 1
    # weights of another suite, in the directory that the run saves in
    disk.run(None, "imported", 0, old=True)
    assert disk.run("imported", "imported", 1, 1, finetune=True) == ()
    assert disk.run("imported", "imported", 1) == disk.last["imported"][:-1]


@pytest.mark.parametrize(
    "load_from, save_to", [pair for pair in PAIRS if pair.values[0] != pair.values[1]]
)
def test_with_checkpoints_of_an_earlier_program(histories, tmp_path, load_from, save_to):
    """They count as the history of their directory: another one is refused unless what is loaded is
    known to continue from it."""
    for old in ("a", "b", "ab", "ac", "abcd"):
        disk = histories(tmp_path / old, old)
        before = disk.saved()
        begins = disk.last[load_from]
        strange = any(not related(begins, line) for line in disk.loadable(save_to).values())
        loaded = disk.run(load_from, save_to, 1)
        assert loaded in (None, begins)
        if strange or old == "abcd":
            assert loaded is None and disk.saved() == before
        disk.run(load_from, save_to, 1, rename=True)
        (disk.folder / save_to / store.TRACKER).unlink()
        assert disk.run(save_to, save_to) == disk.last[save_to]


def test_a_directory_of_an_earlier_program_goes_on_and_is_known_by_what_continues_it(
    histories, tmp_path
):
    disk = histories(tmp_path, "abcd")
    old = disk.last["a"]
    assert disk.run("a", "new", 1, 1, step=10) == old
    # the same command again, as an unattended restart does
    assert disk.run("a", "new", 1, 1, step=10) == old
    assert disk.run("a", "new", 1, step=8) is None, "not known to lead to iteration 10"
    assert disk.run("a", "a", 2) == old
    assert disk.run("new", "a", 1) is None and disk.run("a", "new", 1) is None
    # back to iteration 4 of the old ones: 6 to 10 stay, and no longer count
    assert disk.run("a", "a", 3, step=4) == old[:2]
    (tmp_path / "a" / store.TRACKER).unlink()
    steps = [each.step for each in candidates(tmp_path / "a")[0]]
    assert steps == [7, 4, 2] and run_directory.iterations(tmp_path / "a") == [
        2,
        4,
        6,
        7,
        8,
        10,
        12,
    ]


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 40), marks=CAMPAIGN)])
def test_random_sequences_of_runs(histories, tmp_path, seeds):
    """Loads, earlier iterations, other directories, rollbacks, snapshots, retention, lost trackers
    and damage, in any order: the last save of a directory is loaded, or what led to it."""
    outcomes = set()
    for seed in seeds:
        choose = random.Random(seed)
        disk = histories(tmp_path / str(seed))
        damaged: set[Line] = set()
        for _ in range(8):
            name = choose.choice(NAMES)
            save_to = choose.choice((name, *NAMES))
            root = disk.folder / name
            there = disk.loadable(name)
            if choose.random() < 0.4:
                (root / store.TRACKER).unlink(missing_ok=True)
            elif choose.random() < 0.3:
                damage(disk.folder, there, disk.last[name])
                damaged.add(disk.last[name])
            good = [line for line in there.values() if line not in damaged]
            expected = max((n for n in good if leads(n, disk.last[name])), key=len, default=None)
            step = choose.choice((None, None, *run_directory.iterations(root)))
            if expected is None or step and there[Path(name, f"iter_{step:07d}")] in damaged:
                break
            before = disk.saved()
            plan = choose.choices((1, 2, 3, "snapshot", "rollback"), k=choose.randint(1, 4))
            rename = choose.random() < 0.3
            loaded = disk.run(name, save_to, choose.choice((1, 2)), *plan, step=step, rename=rename)
            after = disk.saved()
            outcomes.add((loaded is None, name == save_to, rename))
            if loaded is None:
                assert name != save_to and after == before
                continue
            assert step or loaded == expected, seed
            aside = {line for path, line in before.items() if path.suffix}
            gone = set(before.values()) - set(after.values())
            assert not gone & aside, seed
            assert name == save_to or all(related(loaded, line) for line in gone), seed
            if choose.random() < 0.3:
                retention.prune(disk.folder / save_to, 3, disk=Unsynced())
    assert len(outcomes) == 5


def damage(folder: Path, there: dict[Path, Line], line: Line) -> None:
    """Cut off the end of the tensors of a checkpoint."""
    for path, other in there.items():
        if other == line:
            file = folder / path / WEIGHTS
            file.write_bytes(file.read_bytes()[:-3])
