"""torchrun --nnodes MIN:MAX: a node is lost, its ranks with it, and another one joins later; the
run continues each time with the ranks that there are, and takes the same global batches."""

import os
import signal
from pathlib import Path

import pytest

from tests.campaigns.e2e.programs import SCRIPT, Program, free_port, ranks_of, spawn_program
from tests.forkrun import ROOT
from tests.runs import NO_DROPOUT, SMALL, Finished, train, with_flags, write_text

ITERATIONS = 16
WAITING = f'''"""pretrain_gpt.py that begins no iteration above the number in the file `allowed`; `starts` has
the ranks of each attempt and the iteration from which it continued."""
import runpy, time
from pathlib import Path
from megatron.training import loop

real = loop.train_step
started = []

def train_step(run, *args, **kwargs):
    if run.runtime.rank == 0 and not started:
        started.append(run)
        with open("starts", "a") as file:
            print(run.plan.world_size, run.progress.iteration, file=file)
    while run.progress.iteration >= int(Path("allowed").read_text() or 0):
        time.sleep(0.02)
    return real(run, *args, **kwargs)

loop.train_step = train_step
runpy.run_path({SCRIPT!r}, run_name="__main__")
'''


def argv(folder: Path, *more: str) -> list[str]:
    """A run of which 1, 2 or 4 ranks take the same batches; any wait is allowed."""
    sizes = ("--micro-batch-size", "1", "--global-batch-size", "8", "--fp64", *NO_DROPOUT)
    words = ["--data-path", str(folder / "text"), "--split", "90,10,0"]
    save = [word for flag in ("--save", "--load") for word in (flag, str(folder / "save"))]
    hang = ["--hang-timeout-seconds", "0", "--save-interval", "3"]
    length = ["--train-iters", str(ITERATIONS)]
    return [*with_flags(SMALL, *sizes), *words, *save, *hang, *length, *more]


def node(folder: Path, name: str, port: int, *more: str) -> Program:
    """torchrun on a node of two ranks. The first node has the rendezvous store: on several hosts
    the endpoint says so, here any node could take the port. The store would keep the address of
    rank 0 from a node that joins later (torch 2.13), hence the variable."""
    words = "--nnodes 1:2 --nproc-per-node 2 --max-restarts 9 --rdzv-backend c10d --rdzv-id run"
    seconds = "last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=10"
    host = f"is_host={str(name == 'first').lower()}"
    where = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"{seconds},{host}"]
    return spawn_program(
        ["-m", "torch.distributed.run", *words.split(), *where, "waiting.py", *more],
        folder / name,
        {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        folder,
    )


def kill(torchrun: Program) -> None:
    """As if its node were lost; nothing if it has ended."""
    if torchrun.poll() is None:
        for pid in [*ranks_of(torchrun), torchrun.pid]:
            os.kill(pid, signal.SIGKILL)


def starts(folder: Path) -> list[tuple[int, int]]:
    """Ranks and iteration of each attempt."""
    path = folder / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(ranks), int(iteration)) for ranks, iteration in map(str.split, lines)]


def last(folder: Path) -> int:
    """The last iteration in the metrics file."""
    path = folder / "metrics.jsonl"
    rows = Finished(folder, 1).rows if path.exists() else []
    return rows[-1]["iteration"] if rows else 0


@pytest.mark.sweep
def test_a_node_is_lost_and_another_joins(tmp_path):
    """4 ranks, 2 of them killed with their torchrun in the 8th iteration, 2 ranks, 4 again: at
    every step the losses of one process in float64."""
    write_text(tmp_path / "text", 260)
    one = train(tmp_path, argv(tmp_path))
    folder = tmp_path / "nodes"
    folder.mkdir()
    write_text(folder / "text", 260)
    (folder / "waiting.py").write_text(WAITING)
    (folder / "log.0").write_text("")
    more = argv(folder, "--metrics-file", str(folder / "metrics.jsonl"))
    port = free_port()
    nodes: list[Program] = []
    try:
        (folder / "allowed").write_text("7")
        nodes += [node(folder, name, port, *more) for name in ("first", "second")]
        nodes[0].wait_until(lambda: last(folder) == 7, 200, "4 ranks did not train")
        assert starts(folder) == [(4, 0)]
        kill(nodes[1])
        (folder / "allowed").write_text("11")
        nodes[0].wait_until(lambda: last(folder) == 11, 200, "2 ranks did not train")
        assert starts(folder) == [(4, 0), (2, 6)]
        nodes.append(node(folder, "third", port, *more))
        nodes[0].wait_until(lambda: len(starts(folder)) > 2, 200, "the third node was not used")
        (folder / "allowed").write_text(str(ITERATIONS))
        assert [nodes[0].end(200), nodes[2].end(200)] == [0, 0], nodes[0].err
    finally:
        for one_node in nodes:
            kill(one_node)
    assert starts(folder) == [(4, 0), (2, 6), (4, 9)]
    names = ("iteration", "lm_loss", "grad_norm", "consumed_samples")
    many = Finished(folder, 1).series(*names)
    assert len(many) == ITERATIONS
    for row, other in zip(one.series(*names), many, strict=True):
        assert other == pytest.approx(row, rel=1e-10)
