"""Command lines that are refused or noted: the code of what each says, and the flags that the line
names.

They are rows of cases.txt, each with the texts below it that `python -m tests.rewrite_messages`
writes.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron import addons
from megatron.config import command_line
from megatron.features.registry import RunConfig
from tests.core.config.checks.checked_flags import BASE
from tests.forkrun import ROOT
from tests.problems import CODE

CORE = Path(__file__).parent / "cases.txt"
TEXT = "    "  # begins the lines of texts
BASES = {
    "": BASE,
    "samples": BASE.replace("--train-iters 10", "--train-samples 100"),
    "long": BASE.replace("--train-iters 10", "--train-iters 1000"),
    "files": BASE.replace(
        "--mock-data --vocab-size 100", "--vocab-file vocab.json --merge-file merges.txt"
    ),
}


class Case(NamedTuple):
    """`flags` added to `base` on `world` ranks, without the flag `drop`: a line with `code` that
    names `named`. `base`: one of BASES, or the flag in place of --mock-data.

    Words NAME=VALUE among the flags are set in the environment.
    """

    code: str
    named: list[str]
    flags: list[str]
    world: int = 1
    base: str = ""
    drop: str = ""

    def __str__(self) -> str:
        base = f"[{self.base}] " * bool(self.base)
        without = f"(without {self.drop}) " * bool(self.drop)
        ranks = f" ({self.world} ranks)" * (self.world > 1)
        return f"{base}{without}{shlex.join(self.flags)}{ranks}"

    def lines(self) -> list[str]:
        """What the program says: its problems or, where there is none, its notes about one."""
        given = [word for word in self.flags if re.match(r"[A-Z_]+=", word)]
        ranks = {"WORLD_SIZE": str(self.world), "RANK": "0"} if self.world > 1 else {}
        environ = {**ranks, **dict(word.split("=", 1) for word in given)}
        words = [word for word in self.flags if word not in given]
        base = BASES.get(self.base) or BASE.replace("--mock-data", self.base)
        if self.drop:
            base = re.sub(rf"{self.drop}( [^-]\S*)?( |$)", "", base)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                notes = command_line.read([*base.split(), *words], environ, tree=RunConfig).notes
                return [note for note in notes if CODE.search(note)]
            except SystemExit as left:
                assert left.code == 2
        return [line.removeprefix("error: ") for line in said.getvalue().splitlines()]


def files() -> list[Path]:
    """The files of cases: the core's, and those of features and add-ons."""
    return [CORE, *sorted(ROOT.glob("tests/features/*/cases.txt")), *addons.files("cases.txt")]


def rows(file: Path) -> Iterator[tuple[str, Case | None]]:
    """The lines of a file without the texts, and the case that a line is."""
    base = ""
    for row in file.read_text(encoding="utf-8").splitlines():
        case = None
        if row.startswith("=="):
            base = row.rpartition("(")[2].rstrip(")") if row.endswith(")") else ""
        elif row and not row.startswith(("#", TEXT)):
            code, named, flags, *more = row.split(" | ")
            ranks = [int(each.split()[0]) for each in more if each.endswith(" ranks")] or [1]
            drop = [each.split()[1] for each in more if each.startswith("without ")] or [""]
            case = Case(code, named.split(), shlex.split(flags), ranks[0], base, drop[0])
        if not row.startswith(TEXT):
            yield row, case


def texts(file: Path) -> list[tuple[Case, list[str]]]:
    """All cases of a file, and what is written below each."""
    below: list[list[str]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(TEXT):
            below[-1].append(line.removeprefix(TEXT))
        else:
            below.append([])
    each = zip(rows(file), below, strict=True)
    return [(case, lines) for (_, case), lines in each if case]


def lay_out(folder: Path) -> None:
    """Write the files and directories that the cases name, all of them empty or nearly so."""
    for name in ("books_text_document", "web_text_document"):
        for end in (".idx", ".bin"):
            _write(folder / "d" / f"{name}{end}")
    for name in ("d/half.bin", "d/raw.jsonl", "merges.txt", "empty.txt", "hf/config.json"):
        _write(folder / name)
    _write(folder / "vocab.json", "{}")
    _write(folder / "bad.json", "{train: 1}")
    _write(folder / "keys.json", '{"training": ["a"]}')
    _write(folder / "stage4.json", '{"zero_optimization": {"stage": 4}}')
    _write(folder / "batch.json", '{"train_micro_batch_size_per_gpu": 8}')
    _write(folder / "list.json", '{"train": {"a": 1}}')
    for name in ("void", "packed/none", "run/iter_0000010", "run/iter_0000020"):
        (folder / name).mkdir(parents=True)
    (folder / "bytes.args").write_bytes(b"\xff\xfe\0")
    _write(folder / "quote.args", "--seed 'open\n")
    _write(folder / "loop.args", "@loop.args")
    _write(folder / "run/latest_checkpointed_iteration.txt", "20")
    _write(folder / "broken/iter_0000010/args")
    for name in (
        *("run/iter_0000010", "run/iter_0000020", "ours/iter_0000010", "older/iter_0000020"),
    ):
        _write(folder / name / "manifest.json")
    args = (
        BASE + " --vocab-file gone.json --tokenizer-type GPT2BPETokenizer --merge-file merges.txt"
    )
    _write(folder / "ours/latest_checkpointed_iteration.txt", "10")
    _write(folder / "ours/iter_0000010/args", args.replace("--mock-data --vocab-size 100", ""))
    _write(folder / "older/latest_checkpointed_iteration.txt", "20")
    (folder / "older/iter_0000020/args").mkdir(parents=True)
    for name, iteration in (("release", "release"), ("7", "iter_0000007")):
        (folder / name / iteration / "mp_rank_00").mkdir(parents=True)
        _write(folder / name / "latest_checkpointed_iteration.txt", name)
    for name in ("torch_dist/latest_checkpointed_iteration.txt", "iter_7/.metadata"):
        _write(folder / name, "7")
    _write(folder / "torch_dist/iter_0000007/.metadata")
    _write(folder / "zarr/latest_checkpointed_iteration.txt", "7")
    _write(folder / "zarr/iter_0000007/metadata.json", '{"sharded_backend": "zarr"}')
    _write(folder / "zero/latest", "global_step9")
    _write(folder / "zero/global_step9/mp_rank_00_model_states.pt")
    for name in ("internlm/9/model_tp0_pp0.pt", "internlm/10/model_tp0_pp0.pt"):
        _write(folder / name)
    for name in ("packed/en/a.bin", "packed/zh/b.bin", "packed/zh/b.bin.meta"):
        _write(folder / name)


def _write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
