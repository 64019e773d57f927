#!/usr/bin/env python
"""Tokenize text files into the .bin/.idx pairs that training reads. Flags and output names are
Megatron's."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()

import contextlib
import functools
import importlib
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from types import ModuleType
from typing import Any, NoReturn, Protocol

# numpy's, which nothing here needs; read when it is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
from megatron import addons, host
from megatron.arguments import ForeignFlags, Problems, arg, build_parser, config_from, parse
from megatron.config.checks import tokenizer as check_tokenizer
from megatron.config.tokenizer import TokenizerConfig
from megatron.data.indexed_dataset import bin_path, idx_path
from megatron.data.parts.corpus import Corpus, CorpusTotals
from megatron.data.parts.making import tidy
from megatron.data.parts.part_set import PartSet
from megatron.data.parts.plan import PART_BYTES, Task, task_of, units
from megatron.data.parts.writers import writing
from megatron.data.preprocess import sentences
from megatron.data.preprocess.encode import Conversations, Encoded, Job, tokenizer_of
from megatron.data.preprocess.encode_files import (
    EncodeLimits,
    descriptions,
    encoded_blocks,
    trailer_of,
)
from megatron.data.preprocess.readers import BLOCK_BYTES, TEXT_SUFFIXES, FileBlock, input_files
from megatron.data.preprocess.resumable_writer import Busy, Unfinished, is_finishing
from megatron.data.preprocess.trial import SECONDS
from megatron.data.tokenizers.build import Tokenizer
from megatron.data.tokenizers.metadata import fingerprint, vocabulary_of
from megatron.problems import error_lines
from tools.shared import hub_dataset
from tools.shared.program import added, answer, out_of_range
from tools.shared.progress import Progress, clock

TEXT_FILE = re.compile(rf"({'|'.join(map(re.escape, TEXT_SUFFIXES))})(\.\w+)?$")
NO_SEARCH = "the best number of workers is not searched for; give --workers, one for each CPU core"
REFUSED = {
    "--find-optimal-num-workers": NO_SEARCH,
    "--workers-to-check": NO_SEARCH,
    "--max-documents": NO_SEARCH,
    "--performance-dir": NO_SEARCH,
}


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """Input."""

    input: tuple[str, ...] = arg(())
    """files, directories (all files of these kinds below them) or globs: JSON Lines, text (.txt,
    .md, .rst: one document per file) or parquet, plain or compressed (gzip, xz, zstd); or
    hf://ORG/NAME[:CONFIG][@REVISION][/SPLIT] of the Hugging Face hub"""

    json_keys: tuple[str, ...] = arg(("text",))
    """keys or columns to tokenize; each gives a .bin/.idx pair (default: text)"""

    metadata_keys: tuple[str, ...] = arg(())
    """keys or columns to keep of each record beside the tokens, the first one its id (id url
    licence); PREFIX_KEY_document.sources then says of each document its input file, line or row,
    and byte offset"""

    txt_lines: bool = arg(False)
    """each line of a text file is a document (without it the file is one, which training cannot
    split into train and validation)"""

    split_sentences: bool = arg(False)
    """store each sentence as a sequence; the files are named PREFIX_KEY_sentence"""

    keep_newlines: bool = arg(False)
    """with --split-sentences: keep the white space after each sentence"""

    lang: str = arg("english")
    """with --split-sentences: language of the text"""

    max_bad_records: int = arg(0, minimum=0)
    """number of bad lines to report and skip before the run fails"""

    hub: tuple[str, ...] = ()  # no flag: the data sets of hf:// with their revisions


