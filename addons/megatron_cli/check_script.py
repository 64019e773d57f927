"""Say what a launch script of Megatron-LM would do here: check_script.py FILE [NAME=VALUE ...]

FILE is a shell script, a YAML recipe of Megatron's CI, or a pretraining script in Python. It is
read and never executed. Printed of its last pretrain_gpt.py command line: a verdict, everything
that keeps it from running, what differs from Megatron, the other flags, and the command that starts
it; with --device-memory, whether it fits. NAME=VALUE sets a variable
that the script expects. Of Python: whether it starts, and what keeps it from that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import re
import signal
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron import addons, console
from megatron.args_file import expand_files
from megatron.arguments import Parser, arg, is_flag, parse
from megatron.config import command_line
from megatron.config.plan import fit
from megatron.config.plan.plan import make_plan
from megatron.data.tokenizers.planned import planned_vocabulary
from megatron.features.registry import RunConfig
from megatron.problems import Problems, printable
from megatron.small_files import read_text
from tools.shared.program import complain, read

from . import flags as megatron_flags
from .own_flags import adding, is_own, own_flags
from .read_script import Script, read_recipe, read_shell, shown

MAX_BYTES = 1 << 17  # of a script
MAX_SECONDS = 1.0  # of computing time to follow it; a usual one takes milliseconds
ON_A_NODE = 8  # ranks that one torchrun starts
_CODE = re.compile(r" \[[a-z0-9-]+\]$")
OWN = "of the script itself"
_NO_BREAK = "\0"  # a blank at which a line is not broken


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    script: Path = arg(position="positional", metavar="FILE", parse=Path)
    """a shell script, a YAML recipe, or a Python script"""

    variables: tuple[str, ...] = arg((), position="positional", metavar="NAME=VALUE")
    """variables that the script expects"""

    world_size: int | None = arg(None, minimum=1)
    """number of ranks (default: that of the launcher in the script, else the fewest)"""

    device_memory: float | None = arg(None, above=0, metavar="GIB")
    """say whether each rank fits a GPU of GIB GiB, and what needs less; exit code 1 if not"""


def _wrong(options: Options) -> list[str]:
    return [
        f"{each}: not NAME=VALUE [value-malformed]" for each in options.variables if "=" not in each
    ]


@contextlib.contextmanager
def _bounded(script: Path) -> Iterator[None]:
    """Name the script in errors, and end what takes more than MAX_SECONDS, be it within one regular
    expression. Raises ValueError."""

    late = ""

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal late
        late = f"takes more than {MAX_SECONDS} s of computing time"
        raise TimeoutError(late)

    before = signal.signal(signal.SIGPROF, stop)
    # again and again, because code that it interrupts may handle errors
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS, 0.1)
    try:
        yield
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError, SystemError) as error:
        raise ValueError(
            f"{script}: cannot be followed ({late or error}); give the command that starts "
            "training in a script of its own [script-not-followed]"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fate(flags: Parser, words: Sequence[str]) -> tuple[str, str]:
    """What happens to one flag with its values: (kind, what differs)."""
    spelling = words[0].partition("=")[0]
    flag = flags.find(spelling)
    if flag is None:
        return ("no effect", "") if megatron_flags.ignores(spelling) else ("refused", "")
    parsed = parse(flags, list(words))
    if parsed.problems:
        return "refused", ""
    foreign = megatron_flags.FOREIGN.get(flag.name)
    value = parsed.typed.get(flag.name)
    if foreign is None or foreign.shown(value) is None:  # Megatron's default
        return "supported", ""
    if foreign.refuses(value):
        return "refused", ""
    if foreign.verdict == megatron_flags.READ_AS:
        words = foreign.words(value, f"{value}/--seq-length")
        return "differs", f"read as {words}"
    if foreign.verdict == megatron_flags.MORE:
        return "differs", f"more than requested: {foreign.text}"
    return "no effect", foreign.text


def table(words: Sequence[str], own: Collection[str] = ()) -> dict[str, list[tuple[str, str]]]:
    """{kind: (flag with its values, what differs)}; `own` are flags of the script itself."""
    flags = command_line.parser(RunConfig)
    starts = [index for index, word in enumerate(words) if index == 0 or is_flag(word)]
    rows: dict[str, list[tuple[str, str]]] = {}
    for first, end in zip(starts, [*starts[1:], len(words)], strict=True) if words else ():
        each = words[first:end]
        kind, text = (OWN, "") if is_own(each, own) else fate(flags, each)
        rows.setdefault(kind, []).append((shown(list(words[first:end])), text))
    return rows


def fewest_ranks(words: Sequence[str]) -> int:
    """The ranks of one copy of the model."""
    typed = parse(command_line.parser(RunConfig), list(words)).typed
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return math.prod(max(1, typed.get(name, 1)) for name in sizes)


def memory(words: Sequence[str], ranks: int, limit: float) -> tuple[list[str], bool]:
    """(lines, does it fit?) of an accepted command line on devices of `limit` GiB."""
    line, problems = command_line.planned([*words, "--device", "cuda"], ranks, RunConfig)
    if problems:
        return section("memory", (_CODE.sub("", each) for each in problems)), False
    size, source = planned_vocabulary(line.config.data)
    plan = make_plan(line.config, ranks, size)
    fits, text = fit.verdict(line.config, plan, int(limit * fit.GIB))
    lines = textwrap.wrap(f"{text} (vocabulary: {source})", 96, break_on_hyphens=False)
    return section("memory", lines), fits


def report(
    script: Script, world_size: int | None, beside: Path, device_memory: float | None = None
) -> tuple[list[str], bool]:
    """(lines, is it accepted, and does it fit?) of a command line in the file `beside`. Raises
    ValueError for an @FILE elsewhere, of which messages would show words."""
    with contextlib.suppress(Problems):  # of which `judge` speaks
        expand_files(script.words, (Path.cwd(), beside.parent))
    ranks = world_size or script.ranks or fewest_ranks(script.words)
    own, about_own = own_flags(script, beside, command_line.parser(RunConfig))
    provider = functools.partial(adding, own) if own else None
    notes, problems = command_line.judge(script.words, ranks, RunConfig, provider)
    rows = table(script.words, own)
    count = sum(map(len, rows.values()))
    counts = [counted(len(problems), "problem")] * bool(problems)
    counts += [counted(count, "flag"), counted(ranks, "rank")]
    lines = [f"{'refused' if problems else 'accepted'}: {', '.join(counts)}"]
    if not (world_size or script.ranks):
        lines[0] += f" (world size not found, assumed {ranks}; --world-size N says it)"
    if script.unresolved:
        names = ", ".join(script.unresolved)
        lines += [f"not set in the script: {names}; give NAME=VALUE for each"]
    lines += about_own
    lines += section("what keeps it from running", (_CODE.sub("", each) for each in problems))
    differing = (f"{flag}: {text}" for flag, text in rows.get("differs", ()))
    lines += section("what differs", (row for line in differing for row in textwrap.wrap(line, 96)))
    if not problems:
        shown_notes = (note for note in notes if not note.startswith("flags of Megatron-LM"))
        lines += section("notes", (_CODE.sub("", note) for note in shown_notes))
    for kind in (OWN, "no effect", "supported"):
        flags = [flag.replace(" ", _NO_BREAK) for flag, _ in rows.get(kind, ())]
        text = textwrap.fill("  ".join(flags), 96, break_on_hyphens=False, break_long_words=False)
        lines += section(f"{kind} ({len(flags)})", text.replace(_NO_BREAK, " ").splitlines())
    if problems:
        return lines, False
    words = shown(script.words)
    program = script.program if own else program_path(script.program)
    fits = True
    if device_memory is not None:
        if own:  # it may build another model
            lines += section("memory", ["not known of a script with flags of its own"])
        else:
            about, fits = memory(script.words, ranks, device_memory)
            lines += about
    with_program = f" with {program}" * (program != script.program)
    if ranks > ON_A_NODE:
        how = f"start it as the script does{with_program}"
        if device_memory is not None:
            return [*lines, "", how], fits
        judged = f"--dry-run --world-size {ranks} --device cuda --device-memory 80"
        start = f"{how}; does it fit GPUs of 80 GiB? (on any machine)"
        return [*lines, "", f"{start}:", f"python {program} {words} {judged}"], True
    start = f"torchrun --nproc-per-node {ranks}" if ranks > 1 else "python"
    return [*lines, "", f"{start} {program} {words}"], fits


def program_path(program: str) -> str:
    """The path of this suite's pretrain_gpt.py for that of a Megatron-LM; another script's as it
    is."""
    pretrain = console.ROOT / "pretrain_gpt.py"
    return os.path.relpath(pretrain) if Path(program).name == pretrain.name else program


def counted(number: int, noun: str) -> str:
    """`1 flag`, `2 flags`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def section(title: str, lines: Iterable[str]) -> list[str]:
    """Lines under a title; none where there are none."""
    indented = [f"  {line}" for line in lines]
    return ["", f"{title}:", *indented] if indented else []


