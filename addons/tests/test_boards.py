"""What other features write to TensorBoard, and read of it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.ops.goodput.accounting import KINDS, read_goodput
from megatron.addons.spikes import program as spikes
from megatron.analysis.run_reader import read_run
from megatron.features.boards.reader import read_scalars
from megatron.features.boards.tensorboard import TensorBoard
from megatron.features.registry import READERS
from tests.features.boards.event_files import events
from tests.forkrun import run_ranks
from tests.problems import assert_problem, numbers
from tests.runs import SMALL, plot, train, with_flags, write_text


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """(exit code, stdout), which must not be 2."""
    capsys.readouterr()
    code = spikes.main(argv)
    printed = capsys.readouterr()
    assert code in (0, 10), printed.err
    return code, printed.out


def scalars(folder: Path, losses: dict[int, float], name: str) -> None:
    """A TensorBoard directory of a run, in Megatron's tags; iterations without a loss were
    skipped."""
    board = TensorBoard(str(folder / name), 10)
    for n, loss in losses.items():
        board.scalar("learning-rate", 1e-3, n, 8 * n)
        board.scalar("batch-size", 8, n, 8 * n)
        if loss is not None:
            board.scalar("lm loss", loss, n, 8 * n)
            board.scalar("grad-norm", 1 + 0.001 * (n % 7), n, 8 * n)
    board.flush()


def test_tensorboard_directories_are_read_as_logs_are(tmp_path, capsys):
    noise = np.random.default_rng(4).normal(0, 0.02, 400)
    losses: dict[int, float | None] = {n: 3 + 5 * n**-0.5 + noise[n - 1] for n in range(1, 401)}
    losses[200] += 1.5
    scalars(tmp_path, losses, "first")
    code, out = said(capsys, "analyze", str(tmp_path / "first"))
    assert code == 10
    spike, skip = out.splitlines()[-3:-1]
    assert spike.startswith("benign spike ") and numbers(spike)[:2] == [200, 200]
    assert numbers(skip) == [199, 201, 3, 24]
    again = {
        n: None if 199 <= n <= 201 else 3 + 5 * n**-0.5 + noise[n - 1] for n in range(150, 401)
    }
    scalars(tmp_path, again, "second")
    code, out = said(capsys, "analyze", str(tmp_path / "first"), str(tmp_path / "second"))
    first, _, last = out.splitlines()
    assert (code, numbers(first), last) == (0, [397, 1, 400, 150], "no spike")
    records = read_run(
        *(str(tmp_path / name) for name in ("first", "second")), readers=READERS
    ).records
    assert [r.iteration for r in records if not r.trained] == [199, 200, 201]
    assert [r.loss for r in records[:149]] == pytest.approx(
        [losses[n] for n in range(1, 150)], rel=1e-6
    )
    (tmp_path / "empty").mkdir()
    assert spikes.main(["analyze", str(tmp_path / "empty")]) == 2
    assert_problem(capsys.readouterr().err.strip(), "log-without-losses", tmp_path / "empty")


def test_tensorboard_files_without_the_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    (tmp_path / "events.out.tfevents.1").touch()
    assert spikes.main(["analyze", str(tmp_path)]) == 2
    assert_problem(capsys.readouterr().err.strip(), "package-missing", "pip install tensorboard")


def test_the_scalars_of_goodput_are_what_the_tool_prints(tmp_path):
    save = tmp_path / "save"
    flags = f"--split 80,20,0 --train-iters 4 --save-interval 2 --save {save} "
    flags += f"--run-events --tensorboard-dir {tmp_path / 'board'}"
    text = write_text(tmp_path / "text", 100)
    train(tmp_path / "run", [*SMALL, "--data-path", text, *flags.split()])
    found = [one for one in read_scalars(str(tmp_path / "board")) if one[0].startswith("time/")]
    assert {step for _, step, _ in found} == {2, 4}
    last = {tag: value for tag, _, value in found}
    run = read_goodput(str(save))
    kinds = {f"time/{kind.replace('-', '_')}_seconds": run.of(kind) for kind in KINDS}
    expected = {"time/effective_share": run.share, "time/failures": run.failures, **kinds}
    assert last == pytest.approx(expected, rel=1e-3, abs=1e-3)


def _with_flags(rank: int, world: int, argv: list[str]) -> None:
    def add_flags(parser):
        parser.add_argument("--loss-factor", type=float, default=0.5)

    plot().main(argv, extra_args_provider=add_flags)


def test_arguments_of_a_script_are_among_the_texts(tmp_path):
    words = ["--mock-data", "--train-iters", "4", "--eval-iters", "0", "--onnx-safe", "yes"]
    board = ["--tensorboard-dir", str(tmp_path)]
    run_ranks(1, _with_flags, with_flags(SMALL, *words, *board), seconds=60.0)
    found = events(tmp_path)
    values = {
        name: found.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val
        for name in ("loss_factor", "hidden_size", "onnx_safe")
    }
    assert values == {"loss_factor": [b"0.5"], "hidden_size": [b"32"], "onnx_safe": [b"yes"]}