@dataclass(frozen=True, kw_only=True)
class WriteConfig:
    """Output: PREFIX_KEY_document.bin and .idx, and a .json that names the tokenizer."""

    output_prefix: str = arg("")
    """path prefix of the output files"""

    append_eod: bool = arg(False)
    """append the end-of-document token to each document"""

    overwrite: bool = arg(False)
    """replace the output files if they exist"""

    allow_special_tokens: bool = arg(False)
    """encode special tokens written in the text, such as <|endoftext|>, as those tokens"""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Processes and progress."""

    workers: int | None = arg(None, minimum=1, maximum=max(64, 4 * host.processors()))
    """number of worker processes (default: one per CPU core; with --cluster one for each part that
    is being made)"""

    partitions: int = arg(1, minimum=1)
    """order of the documents as with Megatron's --partitions N: i, i + N, i + 2N, ..."""

    keep_sequential_samples: bool = arg(False)
    """with --partitions: keep the order of the input"""

    record_timeout: int = arg(SECONDS, minimum=1)
    """seconds in which a record must be tokenized (1 more for each 100 KB of it), or the run ends
    and names it"""

    task: str | None = arg(None, metavar="I/N")
    """make the parts of task I of N (I from 0) that are not whole yet; slurm: I and N are those of
    the SLURM array. The parts, in PREFIX_KEY_document.parts/, are read as PREFIX_KEY_document"""

    cluster: str | None = arg(None, choices=("ray",))
    """make all parts that are not whole yet, as --task does, as tasks of a Ray cluster: that of
    RAY_ADDRESS, the one on this machine, or one that is started here for the run"""

    cluster_address: str | None = arg(None, metavar="ADDRESS")
    """with --cluster ray: another cluster (auto, HOST:PORT or ray://HOST:PORT)"""

    part_bytes: int = arg(PART_BYTES, minimum=1)
    """with --task and --cluster: size of the input of a part, as stored"""

    log_interval: int | None = arg(None, minimum=1)
    """print Megatron's progress line every N documents (default: a line with percentage, rate and
    ETA every 5 seconds)"""

    @property
    def in_parts(self) -> str | None:
        """The flag by which the corpus is made in parts."""
        return "--task" if self.task else "--cluster" if self.cluster else None


@dataclass(frozen=True)
class Config:
    """The command line."""

    read: ReadConfig
    tokenizer: TokenizerConfig
    write: WriteConfig
    run: RunConfig


class DocumentFlags(Protocol):
    """Flags of an add-on by which documents are something else than texts. `name` is in the names
    of the files, in place of a key; empty where they do not ask for it."""

    name: str

    def problems(self, config: Config, texts: Sequence[str]) -> list[str]:
        """What is wrong with these flags beside others and `texts`, the input files that are
        texts."""

    def open(self, config: Config, tokenizer: Tokenizer) -> Conversations:
        """What reads the documents. Raises ValueError."""


# Each has NAME and DocumentFlags.
GROUPS = [(each.NAME, each.Flags) for each in added("preprocess_data")]
TREE: type[Config] = make_dataclass("Config", GROUPS, bases=(Config,), frozen=True)


def _of_add_ons(config: Config) -> list[DocumentFlags]:
    return [getattr(config, name) for name, _ in GROUPS]


def _documents(config: Config) -> DocumentFlags | None:
    """The group of an add-on's flags that says what documents are."""
    return next((each for each in _of_add_ons(config) if each.name), None)


class Stopped(BaseException):
    """A signal asked this process to stop."""


class Stop:
    """Turns SIGINT and SIGTERM into `Stopped`, once; a part that must not be torn holds them back
    until it is done."""

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
        try:
            yield
        finally:
            self._held = False
        if self.signal:
            raise Stopped


class Speed:
    """Megatron's line on stderr every `interval` documents, which --log-interval asks for.
    `documents` were done by runs before this one."""

    def __init__(self, interval: int | None, documents: int = 0) -> None:
        self.bytes = 0
        self.start = time.time()
        self.documents = self.before = documents
        self.interval = interval

    def add(self, documents: int, size: int) -> list[str]:
        """So many documents of so many bytes are done; the lines that are due."""
        done = self.documents
        self.bytes += size
        self.documents += documents
        if self.interval is None:
            return []
        elapsed = max(time.time() - self.start, 1e-9)
        speed = (
            f"{(self.documents - self.before) / elapsed} docs/s, "
            f"{self.bytes / elapsed / 1024 / 1024} MB/s"
        )
        first = done - done % self.interval + self.interval
        return [
            f"Processed {count} documents ({speed})."
            for count in range(first, self.documents + 1, self.interval)
        ]


