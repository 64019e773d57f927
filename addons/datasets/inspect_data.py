"""Inspect training data: check .bin/.idx pairs, show which tokens of a document are trained, list
the samples of an iteration, find the iterations of a document, and its line in the input. Needs no
model.

RUN is the directory that --save named, or an iter_XXXXXXX in it; or `--` and the flags of
pretrain_gpt.py. Exit codes: 0 no problem found, 1 a problem with the data, 2 a wrong command line.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from megatron import interrupt
from megatron.addons.datasets.source_reader import DocumentSources
from megatron.arguments import arg, values_of
from megatron.config.checks import tokenizer as check_tokenizer
from megatron.config.tokenizer import TokenizerConfig
from megatron.data import pair_checksums
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.ledger import MASK, SKIPPED, read_ledger, sample_hash, tokens_hash
from megatron.data.sample_formats import SampleFile, SampleFormat
from megatron.data.tokenizers import metadata as provenance
from megatron.data.tokenizers.build import Tokenizer, tokenizer_from
from megatron.features.registry import FEATURES
from megatron.problems import printable
from tools.shared.program import Command, run_command, said
from tools.shared.run_data import Reading, find_document, open_run, show_samples
from tools.shared.run_options import RunOptions

from . import joined_metadata
from .original import original_record

HEAD = 16  # tokens of a piece that are shown as text
THREADS = 4  # that check pairs side by side
FORMATS = [known for feature in FEATURES for known in feature.sample_formats]
IDS_READ = 1 << 18  # tokens of a file whose ids are looked at, without --all-tokens


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The form of what is printed."""

    json: bool = arg(False)
    """print one JSON object"""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(JsonOption):
    """Options of check."""

    prefixes: tuple[str, ...] = arg(position="positional", metavar="PREFIX")
    """path without .bin and .idx; or an X.bin of another format of packed samples"""

    vocab_size: int | None = arg(None, minimum=1)
    """report token ids that are not below this number"""

    all_tokens: bool = arg(False)
    """read every token (default: the first 262144)"""

    write_checksums: bool = arg(False)
    """first write the checksums of .bin and .idx to PREFIX.json (pairs of other programs)"""


@dataclass(frozen=True, kw_only=True)
class ShowOptions(TokenizerConfig, JsonOption):
    """Options of show."""

    prefix: str = arg(position="positional", metavar="PREFIX")
    """path without .bin and .idx; or an X.bin of another format of packed samples"""

    document: int = arg(0, minimum=0)
    """number of the first document to show, from 0"""

    count: int = arg(1, minimum=1)
    """number of documents to show"""

    color: Literal["auto", "always", "never"] = arg("auto")
    """trained tokens in green instead of [[...]]; auto: if stdout is a terminal and NO_COLOR is not
    set"""


@dataclass(frozen=True, kw_only=True)
class AtOptions(RunOptions, JsonOption):
    """Options of at."""

    iteration: int = arg(minimum=1)
    """iteration, as numbered in the log"""

    data_ledger: str | None = arg(None, metavar="FILE")
    """compare with this ledger (default: the run's --data-ledger, if it exists)"""


@dataclass(frozen=True, kw_only=True)
class FindOptions(RunOptions, JsonOption):
    """Options of find."""

    document: int = arg(minimum=0)
    """number of the document in its data set, from 0"""

    prefix: str | None = arg(None)
    """prefix of the data set, if the run reads several"""


@dataclass(frozen=True, kw_only=True)
class SourceOptions(JsonOption):
    """Options of source."""

    prefix: str = arg(position="positional", metavar="PREFIX")
    """path without .bin and .idx"""

    document: int | None = arg(None, minimum=0)
    """number of the document, from 0"""

    id: str | None = arg(None)
    """the documents with this value of the first key of preprocess_data.py --metadata-keys"""

    def problems(self) -> list[str]:
        """What is wrong with them."""
        if (self.document is None) == (self.id is None):
            return ["--document or --id: give one of them [flag-missing]"]
        return []


# --- check


