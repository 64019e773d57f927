"""Where a damaged checkpoint sends a run: all ranks to the newest good one, and nowhere if one was
asked for. That any damage is noticed and named: `tests.campaigns.hostile.run_kinds`."""

import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import filesystem, reading, safetensors_reader, store
from megatron.checkpoint.filesystem import CheckpointError
from megatron.config import run_directory
from megatron.training.checkpointing import save, start
from megatron.training.launch.process import Refusal
from megatron.training.run import Run
from tests import problems
from tests.core.training.built_runs import built
from tests.forkrun import RanksFailed
from tests.problems import assert_problem, numbers
from tests.runs import EXACT, SMALL, same_tensors, train, with_flags, write_text

BASE = [
    *SMALL,
    "--train-iters",
    "8",
    "--split",
    "100,0,0",
    "--eval-iters",
    "0",
    "--save-interval",
    "2",
]
TINY = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --vocab-size 60".split()


def state_of(run: Run) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a run."""
    return {
        name: torch.cat([part.flatten() for _, part in own]).clone()
        for name, _, _, own in save.own_tensors(run)
    }


def set_state(run: Run, seed: int) -> None:
    """Other values, counters and schedule for the run."""
    torch.manual_seed(seed)
    for _, _, _, own in save.own_tensors(run):
        for _, part in own:
            part.copy_(torch.randn(part.shape))
    run.progress.iteration = seed
    run.progress.consumed_train_samples = 8 * seed
    run.scheduler.num_steps = 8 * seed


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Iterator[tuple[Run, Path, dict[int, dict[str, torch.Tensor]]]]:
    """(a tiny run that loads from a directory, the directory, its state at the iterations saved
    there)."""
    home = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path_factory.mktemp("saved")
    root = home / f"damaged-{os.getpid()}"
    writer = built(*TINY, "--save", str(root), "--save-interval", "10")
    states = {}
    for iteration in (10, 20):
        set_state(writer, iteration)
        states[iteration] = state_of(writer)
        save.save_checkpoint(writer)
    yield built(*TINY, "--load", str(root)), root, states
    shutil.rmtree(root)


def test_none_good_is_an_error_and_so_is_one_asked_for_by_name(saved, capsys):
    """Neither starts from random weights or takes another one."""
    run, root, _ = saved
    weights = [root / f"iter_{n:07d}/weights_00000.safetensors" for n in (10, 20)]
    good = [path.read_bytes() for path in weights]
    for path, data in zip(weights, good, strict=True):
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Refusal, match=".*iter_0000020.*iter_0000010") as failed:
        start.load_checkpoint(run)
    assert failed.value.code == 2
    assert_problem(str(failed.value), "no-good-checkpoint", "--load", root)
    weights[0].write_bytes(good[0])
    for how in (("--load", str(root), "--ckpt-step", "20"), ("--load", str(root / "iter_0000020"))):
        with problems.raises(
            CheckpointError, "checkpoint-damaged", "iter_0000020/weights_00000.safetensors, tensor "
        ):
            start.load_checkpoint(built(*TINY, *how))
    weights[1].write_bytes(good[1])
    capsys.readouterr()


def test_what_is_no_damage_is_no_reason_to_go_back(saved, capsys, monkeypatch):
    """A file this user may not read, a format of a newer program: an older checkpoint would
    overwrite what is good."""
    run, root, _ = saved
    path = root / "iter_0000020/manifest.json"
    text = path.read_bytes()
    newer = text.replace(b'"version": 1', b'"version": 2')
    newer = newer.replace(newer[11:19], b"00000000", 1)
    path.write_bytes(newer.replace(b"00000000", disk_sum(newer), 1))
    with problems.raises(CheckpointError, "checkpoint-version-unknown"):
        start.load_checkpoint(run)
    path.write_bytes(text)

    def refuse(self, path):
        raise CheckpointError(f"cannot open {path}: Permission denied", 13)

    monkeypatch.setattr(safetensors_reader.SafetensorsFile, "__init__", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        start.load_checkpoint(run)
    capsys.readouterr()


def disk_sum(data: bytes) -> bytes:
    return f"{zlib.crc32(data):08x}".encode()


def rank_1_reads_badly() -> None:
    """The disk of rank 1's machine gives an input/output error for one tensor of the newest
    checkpoint."""
    if os.environ["RANK"] != "1":
        return
    read = safetensors_reader.SafetensorsFile.read_into

    def read_into(self, key, *rest):
        if "iter_0000006" in str(self.path) and key.startswith("optimizer.exp_avg."):
            raise filesystem.CheckpointError(
                f"cannot read {self.path}, tensor {key}: Input/output error", 5
            )
        return read(self, key, *rest)

    safetensors_reader.SafetensorsFile.read_into = read_into


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(data, a run of two ranks that nothing happened to)."""
    folder = tmp_path_factory.mktemp("straight")
    data = write_text(folder / "text", 300)
    return data, train(folder, [*BASE, "--data-path", data, "--save", str(folder / "save")], 2)