def report_python(text: str, path: Path) -> int:
    """Print what keeps a Python script from starting; the exit code."""
    checks = addons.modules("check_python")
    if not checks:
        line = "an add-on that is not there reads scripts in Python; install the suite with it"
        print(f"error: {path}: {line} [feature-not-installed]", file=sys.stderr)
        return 2
    with _bounded(path):
        names, problems = importlib.import_module(checks[0]).check(text, path)
    if not names:
        raise ValueError(
            f"{path}: imports nothing of Megatron; give the script that does, or the shell script "
            "that starts it [no-launch-found]"
        )
    counts = [counted(len(problems), "problem")] * bool(problems)
    counts.append(f"{counted(len(names), 'name')} of Megatron")
    print(f"{'refused' if problems else 'accepted'}: {', '.join(counts)}")
    print("\n".join(section("what keeps it from running", problems)))
    return 1 if problems else 0


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 accepted, 1 refused, too large for --device-memory or no command line found, 2
    a wrong command line."""
    options = read(Options, argv, prog="check_script.py", description=__doc__ or "", check=_wrong)
    try:
        text = read_text(options.script, errors="replace", limit=MAX_BYTES)
        if options.script.suffix == ".py":
            return report_python(text, options.script)
        script = followed(text, options)
        if not script.launched:
            raise ValueError(
                f"{options.script}: no command line of pretrain_gpt.py found; it is looked for in "
                "shell scripts and below MODEL_ARGS: in YAML [no-launch-found]"
            )
        lines, accepted = report(script, options.world_size, options.script, options.device_memory)
    except (ValueError, OSError) as error:
        complain(error)
        return 1
    print(printable("\n".join(lines)))
    return 0 if accepted else 1


def followed(text: str, options: Options) -> Script:
    """What a shell script or a recipe starts. Raises ValueError."""
    variables = dict(each.split("=", 1) for each in options.variables)
    recipe = options.script.suffix in (".yaml", ".yml")
    try:
        with _bounded(options.script):
            return (
                read_recipe(text) if recipe else read_shell(text, variables, options.script.parent)
            )
    except ModuleNotFoundError as error:
        raise ValueError(
            f"check_script.py needs {error.name}; run: pip install tree-sitter tree-sitter-bash "
            "[package-missing]"
        ) from None
