#!/usr/bin/env python
"""Tokenize .jsonl files into the .bin/.idx pairs that training reads. Flags and output names are Megatron's."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs by path, uninstalled

from megatron.arguments import Problems, arg, build_parser, config_from, parse  # noqa: E402
from megatron.data.indexed_dataset import bin_path, idx_path  # noqa: E402
from megatron.data.jsonl import input_files, read_chunks  # noqa: E402
from megatron.data.preprocess import BadRecords, Job, Output, encode_all, tokenizer_of  # noqa: E402
from megatron.data.tokenizer import TokenizerFlags  # noqa: E402

SENTENCES = "sentences are not split here yet; leave it away, or give a list of sentences under the key"
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

@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """What is read."""

    input: tuple[str, ...] = arg((), help="files of one JSON object a line, plain or gzip, or globs")
    json_keys: tuple[str, ...] = arg(("text",), help="keys whose text is tokenized, a pair each (default: text)")
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
    """Megatron's line on stderr every `interval` documents; on a terminal also how far it is, and the ETA."""

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
                speed = f"{self.documents / elapsed} docs/s, {self.bytes / elapsed / 1024 / 1024} MB/s"
                self.clear()
                print(f"Processed {self.documents} documents ({speed}).", file=sys.stderr, flush=True)
        now = time.time()
        if self._terminal and read and now - self._shown > 0.2:
            self._shown = now
            left = (now - self.start) * max(self._total - read, 0) / read
            minutes, seconds = divmod(round(left), 60)
            sys.stderr.write(f"\r{read / max(self._total, read):6.1%} of the input, ETA {minutes}:{seconds:02d}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        """Take the display off the terminal."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")


def read_command_line(argv: Sequence[str]) -> tuple[Config, list[str]]:
    """The command line and its input files. Raises Problems with everything that is wrong."""
    parser = build_parser(Config, prog="preprocess_data.py", description=__doc__ or "", explain=_refused)
    parsed = parse(parser, argv)
    if parsed.help:
        print(parser.help(), end="")
        raise SystemExit(0)
    config = config_from(Config, parsed.typed)
    files, problems = input_files(config.read.input)
    if not config.read.input:
        problems.append("--input: is needed; give one or more .jsonl files")
    problems += config.tokenizer.problems() + _output_problems(config) + _number_problems(config)
    unread = tuple(f"--{name.replace('_', '-')}:" for name in parsed.broken)  # their problem is told already
    problems = parsed.problems + [problem for problem in problems if not problem.startswith(unread)]
    if problems:
        raise Problems(problems)
    for note in parsed.notes:
        print(f"note: {note}", file=sys.stderr)
    return config, files


def _refused(flag: str) -> str | None:
    return f"{flag}: {REFUSED[flag]}" if flag in REFUSED else None


def _output_problems(config: Config) -> list[str]:
    prefix, keys = config.write.output_prefix, config.read.json_keys
    twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    problems = [f"--json-keys {key}: is given twice; give each key once" for key in twice]
    problems += [f"--json-keys {key}: names a file, so it cannot hold a slash" for key in keys if "/" in key]
    if not prefix:
        return [*problems, "--output-prefix: is needed; the files are called PREFIX_KEY_document.bin and .idx"]
    folder = os.path.dirname(prefix) or "."
    if not os.path.isdir(folder):
        return [*problems, f"--output-prefix {prefix}: no directory {folder}; make it first (mkdir -p {folder})"]
    if not os.path.basename(prefix):
        return [*problems, f"--output-prefix {prefix}: is a directory; add how the names of the files shall begin"]
    if not os.access(folder, os.W_OK):
        return [*problems, f"--output-prefix {prefix}: the directory {folder} is not writable; choose another"]
    pairs = [f"{prefix}_{key}_document" for key in keys]
    taken = [path for pair in pairs for path in (bin_path(pair), idx_path(pair)) if os.path.isdir(path)]
    return problems + [f"--output-prefix {prefix}: {path} is a directory; choose another prefix" for path in taken]


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
    """Do the work; the summary line. Raises ValueError or OSError, and leaves nothing unfinished behind then."""
    started = time.time()
    job = Job(config.tokenizer, config.read.json_keys, config.write.append_eod)
    if job.append_eod and tokenizer_of(job.tokenizer).eod is None:
        raise ValueError(
            f"--append-eod: this {job.tokenizer.tokenizer_type} has no end-of-document token; leave the flag away, or "
            "name an eos_token in the tokenizer's own files"
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
        for number, (chunk, encoded) in enumerate(results):
            if number == 0:
                print("Time to startup:", time.time() - started, flush=True)
            bad.add(chunk, encoded)
            blank += encoded.blank
            output.add(encoded)
            progress.add(encoded.sizes, chunk.read)
        for key, tokens in zip(job.keys, output.tokens, strict=True):
            if not tokens:
                what = f'no text under "{key}"' if output.documents else "no documents"
                raise ValueError(f"--input {' '.join(config.read.input)}: {what}, so there is nothing to write")
        output.join()
        with stop.held():
            paths = output.finish()
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
    stop = Stop()
    try:
        config, files = read_command_line(argv)
        print(run(config, files, stop), flush=True)
    except Stopped:
        print("stopped: unfinished files were removed, finished ones are as they were", file=sys.stderr)
        return 128 + stop.signal
    except Problems as error:
        return _failed(error.lines, 2)
    except ValueError as error:
        return _failed(str(error).split("\n"), 1)
    except OSError as error:
        prefix = config.write.output_prefix
        return _failed([f"--output-prefix {prefix}: cannot be written ({error.strerror or error})"], 1)
    return 0


def _failed(lines: Sequence[str], code: int) -> int:
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
