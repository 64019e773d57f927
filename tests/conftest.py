"""What holds for every test: one thread, and no unexplained skip. Knows nothing of what the tests are about."""

from __future__ import annotations

import gc
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere: two busy cores shared by several ranks are slower with more threads, not faster.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
NEEDS_HARDWARE = re.compile(r"^needs (a|an|\d+) (GPU|CUDA device|CPU with (AMX|AVX2))s?\b")
NOT_INSTALLED = re.compile(r"could not import '([\w.]+)'")
# Libraries that no machine without a GPU can be asked to have; every other one is installed by .ci/run.
GPU_LIBRARIES = {"transformer_engine", "apex", "flash_attn"}
SKIPS = pytest.StashKey[list[tuple[str, str]]]()
RAN = pytest.StashKey[list[int]]()


def is_allowed(reason: str, in_ci: bool) -> bool:
    """Whether a test may be skipped for this reason: hardware or an optional library is missing. In CI no library."""
    if NEEDS_HARDWARE.search(reason):
        return True
    library = NOT_INSTALLED.search(reason)
    return library is not None and (not in_ci or library[1].split(".")[0] in GPU_LIBRARIES)


def pytest_configure(config: pytest.Config) -> None:
    """Start the counts of this session."""
    config.stash[SKIPS] = []
    config.stash[RAN] = [0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, with the one reason that is allowed for it, on a machine without one."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    from megatron import device

    if device.choose_device("auto", 0).type != "cuda":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection(session: pytest.Session) -> None:
    """Where the whole suite is asked for, the server of `tests.forkrun` starts while tests are collected."""
    gc.disable()
    if session.config.args_source is not pytest.Config.ArgsSource.ARGS and not session.config.option.collectonly:
        from tests import forkrun

        forkrun.start_server()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no collection of garbage, above all none that a test asks for, searches it again."""
    gc.freeze()
    gc.enable()


def _count(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    """Note one skip with its reason; `longrepr` of a skip is (path, line, reason)."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    config.stash[SKIPS].append((report.nodeid, reason.removeprefix("Skipped: ")))


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """Like tmp_path, but in memory where the system has such a place: a killed process loses nothing there either."""
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    path = Path(tempfile.mkdtemp(dir=home, prefix="checkpoint-test-"))
    yield path
    shutil.rmtree(path)


class _Counter:
    """Counts what ran and what was skipped, also in whole files that skip while they are collected."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            _count(self.config, report)
        elif report.when == "call":
            self.config.stash[RAN][0] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            _count(self.config, report)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Count from the first report on."""
    session.config.pluginmanager.register(_Counter(session.config), "ran-and-skipped")


def _unexplained(config: pytest.Config) -> list[tuple[str, str]]:
    in_ci = os.environ.get("CI", "").lower() in ("1", "true")
    return [(test, reason) for test, reason in config.stash[SKIPS] if not is_allowed(reason, in_ci)]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A skip without an allowed reason fails the session."""
    if exitstatus == pytest.ExitCode.OK and _unexplained(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many ran and were skipped, and which skips are not allowed."""
    skips = config.stash[SKIPS]
    terminalreporter.write_line(f"ran {config.stash[RAN][0]} tests, skipped {len(skips)}")
    for test, reason in _unexplained(config):
        terminalreporter.write_line(f"skip not allowed here: {test}: {reason}", red=True)
