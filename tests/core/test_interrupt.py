"""Ctrl-C at any moment of a program, its imports above all: one line, exit code 130, no
traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkrun import ROOT
from tests.load_tool import programs

# Sends SIGINT when the module named in INTERRUPT_AT is imported; `next`: the first one after the
# handler is installed.
HOOK = '''"""Ctrl-C at an import."""
import os, signal, sys

at = os.environ["INTERRUPT_AT"]
sent = []

def hook(event, values):
    if event == "import" and not sent and "signal" in sys.modules:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and handler is not signal.default_int_handler and at in ("next", values[0]):
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(hook)
'''
PROGRAM = '''"""A program with a slow import, a main function that cleans up, and a fork."""
import sys
sys.path.insert(0, {root!r})
from megatron import interrupt
if __name__ == "__main__":
    interrupt.exit_at_once()
import os, signal, time

def stop():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)

def main(argv):
    try:
        {body}
    finally:
        print("cleaned up", flush=True)
    return 3

if __name__ == "__main__":
    {before}
    sys.exit(interrupt.run(main, sys.argv[1:]))
'''


def default_signals() -> None:
    """As a terminal's shell starts a program, also where the tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(words: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A finished program."""
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        env={**os.environ, **environ},
        preexec_fn=default_signals,
    )


PROGRAMS = ["pretrain_gpt.py", *(f"tools/{name}.py" for name in programs())]


@pytest.mark.parametrize("program", PROGRAMS)
def test_during_the_imports_of(program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    done = start(
        [str(ROOT / program), "--help"], tmp_path, PYTHONPATH=str(tmp_path), INTERRUPT_AT="next"
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("interrupted") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "body, before, code, out, err",
    [
        ("pass", "pass", 3, "cleaned up\n", ""),
        # as an exception: what is open gets closed
        ("stop()", "pass", 130, "cleaned up\n", "interrupted\n"),
        ("pass", "stop()", 130, "", "interrupted\n"),
        # an import may swallow an exception
        ("import slow", "pass", 130, "", "interrupted\n"),
        (
            "pass",
            "signal.signal(signal.SIGINT, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGINT)",
            3,
            "cleaned up\n",
            "",
        ),
        # a worker leaves in silence
        ("pass", "os.fork() or stop(); os.wait()", 3, "cleaned up\n", ""),
    ],
)
def test_one_line_and_130(body, before, code, out, err, tmp_path):
    (tmp_path / "slow.py").write_text(
        "try:\n    from __main__ import stop\n    stop()\nexcept BaseException:\n    pass\n"
    )
    (tmp_path / "program.py").write_text(PROGRAM.format(root=str(ROOT), body=body, before=before))
    done = start([str(tmp_path / "program.py")], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


ENDLESS = """
import sys
from megatron import interrupt

def main(argv):
    try:
        while True:
            print("a line")
    except OSError as error:  # of files
        print(f"error: {error}", file=sys.stderr)
        return 2

if __name__ == "__main__":
    sys.exit(interrupt.run(main, sys.argv[1:]))
"""


def test_a_reader_that_closes_the_pipe_ends_the_program_quietly(tmp_path):
    """As `program | head` does."""
    program = tmp_path / "program.py"
    program.write_text(ENDLESS)
    with subprocess.Popen(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout.readline() == b"a line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_stream_that_was_closed_is_the_null_device(closed):
    """`exit_at_once` sees to it, which each program calls: test_during_the_imports_of."""

    def close() -> None:
        for number in closed:
            os.close(number)

    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "pretrain_gpt.py"),
            "--help" if closed == (1,) else "--no-such-flag",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=close,
    )
    assert done.returncode == (0 if closed == (1,) else 2)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("program", ["pretrain_gpt.py", "tools/preprocess_data.py"])
def test_a_python_without_numpy_is_one_line(program, tmp_path):
    """-I -S: no installed packages, as outside of the environment."""
    words = ["-I", "-S", str(ROOT / program), *"--mock-data --vocab-size 9".split()]
    if program == "pretrain_gpt.py":
        words += [f"@{ROOT}/examples/quickstart/gpt.args"]
    start_of = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = {words[2:]!r}; "
    code = f"{start_of}runpy.run_path(sys.argv[0], run_name='__main__')"
    done = start(["-I", "-S", "-c", code], tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.endswith("[package-missing]\n")