def check_pair(
    prefix: str, vocab_size: int | None, all_tokens: bool, write_checksums: bool = False
) -> dict[str, Any]:
    """What is known of a pair; `problem` says what is wrong with it, if anything is."""
    report: dict[str, Any] = {"prefix": prefix}
    try:
        corpus = IndexedDataset(prefix)
        if write_checksums:
            pair_checksums.write_sums(prefix)
        corpus.check()
        low, high = corpus.id_range(None if all_tokens else IDS_READ)
        tokens = int(corpus.sequence_lengths.sum(dtype=np.int64))
        empty = int(
            (np.diff(corpus.document_indices) == 0).sum() + (corpus.sequence_lengths == 0).sum()
        )
        report |= {
            "documents": corpus.num_documents,
            "sequences": len(corpus),
            "tokens": tokens,
            "dtype": corpus.dtype.name,
            "bin_bytes": corpus.bin_bytes,
            "empty_documents": empty,
            "smallest_id": low,
            "largest_id": high,
        }
        if corpus.dtype.kind not in "iu":
            raise ValueError(
                f"{prefix}.idx: holds {corpus.dtype.name}, not token ids; preprocess text into it "
                "[data-not-token-ids]"
            )
        note = provenance.note(prefix) or {}
        if "trained_tokens" in note:
            report |= _loss_mask(corpus, note["trained_tokens"], all_tokens)
            low, high = report["smallest_id"], report["largest_id"]
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            limit = "ids begin at 0" if low < 0 else f"the vocabulary has {vocab_size}"
            raise ValueError(
                f"{prefix}.bin: holds token ids {low} .. {high}, {limit}; give the vocabulary it "
                "was preprocessed with, or make the pair again with tools/preprocess_data.py "
                "[token-id-out-of-range]"
            )
        if tokens == 0:
            raise ValueError(
                f"{prefix}.bin: holds no tokens; preprocess a file that has text [data-too-small]"
            )
        report["tokenizer"] = _tokenizer(prefix, report)
        unused = corpus.bin_bytes - tokens * corpus.dtype.itemsize
        if unused:
            raise ValueError(
                f"{prefix}.bin: {abs(unused)} of its bytes are "
                f"{'in no sequence' if unused > 0 else 'in two'}; if that is not meant, make the "
                "pair again with tools/preprocess_data.py "
                "[data-file-damaged]"
            )
        report["checksums"] = pair_checksums.verify_tokens(prefix)
    except (ValueError, OSError) as error:
        report["problem"] = said(error)[0]
    return report


def _loss_mask(corpus: IndexedDataset, marked: int, all_tokens: bool) -> dict[str, Any]:
    """Of chat data: the range of the ids that the model reads, and with `all_tokens` how many are
    trained. Raises ValueError if `said`, of the .json, is another number."""
    from ..finetuning.loss_mask import is_trained, tokens_of

    low = None
    high = -1
    trained = 0
    documents = 0
    for number in range(len(corpus)):
        if not all_tokens and documents >= IDS_READ:
            break
        stored = np.asarray(corpus[number], np.int64)
        ids = tokens_of(stored)
        documents += len(ids)
        trained += int(is_trained(stored).sum())
        if len(ids):
            low = int(ids.min()) if low is None else min(low, int(ids.min()))
            high = max(high, int(ids.max()))
    if all_tokens and trained != marked:
        raise ValueError(
            f"{provenance.json_path(corpus.path_prefix)}: says that {marked} tokens are trained, "
            f"the .bin has {trained}; copy all three files again, or make them again with "
            "tools/preprocess_data.py --chat "
            "[data-record-of-another-pair]"
        )
    return {"smallest_id": low or 0, "largest_id": high, "trained_tokens": marked}


def check_samples(
    sample_format: SampleFormat,
    path: str,
    vocab_size: int | None,
    all_tokens: bool,
    write_checksums: bool = False,
) -> dict[str, Any]:
    """The same of a .bin of a feature's format; samples are read until they have 262144 tokens, or
    all of them."""
    report: dict[str, Any] = {"prefix": path}
    try:
        if write_checksums:
            raise ValueError(
                f"{path}: --write-checksums is for .bin/.idx pairs; omit it "
                "[flag-not-with-packed-samples]"
            )
        samples = sample_format.open(path)
        low, high = samples.id_range(None if all_tokens else IDS_READ)
        report |= {
            "documents": len(samples.lengths),
            "tokens": int(samples.lengths.sum()),
            "dtype": sample_format.content,
            "bin_bytes": samples.bin_bytes,
            "empty_documents": int((samples.lengths == 0).sum()),
            "smallest_id": low,
            "largest_id": high,
            "tokenizer": None,
        }
        if vocab_size is not None and max(high, -low) >= vocab_size:
            raise ValueError(
                f"{path}: holds token ids {low} .. {high}, the vocabulary has {vocab_size}; give "
                "the vocabulary it was tokenized with "
                "[token-id-out-of-range]"
            )
    except (ValueError, OSError) as error:
        report["problem"] = said(error)[0]
    return report


