#!/usr/bin/env python
"""Tokenize .jsonl files into the .bin/.idx pairs that training reads. Flags and output names are Megatron's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs by path, uninstalled

from megatron import log  # noqa: E402
from megatron.arguments import Flag, Problems, arg, build_parser, config_from, parse_typed  # noqa: E402
from megatron.data.indexed_dataset import IndexedDatasetBuilder, bin_path, idx_path, optimal_dtype  # noqa: E402
from megatron.data.jsonl import Chunk, input_files, read_chunks  # noqa: E402
from megatron.data.preprocess import Encoded, Job, encode_all, tokenizer_of  # noqa: E402
from megatron.data.tokenizer import TokenizerFlags  # noqa: E402

SENTENCES = "sentences are not split here yet; leave it away, or split them beforehand and give the key a list of strings"
NO_SEARCH = "the best number of workers is not searched for; give --workers, one for each CPU core"
REFUSED = {
    "--split-sentences": SENTENCES,
    "--keep-newlines": SENTENCES,
    "--lang": SENTENCES,
    "--find-optimal-num-workers": NO_SEARCH,
    "--workers-to-check": NO_SEARCH,
    "--max-documents": NO_SEARCH,
    "--performance-dir": NO_SEARCH,
}
SWITCHES = ("--split-sentences", "--keep-newlines", "--find-optimal-num-workers")


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """What is read."""

    input: tuple[str, ...] = arg((), help="files of one JSON object a line, plain or gzip; globs in quotes are expanded")
    json_keys: tuple[str, ...] = arg(("text",), help="keys whose text is tokenized, each into a pair of its own")
    max_bad_records: int = arg(0, help="lines that may be bad (they are named and skipped) before the run fails")


@dataclass(frozen=True, kw_only=True)
class WriteConfig:
    """What is written: PREFIX_KEY_document.bin and .idx."""

    output_prefix: str = arg("", help="path that the names of the output files begin with")
    append_eod: bool = arg(False, help="end each document with the end-of-document token")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How it is done."""

    workers: int | None = arg(None, help="processes that tokenize (default: one for each CPU core)")
    partitions: int = arg(1, help="write documents i, i + N, i + 2N, ... together, as Megatron orders them with N > 1")
    keep_sequential_samples: bool = arg(False, help="keep the order of the input with --partitions, too")
    log_interval: int = arg(1000, help="documents between two lines about the speed")


@dataclass(frozen=True)
class Config:
    """The command line."""

    read: ReadConfig
    tokenizer: TokenizerFlags
    write: WriteConfig
    run: RunConfig


class Stopped(BaseException):
    """A signal asked this process to stop."""


class Stop:
    """Turns SIGINT and SIGTERM into `Stopped`, once; a part that must not be torn holds them back until it is done."""

    def __init__(self) -> None:
        self.signal = 0
        self._held = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self)

    def __call__(self, number: int, frame: object) -> None:
        if not self.signal:
            self.signal = number
            if not self._held:
                raise Stopped

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is stopped inside; a signal that came takes effect at the end."""
        self._held = True
        yield
        self._held = False
        if self.signal:
            raise Stopped


class Progress:
    """Megatron's line on stderr every `interval` documents; on a terminal also how far the input is read, and the ETA."""

    def __init__(self, interval: int, files: Sequence[str]) -> None:
        self.start = self._shown = time.time()
        self.documents = self.bytes = 0
        self._interval = interval
        self._total = sum(os.path.getsize(file) for file in files)
        self._terminal = sys.stderr.isatty()

    def add(self, sizes: Sequence[int], read: int) -> None:
        """Documents of these sizes in bytes are done; `read` bytes of the input files are behind us."""
        for size in sizes:
            self.documents += 1
            self.bytes += size
            if self.documents % self._interval == 0:
                elapsed = time.time() - self.start
                megabytes = self.bytes / elapsed / 1024 / 1024
                self._line(f"Processed {self.documents} documents ({self.documents / elapsed} docs/s, {megabytes} MB/s).")
        now = time.time()
        if self._terminal and read and now - self._shown > 0.2:
            self._shown = now
            left = (now - self.start) * max(self._total - read, 0) / read
            minutes, seconds = divmod(round(left), 60)
            sys.stderr.write(f"\r{read / max(self._total, read):6.1%} of the input, ETA {minutes}:{seconds:02d}\x1b[K")
            sys.stderr.flush()

    def _line(self, text: str) -> None:
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the display off the terminal."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")