class FileCounts:
    """Prints what each of several files has given, when it is done. `before`: documents and ids of
    the one at number `file` that a run before this one has counted."""

    def __init__(self, files: Sequence[str], before: Sequence[int], file: int) -> None:
        self._files = files
        self._documents, self._ids = before
        self._file = file

    def add(self, block: FileBlock, encoded: Encoded) -> None:
        """Count a block."""
        if block.file != self._file:
            self.end()
            self._file = block.file
            self._documents = self._ids = 0
        self._documents += encoded.documents
        self._ids += encoded.tokens

    def end(self) -> None:
        """The file is done."""
        if len(self._files) > 1:
            plural = "s" * (self._documents != 1)
            print(
                f"{self._files[self._file]}: {self._documents:,} document{plural}, "
                f"{self._ids:,} ids",
                flush=True,
            )


def read_command_line(argv: Sequence[str]) -> tuple[Config, list[str]]:
    """The command line and its input files. Raises Problems with everything that is wrong."""
    parser = build_parser(
        TREE,
        prog="preprocess_data.py",
        description=__doc__ or "",
        foreign_flags=lambda: ForeignFlags(explain=_refused),
    )
    parsed = parse(parser, argv)
    answer(parser, parsed)
    config = config_from(TREE, parsed.typed)
    hub = [word for word in config.read.input if word.startswith(hub_dataset.SCHEME)]
    files, problems, notes = input_files([word for word in config.read.input if word not in hub])
    problems += hub_dataset.problems(hub)
    if hub and config.run.in_parts:
        problems.append(
            f"--input {hub[0]}: is one file, which several machines do not share; hf download it "
            "[flags-exclude-each-other]"
        )
    if not config.read.input:
        problems.append("--input: is needed; give files or a directory [flag-missing]")
    texts = [file for file in files if TEXT_FILE.search(file)]
    problems += (
        list(check_tokenizer.problems(config.tokenizer))
        + [line for each in _of_add_ons(config) for line in each.problems(config, texts)]
        + _output_problems(config)
        + _task_problems(config, parsed.typed)
        + _order_problems(config, files)
        + _twice("--metadata-keys", config.read.metadata_keys)
        + out_of_range(parser, parsed)
    )
    if texts and len(config.read.json_keys) > 1:
        problems.append(
            f"--json-keys {' '.join(config.read.json_keys)}: {texts[0]} has no keys, only a text; "
            "give one key [json-keys-malformed]"
        )
    if config.read.split_sentences:
        problems += sentences.problems(config.read.lang)
    # their problem is reported already
    unread = tuple(f"--{name.replace('_', '-')}:" for name in parsed.broken)
    problems = parsed.problems + [problem for problem in problems if not problem.startswith(unread)]
    if problems:
        raise Problems(problems)
    for note in [*parsed.notes, *notes]:
        print(f"note: {note}", file=sys.stderr)
    fetched = [hub_dataset.fetched(word, config.write.output_prefix) for word in hub]
    read = replace(config.read, hub=tuple(each.origin for each in fetched))
    return replace(config, read=read), files + [each.path for each in fetched]


def _task_problems(config: Config, typed: Mapping[str, object]) -> list[str]:
    run = config.run
    if run.cluster_address and not run.cluster:
        return ["--cluster-address: only works with --cluster; add it [flag-needs-other-flag]"]
    if not run.in_parts:
        return (
            ["--part-bytes: only works with --task or --cluster; add one [flag-needs-other-flag]"]
            if "part_bytes" in typed
            else []
        )
    problems: list[str] = []
    if run.cluster:
        engine = _engine(run.cluster)
        problems += (
            engine.problems(engine.address_of(run.cluster_address))
            if engine
            else [
                f"--cluster {run.cluster}: addons/{run.cluster}/ is not there, which has it; "
                "install the suite with it [feature-not-installed]"
            ]
        )
    if run.task is None:
        return problems
    if run.cluster:
        problems.append(
            f"--task {run.task}: --cluster {run.cluster} makes all parts; remove one of the two "
            "[flags-exclude-each-other]"
        )
    try:
        task_of(run.task)
    except ValueError as error:
        problems.append(str(error))
    return problems


def _engine(cluster: str) -> ModuleType | None:
    """What makes parts on clusters of this kind: part_engine.py of the add-on of that name."""
    names = [name for name in addons.modules("part_engine") if name.split(".")[-2] == cluster]
    return importlib.import_module(names[0]) if names else None