def _named(made_by: dict[str, Any] | None) -> str:
    if made_by is None:
        return "no .json that says which tokenizer made it"
    return (
        f"made by {made_by['class']} of {made_by.get('vocab_size', '?')} ids "
        f"({made_by['fingerprint'][:12]})"
    )


def _tokenizer(prefix: str, report: dict[str, Any]) -> dict[str, Any] | None:
    """Who made the pair, as PREFIX.json says. Raises ValueError if that is not of this pair."""
    note = provenance.note(prefix)
    if note is None:
        return None
    path = provenance.json_path(prefix)
    made_by = note.get("tokenizer")
    for unit in ("tokens", "documents"):
        if note.get(unit, report[unit]) != report[unit]:
            raise ValueError(
                f"{path}: says {note[unit]} {unit}, the pair has {report[unit]}; it is of another "
                "pair: copy all three files again, or make them again with "
                "tools/preprocess_data.py "
                "[data-record-of-another-pair]"
            )
    size = (made_by or {}).get("vocab_size")
    if made_by and size is not None and report["largest_id"] >= size:
        raise ValueError(
            f"{path}: says that {made_by['class']} has {size} ids, {prefix}.bin holds "
            f"{report['largest_id']}; it is of another pair, or the pair was made by another "
            "vocabulary "
            "[data-record-of-another-pair]"
        )
    return made_by


def _checker(path: str) -> Callable[..., dict[str, Any]]:
    """What checks this path."""
    formats = (
        sample_format for sample_format in FORMATS if os.path.exists(path + sample_format.index)
    )
    return next((partial(check_samples, sample_format) for sample_format in formats), check_pair)