class Output:
    """The pairs that are written, one a key, aside until `finish`; with partitions the later ones wait in a folder."""

    def __init__(self, prefix: str, job: Job, partitions: int, stack: contextlib.ExitStack) -> None:
        self.dtype = optimal_dtype(tokenizer_of(job.tokenizer).vocab_size)
        self.prefixes = [f"{prefix}_{key}_document" for key in job.keys]
        self.documents, self.tokens, self.empty = 0, [0] * len(job.keys), 0
        self._parts: list[list[str]] = [[] for _ in job.keys]
        if partitions > 1:
            folder = tempfile.mkdtemp(prefix=os.path.basename(prefix) + ".partitions-", dir=os.path.dirname(prefix) or ".")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._parts = [[os.path.join(folder, f"{key}_{n}") for n in range(1, partitions)] for key in range(len(job.keys))]
        self._builders = [
            [stack.enter_context(IndexedDatasetBuilder(path, self.dtype)) for path in (final, *parts)]
            for final, parts in zip(self.prefixes, self._parts, strict=True)
        ]

    def add(self, encoded: Encoded) -> None:
        """Append the documents of a chunk, each to its partition."""
        for key, builders in enumerate(self._builders):
            for number, sequences in enumerate(encoded.documents(key, self.dtype), self.documents):
                builder = builders[number % len(builders)]
                for sequence in sequences:
                    builder.add_item(sequence)
                    self.tokens[key] += len(sequence)
                builder.end_document()
                self.empty += not sequences
        self.documents += len(encoded.sizes)

    def finish(self, stop: Stop) -> list[str]:
        """Join the partitions and give the pairs their names; the files that were written."""
        for builders, parts in zip(self._builders, self._parts, strict=True):
            for builder, part in zip(builders[1:], parts, strict=True):
                builder.finalize()
                builders[0].add_index(part)
        with stop.held():
            for builders in self._builders:
                builders[0].finalize()
        return [path for prefix in self.prefixes for path in (bin_path(prefix), idx_path(prefix))]