def _order_problems(config: Config, files: Sequence[str]) -> list[str]:
    """Of flags that need the input as it lies in files, in its order."""
    run = config.run
    flag = run.in_parts or "--metadata-keys" * bool(config.read.metadata_keys)
    if not flag:
        return []
    problems = [
        f"--input {file}: is no regular file, which {flag} needs [file-not-readable]"
        for file in files
        if not os.path.isfile(file)
    ]
    if run.partitions > 1 and not run.keep_sequential_samples:
        problems.append(
            f"--partitions {run.partitions}: with {flag} the documents stay in the order of the "
            "input; remove it [flags-exclude-each-other]"
        )
    return problems


def _twice(flag: str, keys: Sequence[str]) -> list[str]:
    return [
        f"{flag} {key}: is given twice; give each key once [json-keys-malformed]"
        for key in dict.fromkeys(keys)
        if keys.count(key) > 1
    ]


def _refused(flag: str) -> str | None:
    return f"{flag}: {REFUSED[flag]} [megatron-flag-not-supported]" if flag in REFUSED else None


def _output_problems(config: Config) -> list[str]:
    prefix = config.write.output_prefix
    keys = config.read.json_keys
    problems = _twice("--json-keys", keys)
    problems += [
        f"--json-keys {key}: names a file, so it cannot hold a slash [json-keys-malformed]"
        for key in keys
        if "/" in key
    ]
    if not prefix:
        return [
            *problems,
            (
                "--output-prefix: is needed; the files are called PREFIX_KEY_document.bin and "
                ".idx [flag-missing]"
            ),
        ]
    folder = os.path.dirname(prefix) or "."
    if not os.path.isdir(folder):
        return [
            *problems,
            (
                f"--output-prefix {prefix}: no directory {folder}; make it first (mkdir -p "
                f"{folder}) [directory-missing]"
            ),
        ]
    if not os.path.basename(prefix):
        return [
            *problems,
            (
                f"--output-prefix {prefix}: is a directory; add how the names of the files shall "
                "begin [path-is-a-directory]"
            ),
        ]
    if not os.access(folder, os.W_OK):
        return [
            *problems,
            (
                f"--output-prefix {prefix}: the directory {folder} is not writable; choose another "
                "[path-not-writable]"
            ),
        ]
    pairs = _pairs(config)
    existing = [
        path for pair in pairs for path in (bin_path(pair), idx_path(pair)) if os.path.isdir(path)
    ]
    problems += [
        (
            f"--output-prefix {prefix}: {path} is a directory; choose another prefix "
            "[path-is-a-directory]"
        )
        for path in existing
    ]
    return problems if existing or is_finishing(prefix) else problems + _existing(config)


def _existing(config: Config) -> list[str]:
    """A line if finished pairs would be replaced without --overwrite."""
    paths = [
        pair
        for pair in _pairs(config)
        if os.path.exists(bin_path(pair)) and os.path.exists(idx_path(pair))
    ]
    if paths and config.run.in_parts:
        return [
            f"--output-prefix {config.write.output_prefix}: {paths[0]}.bin and .idx exist and "
            "would be read in place of the parts; remove them, or choose another prefix "
            "[output-exists]"
        ]
    if config.write.overwrite or not paths:
        return []
    names = ", ".join(f"{pair}.bin and .idx" for pair in paths)
    return [
        (
            f"--output-prefix {config.write.output_prefix}: {names} exist; give --overwrite to "
            "replace them, or another prefix [output-exists]"
        )
    ]


def _pairs(config: Config) -> list[str]:
    level = "sentence" if config.read.split_sentences else "document"
    documents = _documents(config)
    keys = (documents.name,) if documents else config.read.json_keys
    return [f"{config.write.output_prefix}_{key}_{level}" for key in keys]


