"""Runs check_nodes on forked gloo ranks, some of them with a fault: python faulty_ranks.py FAULT RUNS
SECONDS prints, for each run, a JSON line with the rank that had it, the exit codes and the output."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch  # noqa: E402

from megatron.addons.ops.nodes import check, probes, program  # noqa: E402

WORLD = 8


def slowed(dice: random.Random) -> None:
    """This rank's GEMMs, or copies, take eight times as long."""
    name = dice.choice(["gemm", "copy"])
    real = getattr(probes, name)

    def make(*args):
        call = real(*args)
        return lambda: [call() for _ in range(8)][-1]

    setattr(probes, name, make)


def flipping(dice: random.Random) -> None:
    """One bit of what this rank computes, or sends, is another one."""
    name = dice.choice(["gemm", "copy", "start_send"])
    place, bit = dice.random(), dice.randrange(31)
    real = getattr(probes, name)

    def flip(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32).flatten()
        bits[int(place * bits.numel())] ^= 1 << bit
        return x

    def send(x, *args):
        return real(flip(x.clone()), *args)

    def make(*args):
        call = real(*args)
        return lambda: flip(call())

    setattr(probes, name, send if name == "start_send" else make)


def cut(dice: random.Random) -> None:
    """This rank never comes, dies, stands still, or its calls do not return."""
    kind, phase = dice.choice(["dies", "stops", "hangs"]), dice.randrange(8)
    if dice.random() < 0.25:
        time.sleep(3600)
    seen = []
    real = probes.measure

    def measure(device, axis, messages, told):
        def counted(name: str) -> None:
            told(name)
            seen.append(name)
            if len(seen) > phase and kind == "hangs":
                time.sleep(3600)
            elif len(seen) > phase:
                os.kill(os.getpid(), signal.SIGKILL if kind == "dies" else signal.SIGSTOP)

        return real(device, axis, messages, counted)

    check.measure = measure


FAULTS = {"slowed": slowed, "flipping": flipping, "cut": cut, "none": lambda dice: None}


def rank_main(rank: int, port: int, fault: str, bad: int, seed: int, limit: float, file: str):
    """A forked rank."""
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if rank == bad:
        FAULTS[fault](random.Random(seed))
    code = 3
    try:
        code = program.main(["--device", "cpu", "--timeout-seconds", str(limit)])
    finally:
        os._exit(code)


def run(fault: str, seed: int, limit: float, folder: Path) -> dict[str, object]:
    """One check of eight ranks."""
    dice = random.Random(seed)
    bad = dice.randrange(WORLD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = folder / f"{fault}{seed}.log"
    start = time.monotonic()
    children = {}
    for rank in range(WORLD):
        if not (child := os.fork()):
            rank_main(rank, port, fault, bad, seed, limit, str(file))
        children[child] = rank
    codes = {}
    while len(codes) < WORLD and not (
        fault == "cut" and len(codes) == WORLD - 1 and bad not in codes
    ):
        child, status = os.waitpid(-1, 0)
        codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    seconds = time.monotonic() - start
    codes = [codes.get(rank) for rank in range(WORLD)]
    return {"bad": bad, "codes": codes, "seconds": seconds, "text": file.read_text()}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for seed in range(int(sys.argv[2])):
            print(json.dumps(run(sys.argv[1], seed, float(sys.argv[3]), Path(folder))), flush=True)