def check(options: CheckOptions) -> int:
    """`check`: a line for each pair and one for all."""
    with ThreadPoolExecutor(THREADS) as pool:
        reports = list(
            pool.map(
                lambda name: _checker(name)(
                    name, options.vocab_size, options.all_tokens, options.write_checksums
                ),
                options.prefixes,
            )
        )
    bad = [pair for pair in reports if "problem" in pair]
    try:
        joined_metadata.common_maker([pair["prefix"] for pair in reports if pair not in bad])
    except ValueError as error:
        print(f"warning: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps({"pairs": reports, "problems": len(bad)}))
        return int(bool(bad))
    for pair in reports:
        if "problem" not in pair:
            empty = f", {pair['empty_documents']} of them empty" if pair["empty_documents"] else ""
            if "trained_tokens" in pair:
                empty += f", {pair['trained_tokens']} tokens trained"
            all_read = options.all_tokens or pair["tokens"] <= IDS_READ
            part = "" if all_read else f" (of the first {IDS_READ:,} tokens)"
            print(
                f"{pair['prefix']}: {pair['documents']} documents{empty}, {pair['tokens']} tokens "
                f"of {pair['dtype']}, ids {pair['smallest_id']} .. "
                f"{pair['largest_id']}{part}, "
                f"{_named(pair['tokenizer'])}"
                f"{'' if pair.get('checksums') else ', no checksums'}"
            )
    tokens = sum(pair.get("tokens", 0) for pair in reports)
    pairs = f"{len(reports)} pair{'s' * (len(reports) != 1)}"
    print(f"{pairs}, {tokens} tokens, {len(bad)} with a problem", flush=True)
    for pair in bad:
        print(f"error: {pair['problem']}", file=sys.stderr)
    return int(bool(bad))


# --- show


def describe_document(samples: SampleFile, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Its tokens, and its text in parts that are trained or not."""
    from ..finetuning.loss_mask import is_trained, tokens_of

    stored = samples.read(number, 0, int(samples.lengths[number]))
    ids = tokens_of(stored)
    trained = is_trained(stored)
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise ValueError(
            f"{samples.prefix}.bin: document {number} holds the id {int(ids.max())}, the "
            f"vocabulary has {tokenizer.vocab_size}; give the tokenizer it was made with "
            "[token-id-out-of-range]"
        )
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    parts = [
        {"trained": bool(trained[first]), "text": tokenizer.detokenize(ids[first:end].tolist())}
        for first, end in itertools.pairwise(borders)
        if first < end
    ]
    return {
        "document": number,
        "tokens": len(ids),
        "trained_tokens": int(trained.sum()),
        "parts": parts,
    }


def show(options: ShowOptions) -> int:
    """`show`: the text of documents with the trained tokens marked."""
    color = options.color == "always" or (
        options.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    before, after = ("\x1b[32m", "\x1b[0m") if color else ("[[", "]]")
    tokenizer = tokenizer_from(options)
    from ..finetuning.packed_samples import open_files

    _, files = open_files([options.prefix], tokenizer.identity(), FORMATS)
    samples = files[0][1]
    if options.document >= len(samples.lengths):
        raise ValueError(
            f"--document {options.document}: {options.prefix} has {len(samples.lengths)} "
            "documents, numbered from 0 "
            "[document-not-found]"
        )
    last = min(options.document + options.count, len(samples.lengths))
    documents = [
        describe_document(samples, number, tokenizer) for number in range(options.document, last)
    ]
    if options.json:
        print(json.dumps({"documents": documents}))
        return 0
    for document in documents:
        print(
            f"document {document['document']}: {document['tokens']} tokens, "
            f"{document['trained_tokens']} trained"
        )
        texts = (
            f"{before}{text}{after}" if part["trained"] else text
            for part in document["parts"]
            for text in (printable(part["text"]),)
        )
        print("".join(texts), file=interrupt.data_output())
    return 0


# --- source


def describe_source(sources: DocumentSources, number: int) -> dict[str, Any]:
    """Where a document came from, and its `record` in the input; `problem` says why that cannot be
    shown."""
    source = sources.document(number)
    try:
        return {**source, "record": original_record(source)}
    except (ValueError, OSError) as error:
        return {**source, "problem": said(error)[0]}


def source_of(options: SourceOptions) -> int:
    """`source`: input, place and fields of documents, and what the input has there."""
    sources = DocumentSources(options.prefix)
    if options.id is not None:
        numbers = sources.with_id(options.id)
        if not numbers:
            raise ValueError(
                f"--id {printable(options.id)}: no document of {options.prefix} has it "
                "[document-not-found]"
            )
    else:
        assert options.document is not None  # `problems` has seen to it
        numbers = [options.document]
    documents = [describe_source(sources, number) for number in numbers]
    if options.json:
        print(json.dumps({"documents": documents}))
    else:
        for document in documents:
            show_source(document)
    for document in documents:
        if "problem" in document:
            print(f"error: {document['problem']}", file=sys.stderr)
    return int(any("problem" in document for document in documents))


def show_source(document: dict[str, Any]) -> None:
    """For a reader."""
    if "row" in document:
        position = f"row {document['row']}"
    else:
        line = f"line {document['line']}, " if document["line"] else ""
        position = f"{line}bytes {document['offset']} .. {document['offset'] + document['bytes']}"
    fields = printable(json.dumps(document["fields"], ensure_ascii=False))
    print(f"document {document['document']}: {document['input']}, {position}, {fields}")
    if "record" in document:
        print(printable(document["record"]))


# --- at


def describe_sample(reading: Reading, sample: int) -> dict[str, Any]:
    """A sample's hash and pieces; a `text` is the beginning of its span."""
    spans = [
        {
            "dataset": span.prefix,
            "document": span.document,
            "offset": span.offset,
            "tokens": span.length,
            "bytes": None if span.first_byte is None else [span.first_byte, span.end_byte],
            "text": reading.text(ids[:HEAD]),
            "ids": ids[:HEAD].tolist(),
        }
        for span, _, ids in reading.pieces(sample)
    ]
    return {"hash": f"{tokens_hash(reading.dataset[sample]):016x}", "pieces": spans}


def describe_iteration(reading: Reading, iteration: int, ledger: str | None) -> dict[str, Any]:
    """All that `at` reports. The hash is that of the ledger: of the samples with their numbers."""
    plan = reading.plan
    if not 1 <= iteration <= plan.train_iters:
        raise ValueError(
            f"--iteration {iteration}: the run has the iterations 1 to {plan.train_iters} "
            "[value-out-of-range]"
        )
    rows = []
    total = 0
    for sample, rank, micro_batch in reading.batch(iteration, reading.samplers()):
        row = {"sample": sample, "dp_rank": rank, "micro_batch": micro_batch} | describe_sample(
            reading, sample
        )
        total = (total + sample_hash(sample, int(row["hash"], 16))) & MASK
        rows.append(row)
    report = {
        "iteration": iteration,
        "first_sample": reading.first_sample(iteration),
        "samples": plan.global_batch_size(iteration),
        "data_parallel_size": plan.data_parallel_size,
        "skipped": plan.skips.is_skipped(iteration),
        "hash": f"{total:016x}",
        "batch": sorted(rows, key=lambda row: (row["dp_rank"], row["micro_batch"])),
    }
    path = ledger or values_of(reading.config).get("data_ledger")
    if path and (ledger or os.path.exists(path)):
        report["ledger"] = compare(path, report, reading.config.model.seq_length)
    return report


def compare(path: str, report: dict[str, Any], sequence_length: int) -> dict[str, Any]:
    """What a ledger says of the iteration, and whether it is the same."""
    length, records = read_ledger(path, range(report["iteration"], report["iteration"] + 1))
    if length != sequence_length:
        raise ValueError(
            f"--data-ledger {path}: is of samples of {length} tokens, the run's --seq-length is "
            f"{sequence_length}; give the ledger of this run "
            "[ledger-of-another-sequence-length]"
        )
    if not len(records):
        return {"file": path, "recorded": False}
    _, first, count, flag, value = records[0].tolist()
    same_samples = (first, count) == (report["first_sample"], report["samples"])
    agrees = (
        same_samples
        and (flag == SKIPPED) == report["skipped"]
        and (bool(flag) or f"{value:016x}" == report["hash"])
    )
    return {
        "file": path,
        "recorded": True,
        "first_sample": first,
        "samples": count,
        "skipped": flag == SKIPPED,
        "hash": f"{value:016x}",
        "agrees": agrees,
    }


def show_iteration(report: dict[str, Any]) -> None:
    """For a reader."""
    print(
        f"iteration {report['iteration']}: {report['samples']} samples from sample "
        f"{report['first_sample']} on, {report['data_parallel_size']} data-parallel ranks, hash "
        f"{report['hash']}{', skipped: not read' if report['skipped'] else ''}"
    )
    ledger = report.get("ledger")
    if ledger:
        if not ledger["recorded"]:
            says = "does not have it"
        elif ledger["agrees"]:
            says = "agrees"
        else:
            says = (
                f"differs: {ledger['samples']} samples from {ledger['first_sample']} on, hash "
                f"{ledger['hash']}{', skipped' if ledger['skipped'] else ''}"
            )
        print(f"the ledger {ledger['file']} {says}")
    for row in report["batch"]:
        print(
            f"sample {row['sample']}: rank {row['dp_rank']}, micro-batch {row['micro_batch']}, "
            f"hash {row['hash']}"
        )
        for piece in row["pieces"]:
            span = (
                ""
                if piece["bytes"] is None
                else f", bytes {piece['bytes'][0]} .. {piece['bytes'][1]}"
            )
            text = (
                piece["ids"]
                if piece["text"] is None
                else json.dumps(piece["text"], ensure_ascii=False)
            )
            print(
                f"  {piece['dataset']} document {piece['document']}, tokens {piece['offset']} .. "
                f"{piece['offset'] + piece['tokens']}{span}: {text}"
            )


# --- find


def look(options: AtOptions | FindOptions) -> int:
    """`at` and `find`; the exit code."""
    iteration = options.iteration if isinstance(options, AtOptions) else None
    reading = open_run(options.run, options.flags, iteration, options.world_size)
    report = (
        describe_iteration(reading, options.iteration, options.data_ledger)
        if isinstance(options, AtOptions)
        else find_document(reading, options.document, options.prefix)
    )
    if options.json:
        print(json.dumps(report))
    else:
        (show_samples if iteration is None else show_iteration)(report)
    sys.stdout.flush()
    return int(not report.get("ledger", {}).get("agrees", True))


COMMANDS = {
    "check": Command(
        "check pairs of .bin and .idx: sizes, pointers, token ids", CheckOptions, check
    ),
    "show": Command(
        "show documents as text with the trained tokens marked",
        ShowOptions,
        show,
        lambda options: list(check_tokenizer.problems(options)),
    ),
    "at": Command(
        "show the samples of an iteration: documents, bytes, hashes, text",
        AtOptions,
        look,
        RunOptions.problems,
    ),
    "source": Command(
        "show where documents came from: input file, line or row, bytes, fields, the record itself",
        SourceOptions,
        source_of,
        SourceOptions.problems,
    ),
    "find": Command(
        "list the iterations that read a document", FindOptions, look, RunOptions.problems
    ),
}


def main(argv: Sequence[str]) -> int:
    """Exit codes as above."""
    return run_command(COMMANDS, argv, prog="inspect_data.py", description=__doc__ or "")
