"""A check of all ranks of a job: measure, wait for one another, report."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist  # noqa: TID251

from megatron import device as devices
from megatron import launcher
from megatron.parallel.context import Axis

from .meeting import Meeting
from .probes import MIB, Measured, measure
from .verdict import Finding, judge, slow, spread

MEASURED = ("clocks.sm", "clocks.max.sm", "temperature.gpu")
SMI = ("driver_version", *MEASURED)


def check(requested: str, mib: Sequence[float] | None, limit: float) -> int:
    """The exit code of this rank: 1 if something is named. Raises ValueError where the ranks do not
    meet, or the device `requested` is not there."""
    launch = launcher.info()
    rank, size = launch.rank, launch.world_size
    device = devices.choose_device(requested, launch.local_rank)
    meeting = Meeting(limit, socket.gethostname()) if size > 1 else None
    try:
        if meeting:
            meeting.phase("connecting")
            dist.init_process_group(
                devices.chosen_backend(None, device),
                store=dist.PrefixStore("group", meeting.again()),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=limit / 2),
            )
        axis = Axis("world", size, rank, tuple(range(size)), dist.group.WORLD if meeting else None)
        findings = _rounds(device, axis, mib, meeting)
    except RuntimeError as error:
        print(f"rank {rank}: {str(error).splitlines()[0]}", flush=True)
        if meeting:
            meeting.phase("an error")  # which rank is gone, those know that wait
        return 1
    failed = meeting.tell("verdict", bool(findings)) if meeting else bool(findings)
    if meeting:
        meeting.close()
    return int(failed)


def _rounds(
    device: torch.device, axis: Axis, mib: Sequence[float] | None, meeting: Meeting | None
) -> list[Finding]:
    """What is wrong, on rank 0, which reports it. What is slow is measured once more."""
    sizes = mib or ((1, 4) if device.type == "cpu" else (1, 256))
    messages = tuple(int(each * MIB / 4) * 4 or 4 for each in sizes)
    rounds: list[list[Measured]] = []
    again = True
    while again:
        mine = measure(device, axis, messages, meeting.phase if meeting else lambda name: None)
        libraries = devices.libraries(device)
        facts = {
            "host": socket.gethostname(),
            **clocks(libraries.pop("uuid", None)),
            **libraries,
        }
        own = [asdict(mine), facts]
        shared = meeting.share(f"round {len(rounds)}", own) if meeting else [own]
        rounds.append([Measured.read(each) for each, _ in shared])
        kinds = [fact["device"] for _, fact in shared]
        again = len(rounds) < 2 and not axis.rank and bool(slow(rounds[0], kinds))
        again = meeting.tell(f"after round {len(rounds)}", again) if meeting else again
    if axis.rank:
        return []
    findings = judge(rounds, kinds)
    print("\n".join(report(rounds[-1], [fact for _, fact in shared], findings)), flush=True)
    return findings


def clocks(uuid: str | None) -> dict[str, str]:
    """What nvidia-smi says of the GPU after its work: driver, clocks in MHz, degrees Celsius."""
    program = shutil.which("nvidia-smi")
    if uuid is None or program is None:
        return {}
    command = [program, f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [*command, f"--id=GPU-{uuid}"], capture_output=True, text=True, timeout=30, check=True
        )
        return dict(zip(SMI, (each.strip() for each in done.stdout.split(",")), strict=True))
    return {}


def report(
    ranks: Sequence[Measured], facts: Sequence[Mapping[str, str]], findings: Sequence[Finding]
) -> list[str]:
    """What rank 0 prints: facts, a table of operations, what is wrong."""
    hosts = {fact["host"] for fact in facts}
    lines = [f"ranks {len(facts)} | hosts {len(hosts)}"]
    for name in dict.fromkeys(name for fact in facts for name in fact if name != "host"):
        values = Counter(fact.get(name, "unknown") for fact in facts)
        if len(values) == 1:
            lines[0] += f" | {name} {next(iter(values))}"
        elif name in MEASURED:
            lines.append(f"{name}: {' '.join(fact.get(name, '?') for fact in facts)}")
        else:
            shown = [f"{value} ({count} ranks)" for value, count in values.most_common()]
            lines.append(f"{name} differs: {', '.join(shown)}")
    lines.append(f"{'operation':<32}{'median ms':>10}{'MAD':>8}{'slowest':>10}  rank")
    for name in dict.fromkeys(name for each in ranks for name in each.times()):
        times = {rank: 1e3 * median(each.times()[name]) for rank, each in enumerate(ranks)}
        last = max(times, key=times.__getitem__)
        middle, deviation = spread(times.values())
        lines.append(f"{name:<32}{middle:>10.3g}{deviation:>8.2g}{times[last]:>10.3g}  {last}")
    lines += [finding.line([fact["host"] for fact in facts]) for finding in findings]
    return lines if findings else [*lines, "all is well"]