def run(config: Config, files: Sequence[str], stop: Stop) -> str:
    """Do the work; the summary line. Raises ValueError, Busy or OSError; what is done then is there
    for the next run."""
    started = time.time()
    job, tokenizer = _prepared(config)
    if config.run.in_parts:
        return _make_parts(config, files, stop, job, tokenizer)
    parts = 1 if config.run.keep_sequential_samples else config.run.partitions
    identity = _job_identity(config, tokenizer, job) | _sources(files) | {"--partitions": parts}
    lasting = all(os.path.isfile(file) for file in files)
    with contextlib.ExitStack() as stack:
        work = Unfinished(
            config.write.output_prefix,
            _pairs(config),
            job.dtype(tokenizer),
            parts,
            identity,
            lasting,
            trailer_of(job, files),
        )
        stack.callback(work.close)
        _print_unfinished(work)
        if not work.finishing and (problems := _existing(config)):
            raise Problems(problems)  # names of another command's pairs, which it had begun to give
        speed = Speed(config.run.log_interval, work.documents)
        progress = Progress(sum(map(os.path.getsize, files)), resumed=work.documents > 0)
        stack.callback(progress.clear)
        before = sum(work.tokens)
        if not work.finishing:
            blocks = encoded_blocks(
                job,
                _limits(config),
                files,
                work,
                stop.held,
                opened=functools.partial(print, "Opening", flush=True),
            )
            counts = FileCounts(files, work.in_file, work.position.file)
            for number, (block, encoded) in enumerate(blocks):
                if number == 0:
                    print("Time to startup:", time.time() - started, flush=True)
                counts.add(block, encoded)
                _report(speed, progress, encoded, block.read)
            counts.end()
        _check_text(config, job, work)
        _warn_of_keys(config, work.having, work.documents)
        _warn_of_one_text(config, files, work.documents)
        described = descriptions(job, tokenizer, work)
        if config.read.hub:
            described = [{"hub": config.read.hub, **each} for each in described]
        if job.chat and not work.finishing:
            trained = described[0]["trained_tokens"]
            name = described[0]["chat_template"]["name"]
            print(f"{trained} of {work.tokens[0]} tokens are trained (chat template {name})")
        with stop.held():
            paths = work.finish(described)
    return _summary(
        work, tokenizer, paths, sum(work.tokens) - before, speed.bytes, time.time() - started
    )


def _warn_of_one_text(config: Config, files: Sequence[str], documents: int) -> None:
    """Note that a text is one document, which cannot be split into train and validation."""
    if documents == 1 and TEXT_FILE.search(files[0]) and not config.read.txt_lines:
        print(
            f"note: {files[0]} is one document, which --split of training cannot divide. For "
            "validation preprocess its last lines (tail) as a file of their own and name the two "
            "by --train-data-path and --valid-data-path; or give --txt-lines, with which each line "
            "is a document; or train without, by --split 1,0,0",
            file=sys.stderr,
        )


def _check_text(config: Config, job: Job, work: Unfinished) -> None:
    """Raise ValueError for a key without a token."""
    for key, tokens in zip(job.keys, work.tokens, strict=True):
        if not tokens:
            problem = (
                f'no text under "{key}"' if work.documents and not job.chat else "no documents"
            )
            raise ValueError(
                f"--input {' '.join(config.read.input)}: {problem}, so there is nothing to write "
                "[input-without-text]"
            )


def _prepared(config: Config) -> tuple[Job, Tokenizer]:
    """What to make of each document. Raises ValueError for a tokenizer that cannot."""
    read = config.read
    write = config.write
    job = Job(
        config.tokenizer,
        read.json_keys,
        write.append_eod,
        write.allow_special_tokens,
        read.lang if read.split_sentences else None,
        read.keep_newlines,
        metadata_keys=read.metadata_keys,
    )
    tokenizer = tokenizer_of(job.tokenizer)
    _check_tokenizer(job, tokenizer)
    if documents := _documents(config):
        job = replace(job, keys=(documents.name,), chat=documents.open(config, tokenizer))
    return job, tokenizer


def _limits(config: Config) -> EncodeLimits:
    """What bounds the work; a task of Ray has one process unless more are asked for."""
    workers = config.run.workers or (1 if config.run.cluster else host.cores())
    read = config.read
    return EncodeLimits(workers, read.max_bad_records, config.run.record_timeout, read.txt_lines)


def _warn_of_keys(config: Config, having: Sequence[int], documents: int) -> None:
    for key, count in zip(config.read.metadata_keys, having, strict=False):
        if documents and not count:
            print(
                f"warning: --metadata-keys {key}: none of {documents} documents has it",
                file=sys.stderr,
            )


