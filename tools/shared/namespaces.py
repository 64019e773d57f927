"""Two network namespaces with a link that can be cut, for programs that disturb ranks. Needs Linux,
root, unshare, nsenter and ip."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time


def available() -> bool:
    """Are there network namespaces for this user?"""
    return os.geteuid() == 0 and all(shutil.which(name) for name in ("unshare", "ip", "nsenter"))


class Network:
    """Two namespaces with a link between them: all ranks but the culprit are in the first."""

    def __init__(self) -> None:
        self.pids = [subprocess.Popen(["unshare", "--net", "sleep", "1000"]).pid for _ in range(2)]
        while any(
            os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
            for pid in self.pids
        ):
            time.sleep(0.01)
        first, second = map(str, self.pids)
        ip = ["ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "eth0"]
        _call(*ip, "netns", second)
        for number, pid in enumerate((first, second), 1):
            for words in (
                ["ip", "addr", "add", f"10.99.0.{number}/24", "dev", "eth0"],
                ["ip", "link", "set", "eth0", "up"],
                ["ip", "link", "set", "lo", "up"],
            ):
                _call("nsenter", "--net", "-t", pid, *words)

    def enter(self, number: int) -> list[str]:
        """The words before a command that runs in the namespace."""
        return ["nsenter", "--net", "-t", str(self.pids[number])]

    def close(self) -> None:
        """Both end."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _call(*words: str) -> None:
    subprocess.run(words, check=True)