@pytest.mark.campaign
def test_damage_that_one_rank_sees_sends_all_of_them_back(straight, tmp_path):
    """... and the run is the one that nothing happened to, bit for bit."""
    data, whole = straight
    argv = [
        *BASE,
        "--data-path",
        data,
        "--save",
        str(tmp_path / "save"),
        "--load",
        str(tmp_path / "save"),
    ]
    train(tmp_path, [*argv, "--exit-interval", "6"], 2)
    for how in (["--ckpt-step", "6"], ["--load", str(tmp_path / "save/iter_0000006")]):
        with pytest.raises(RanksFailed, match="rank 1: cannot read|Input/output error"):
            train(tmp_path / "asked", with_flags(argv, *how), 2, hook=rank_1_reads_badly)
    done = train(tmp_path, argv, 2, hook=rank_1_reads_badly)
    lines = [line for line in done.first_rank_log.splitlines() if "WARNING" in line]
    assert "iteration 6: rank 1: " in lines[-2]
    assert f"{tmp_path}/save/iter_0000006/weights_" in lines[-2]
    assert numbers(lines[-1])[:2] == [4, 6] and done.resumes[-1] == 4
    assert [row["iteration"] for row in done.rows] == list(range(1, 9))
    assert done.series(*EXACT) == whole.series(*EXACT)
    same_tensors(done.tensors(), whole.tensors())
    assert run_directory.iterations(done.save) == [2, 4, 6, 8]


def another_checkpoint_on_rank_1() -> None:
    """Rank 1 sees a directory of its own."""
    read = reading.read_metadata
    if os.environ["RANK"] == "1":
        reading.read_metadata = lambda path: replace(
            read(path), manifest=replace(read(path).manifest, crc32="01234567")
        )


@pytest.mark.campaign
def test_ranks_that_see_different_checkpoints_do_not_train(straight, tmp_path):
    data, whole = straight
    argv = [*BASE, "--data-path", data, "--save", str(tmp_path / "save"), "--load", str(whole.save)]
    with pytest.raises(
        RanksFailed,
        match=r"\[checkpoint-differs-between-ranks\]",
    ):
        train(tmp_path, argv, 2, hook=another_checkpoint_on_rank_1)


def test_a_tracker_that_is_gone(saved, capsys):
    """The newest good checkpoint is loaded, and that is one warning."""
    run, root, states = saved
    tracker = root / store.TRACKER
    text = tracker.read_bytes()
    tracker.unlink()
    start.load_checkpoint(run)
    tracker.write_bytes(text)
    [said] = [one for one in capsys.readouterr().out.splitlines() if one.startswith("WARNING: ")]
    assert_problem(said, "checkpoint-tracker-missing", tracker, 20)
    assert run.progress.iteration == 20
    same_tensors(state_of(run), states[20])


def test_flags_come_from_the_checkpoint_that_is_used(straight, tmp_path):
    """--use-checkpoint-args with a flipped digit in the newest args."""
    data, whole = straight
    shutil.copytree(whole.save, tmp_path / "save")
    args = tmp_path / "save/iter_0000008/args"
    args.write_text(args.read_text().replace("--num-layers 2", "--num-layers 3"))
    drop = BASE.index("--seq-length")
    done = train(
        tmp_path,
        [
            *BASE[drop:],
            "--data-path",
            data,
            "--load",
            str(tmp_path / "save"),
            "--use-checkpoint-args",
            "--save",
            str(tmp_path / "new"),
        ],
    )
    said = " ".join(done.log.split())
    assert f"WARNING: --use-checkpoint-args: {args} is damaged" in said
    assert done.resumes[-1] == 6
    assert [row["iteration"] for row in done.rows] == [7, 8]