def _make_parts(
    config: Config, files: Sequence[str], stop: Stop, job: Job, tokenizer: Tokenizer
) -> str:
    """Make the parts that are not whole yet, all or those of this task; the summary line."""
    started = time.time()
    task = task_of(config.run.task) if config.run.task else Task(0, 1)
    identity = _job_identity(config, tokenizer, job)
    plan = units(files, config.run.part_bytes, config.read.txt_lines)
    made_of = tuple(unit.made_of(identity) for unit in plan)
    sets = [PartSet(pair, task.count, made_of, identity) for pair in _pairs(config)]
    corpus = Corpus(job, _limits(config), identity, tuple(plan), tuple(sets))
    numbers = range(task.number, len(plan), task.count)
    with contextlib.ExitStack() as stack:
        for each in sets:
            stack.enter_context(writing(each, config.write.overwrite))
        if config.run.cluster:
            count, failures = _make_on_cluster(config, corpus, stop)
        else:
            count, failures = _make_locally(config, corpus, numbers, stop)
        tidy(sets)
    _warn_of_keys(config, count.having, count.documents)
    if failures:
        raise ValueError("\n".join(failures))
    seconds = time.time() - started
    subject = f"Task {task.number} of {task.count}" if config.run.task else "Ray"
    bad = f" ({count.bad} bad records skipped)" if count.bad else ""
    return (
        f"{subject}: wrote {count.parts} of {len(numbers)} parts, the others were whole; "
        f"{count.documents} documents{bad}, {count.tokens} tokens in {seconds:.1f} s "
        f"({count.tokens / seconds:.0f} tokens/s): {' '.join(each.folder for each in sets)}"
    )


def _make_locally(
    config: Config, corpus: Corpus, numbers: Sequence[int], stop: Stop
) -> tuple[CorpusTotals, list[str]]:
    """Make these parts in this process; what was made, and no failures: the first is raised."""
    speed = Speed(config.run.log_interval)
    progress = Progress(0)
    counts = CorpusTotals()
    with contextlib.ExitStack() as stack:
        stack.callback(progress.clear)
        for number in numbers:
            report = functools.partial(
                _report, speed, progress, subject=f"part {number} of {len(corpus.units)}, "
            )
            counts = counts.plus(corpus.make(number, report, stop.held))
    return counts, []


def _make_on_cluster(config: Config, corpus: Corpus, stop: Stop) -> tuple[CorpusTotals, list[str]]:
    """Have the cluster make all parts; what was made, and a line for each that could not be."""
    engine = _engine(config.run.cluster or "")
    assert engine, "the command line is checked"
    speed = Speed(config.run.log_interval)
    progress = Progress(0)
    before = CorpusTotals()

    def report(total: CorpusTotals, remaining: int) -> None:
        nonlocal before
        new = total._replace(
            documents=total.documents - before.documents, bytes=total.bytes - before.bytes
        )
        before = total
        seconds = (time.time() - speed.start) / total.parts * remaining if total.parts else 0
        eta = f", ETA {clock(seconds)}" if total.parts else ""
        _report(speed, progress, new, subject=f"{remaining} parts to make{eta}, ")

    with contextlib.ExitStack() as stack:
        stack.callback(progress.clear)
        address = engine.address_of(config.run.cluster_address)
        made: tuple[CorpusTotals, list[str]]
        made = engine.make_parts(corpus, address, report, stop.held)
        return made


def _report(
    speed: Speed, progress: Progress, done: Encoded | CorpusTotals, read: int = 0, subject: str = ""
) -> None:
    """A block (of the `subject`) is done, or parts; `read` bytes of the input files are behind
    us."""
    lines = speed.add(done.documents, done.bytes)
    if lines:
        progress.clear()
        print("\n".join(lines), file=sys.stderr, flush=True)
    if speed.interval is not None and not progress.terminal:
        return
    rate = (speed.documents - speed.before) / max(time.time() - speed.start, 1e-9)
    progress.update(read, f"{subject}{speed.documents:,} documents, {rate:,.0f} documents/s")