class BadRecords:
    """Counts bad lines against what is allowed."""

    def __init__(self, allowed: int) -> None:
        self.count = 0
        self._allowed = allowed

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Name each bad line; raises ValueError at the first one too many."""
        for number, what in encoded.bad:
            self.count += 1
            place = f"{chunk.file}, line {number}: {what}"
            if self.count > self._allowed:
                so_far = f"bad record {self.count}, and --max-bad-records {self._allowed} are allowed"
                raise ValueError(f"{place} ({so_far}; mend the line, or allow more)")
            print(f"skipped {place}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> tuple[Config, list[str]]:
    """The command line and its input files. Raises Problems with everything that is wrong."""
    refused = [
        Flag(flag, "not supported", flag, (), "switch" if flag in SWITCHES else "list", str, None, None, why)
        for flag, why in REFUSED.items()
    ]
    parser = build_parser(Config, prog="preprocess_data.py", description=__doc__ or "", extra=refused)
    problems = [f"{flag}: {REFUSED[flag]}" for flag in dict.fromkeys(word.split("=")[0] for word in argv) if flag in REFUSED]
    try:
        typed = parse_typed(parser, argv)
    except Problems as error:
        raise Problems([*error.lines, *problems]) from None
    if typed.get("help"):
        parser.print_help()
        raise SystemExit(0)
    config = config_from(Config, typed)
    files, wrong_files = input_files(config.read.input)
    problems += wrong_files if config.read.input else ["--input: is needed; give one or more .jsonl files"]
    problems += config.tokenizer.problems() + _output_problems(config) + _number_problems(config)
    if problems:
        raise Problems(problems)
    return config, files


def _output_problems(config: Config) -> list[str]:
    prefix, keys = config.write.output_prefix, config.read.json_keys
    problems = [f"--json-keys {key}: is given twice; give each key once" for key in dict.fromkeys(keys) if keys.count(key) > 1]
    problems += [f"--json-keys {key}: a name of a file is made of it, so it cannot hold a slash" for key in keys if "/" in key]
    if not prefix:
        return [*problems, "--output-prefix: is needed; the files are called PREFIX_KEY_document.bin and .idx"]
    folder = os.path.dirname(prefix) or "."
    if not os.path.isdir(folder):
        return [*problems, f"--output-prefix {prefix}: there is no directory {folder}; make it first (mkdir -p {folder})"]
    if not os.path.basename(prefix):
        return [*problems, f"--output-prefix {prefix}: is a directory; add how the names of the files shall begin"]
    if not os.access(folder, os.W_OK):
        return [*problems, f"--output-prefix {prefix}: the directory {folder} is not writable; choose another"]
    return problems


def _number_problems(config: Config) -> list[str]:
    least = {"workers": 1, "partitions": 1, "log_interval": 1}
    numbers = [(name, getattr(config.run, name), low) for name, low in least.items()]
    numbers.append(("max_bad_records", config.read.max_bad_records, 0))
    return [
        f"--{name.replace('_', '-')} {value}: must be {low} or more"
        for name, value, low in numbers
        if value is not None and value < low
    ]


def run(config: Config, files: Sequence[str], stop: Stop) -> str:
    """Do the work; the summary line. Raises ValueError or OSError, with nothing left under or beside the final names."""
    started = time.time()
    job = Job(config.tokenizer, config.read.json_keys, config.write.append_eod)
    if job.append_eod and tokenizer_of(job.tokenizer).eod is None:
        raise ValueError(
            f"--append-eod: this {job.tokenizer.tokenizer_type} has no end-of-document token; leave the flag away, or name "
            "an eos_token in the tokenizer's own files"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    partitions = 1 if config.run.keep_sequential_samples else config.run.partitions
    bad, blank = BadRecords(config.read.max_bad_records), 0
    with contextlib.ExitStack() as stack:
        output = Output(config.write.output_prefix, job, partitions, stack)
        chunks = read_chunks(files, lambda file: print("Opening", file, flush=True))
        results = encode_all(job, chunks, config.run.workers or cores)
        stack.callback(results.close)
        progress = Progress(config.run.log_interval, files)
        stack.callback(progress.clear)
        for chunk, encoded in results:
            if started:
                print("Time to startup:", time.time() - started, flush=True)
                started = 0.0
            bad.add(chunk, encoded)
            blank += encoded.blank
            output.add(encoded)
            progress.add(encoded.sizes, chunk.read)
        for key, tokens in zip(job.keys, output.tokens, strict=True):
            if not tokens:
                what = f'no text under "{key}"' if output.documents else "no documents"
                raise ValueError(f"--input {' '.join(config.read.input)}: {what}, so there is nothing to write")
        paths = output.finish(stop)
    seconds = time.time() - progress.start
    counts = {"bad": bad.count, "blank": blank, "without text": output.empty}
    notes = "".join(f", {count} {what}" for what, count in counts.items() if count)
    tokens, size = sum(output.tokens), sum(map(os.path.getsize, paths))
    return (
        f"Wrote {output.documents} documents{notes}, {tokens} tokens, {size} bytes in {seconds:.1f} s "
        f"({tokens / seconds:.0f} tokens/s): {' '.join(paths)}"
    )


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 written, 2 a wrong command line, 1 wrong data, 130 Ctrl-C, 143 SIGTERM."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism
    try:
        config, files = parse(argv)
    except Problems as error:
        log.fail(error.lines)
    stop = Stop()
    try:
        print(run(config, files, stop), flush=True)
    except Stopped:
        print("stopped: unfinished files were removed, finished ones are as they were", file=sys.stderr)
        return 128 + stop.signal
    except (ValueError, OSError) as error:
        log.fail(str(error).split("\n"), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
