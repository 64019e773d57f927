"""What holds for every test: one thread, and no unexplained skip. Knows nothing of what the tests
are about."""

import gc
import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere: two busy cores shared by several ranks are slower with more
# threads, not faster.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
NEEDS_HARDWARE = re.compile(r"^needs (a|an|\d+) (GPU|CUDA device|CPU with (AMX|AVX\w*|bf16))s?\b")
# What no machine can be asked to have.
NEEDS_SYSTEM = re.compile(
    r"^needs (SLURM|Open MPI|MPICH|Chromium|bash|a C\+\+ compiler|Linux|root|/proc|/dev/full)"
)
# tests/house/test_built.py fails for it where there is a compiler.
NOT_BUILT = re.compile(r"^[\w.]+_(v3|v4|cpp) is not built\b")
NOT_INSTALLED = re.compile(r"could not import '([\w.]+)'")
# Libraries that no machine without a GPU can be asked to have.
GPU_LIBRARIES = {"transformer_engine", "apex", "flash_attn"}
# What requirements/peers.txt installs, by the names of the imports. A test that needs one carries
# the mark `peers`.
PEERS = {
    "megatron.core",
    "transformers",
    "safetensors",
    "gigatoken",
    "orjson",
    "zstandard",
    "pyarrow",
    "punkt",
    "ray",
    "s3fs",
    "moto",
    "wandb",
    "lm_eval",
    "accelerate",
    "fastapi",
    "uvicorn",
    "openai",
    "httpx",
    "lagent",
    "gguf",
    "shtab",
    "datasets",
    "huggingface_hub",
    "xllamacpp",
}
MARKED = "peers_marked"


def is_peer(module: str) -> bool:
    """Whether this module belongs to a package of requirements/peers.txt."""
    return any(module == peer or module.startswith(f"{peer}.") for peer in PEERS)


def is_allowed(reason: str, peers_required: bool, marked: bool) -> bool:
    """Whether a test may be skipped for this reason: the machine lacks something, or a package is
    missing that is not required. A test that needs a peer must say so by its mark, so that `-m peers` finds it."""
    if any(one.search(reason) for one in (NEEDS_HARDWARE, NEEDS_SYSTEM, NOT_BUILT)):
        return True
    library = NOT_INSTALLED.search(reason)
    if library is None or library[1].split(".")[0] in GPU_LIBRARIES:
        return library is not None
    return not peers_required and (marked or not is_peer(library[1]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One more than there are processors: some tests wait, for a disk, a clock or another process."""
    return (os.cpu_count() or 1) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """The rule of a machine that has the peers."""
    parser.addoption(
        "--require-peers", action="store_true", help="a skip for a missing package is a failure"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, with the one reason that is allowed for it, on a machine
    without one."""
    for item in items:
        if item.get_closest_marker("peers"):
            item.user_properties.append((MARKED, True))
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    from megatron import device

    if device.device_type("auto") != "cuda":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection(session: pytest.Session) -> None:
    """Where the whole suite is asked for, the server of `tests.forkrun` starts while tests are
    collected; with pytest-xdist each worker has its own, and the process that only hears of the
    tests has none."""
    config = session.config
    worker = hasattr(config, "workerinput")
    if config.getoption("numprocesses", None) and not worker:
        return
    gc.disable()
    if (
        worker or config.args_source is not pytest.Config.ArgsSource.ARGS
    ) and not config.option.collectonly:
        from tests import forkrun

        forkrun.start_server()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no collection of garbage, above all none that a test asks for,
    searches it again."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """Like tmp_path, but in memory where the system has such a place: a killed process loses
    nothing there either."""
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    path = Path(tempfile.mkdtemp(dir=home, prefix="checkpoint-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def warm_python() -> str:
    """A `python` that need not load torch (tests/warm.py)."""
    from tests import warm

    return warm.python("torch.distributed.run")


@pytest.fixture(autouse=True)
def tensors_are_repeatable() -> None:
    """A test that draws tensors without a seed draws the same ones in any order of the tests."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def details_are_printed() -> None:
    """A run inside a test process may have set the level for the process (--log-format short); no
    other test sees that."""
    logging.getLogger("megatron.details").setLevel(logging.INFO)


class _Outcomes:
    """Notes of each test why it was skipped, or nothing if it ran; also of whole files that skip
    while they are collected, which pytest-xdist reports once for each worker."""

    def __init__(self, config: pytest.Config):
        self.found: dict[str, str] = {}
        self.required = config.getoption("--require-peers")
        self.bare = not any(
            importlib.util.find_spec(peer.split(".")[0]) for peer in PEERS - {"megatron.core"}
        )
        self.wrong: dict[str, str] = {}

    def _skipped(self, report: pytest.TestReport | pytest.CollectReport, marked: bool) -> None:
        """`longrepr` of a skip is (path, line, reason)."""
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.found[report.nodeid] = reason = reason.removeprefix("Skipped: ")
        if is_allowed(reason, self.required, marked=True) and not is_allowed(
            reason, self.required, marked
        ):
            self.wrong[report.nodeid] = (
                f"skip not allowed here: {report.nodeid}: {reason} (it lacks the mark peers)"
            )
        elif not is_allowed(reason, self.required, marked):
            self.wrong[report.nodeid] = f"skip not allowed here: {report.nodeid}: {reason}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        marked = MARKED in dict(report.user_properties)
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped(report, marked)
        elif report.when == "call":
            self.found[report.nodeid] = ""
            if marked and self.bare and report.passed:
                self.wrong[report.nodeid] = f"marked peers, but needs none: {report.nodeid}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped(report, marked=True)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A skip without an allowed reason fails the session."""
        if exitstatus == pytest.ExitCode.OK and self.wrong:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many ran and were skipped, and which skips are not allowed."""
        skipped = sum(bool(reason) for reason in self.found.values())
        terminalreporter.write_line(f"ran {len(self.found) - skipped} tests, skipped {skipped}")
        for line in self.wrong.values():
            terminalreporter.write_line(line, red=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Count from the first report on, in the process that hears of all tests."""
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Outcomes(session.config), "ran-and-skipped")