def _check_tokenizer(job: Job, tokenizer: Tokenizer) -> None:
    kind = job.tokenizer.tokenizer_type
    if job.append_eod and tokenizer.eod is None:
        raise ValueError(
            f"--append-eod: this {kind} has no end-of-document token; omit the flag, or name an "
            "eos_token in the tokenizer's own files [flag-not-with-tokenizer]"
        )
    if job.allow_special_tokens and not (tokenizer.special or tokenizer.control):
        raise ValueError(
            f"--allow-special-tokens: {kind} has no special tokens; omit the flag "
            "[flag-not-with-tokenizer]"
        )


def _job_identity(config: Config, tokenizer: Tokenizer, job: Job) -> dict[str, Any]:
    """What decides, with the input, every byte that is written; equal ones may resume each other's
    work."""
    read = config.read
    write = config.write
    return {
        "format": 2,
        "the tokenizer": vocabulary_of(tokenizer.identity()),
        "--json-keys": list(read.json_keys),
        "--txt-lines": read.txt_lines,
        "--split-sentences": [read.split_sentences, read.keep_newlines, read.lang]
        if read.split_sentences
        else [],
        "--append-eod": write.append_eod,
        "--allow-special-tokens": write.allow_special_tokens,
        "--chat": list(job.chat.identity) if job.chat else [],
        # not there without the flag: parts that were made before there was one stay what they are
        **({"--metadata-keys": list(read.metadata_keys)} if read.metadata_keys else {}),
    }


def _sources(files: Sequence[str]) -> dict[str, Any]:
    """The input of one run, and where it is cut into blocks."""
    stats = [(os.path.abspath(file), os.stat(file)) for file in files]
    return {
        "block": BLOCK_BYTES,
        "--input": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
    }


def _print_unfinished(work: Unfinished) -> None:
    if work.resumed:
        print(f"Resuming after {work.documents} documents of an interrupted run", flush=True)
    elif work.discarded:
        print(
            f"note: unfinished work in {work.folder} is discarded, because it cannot be resumed "
            f"({work.discarded})",
            file=sys.stderr,
        )


def _summary(
    work: Unfinished,
    tokenizer: Tokenizer,
    paths: Sequence[str],
    tokens: int,
    read: int,
    seconds: float,
) -> str:
    counts = {"bad": work.bad, "blank": work.blank, "without text": work.empty}
    notes = "".join(f", {count} {kind}" for kind, count in counts.items() if count)
    if work.bad:
        print(f"bad records are listed in {work.bad_path}", file=sys.stderr)
    size = sum(map(os.path.getsize, paths))
    engine = getattr(tokenizer, "engine", type(tokenizer).__name__)
    return (
        f"Wrote {work.documents} document{'s' * (work.documents != 1)}{notes}, "
        f"{sum(work.tokens)} tokens, {size} bytes in {seconds:.1f} s "
        f"({tokens / seconds:.0f} tokens/s, {read / seconds / 1e6:.1f} MB/s, {engine}; "
        f"tokenizer {fingerprint(tokenizer.identity())[:12]}): {' '.join(paths)}"
    )


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 written, 2 a wrong command line, 1 wrong data, 130 Ctrl-C, 143 SIGTERM."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism
    stop = Stop()
    try:
        config, files = read_command_line(argv)
        print(run(config, files, stop), flush=True)
    except Stopped:
        print(
            "stopped: finished files are unchanged; run the same command again to resume",
            file=sys.stderr,
        )
        return 128 + stop.signal
    except Problems as error:
        return _failed(error.lines, 2)
    except (ValueError, Busy) as error:
        return _failed(str(error).split("\n"), 1)
    except OSError as error:
        prefix = config.write.output_prefix
        name = os.fsdecode(error.filename or prefix)
        reason = error.strerror or error
        if name.startswith(prefix):
            name = f"--output-prefix {prefix}"
        return _failed([f"{name}: cannot be used ({reason}) [file-operation-failed]"], 1)
    return 0


def _failed(lines: Sequence[str], code: int) -> int:
    print(error_lines(lines), end="", file=sys.stderr)
    return code


def _leave(code: int) -> NoReturn:
    """End this process at once: to take the vocabulary apart, object by object, is the longest part
    of an end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(interrupt.run(main, sys.argv[1:]))
