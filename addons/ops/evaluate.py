"""Perplexity and bits per byte of texts: tools/evaluate.py CHECKPOINT FILE... Needs the checkpoint
and its vocabulary.

CHECKPOINT is the directory of --save (its newest checkpoint is used) or an iter_XXXXXXX inside it,
written by any number of ranks. Every token of a document is predicted once, from the tokens before
it in the same document (the first one from the end-of-document token):
  loss           mean of -ln p(token) over all predicted tokens (nats per token)
  perplexity     e^loss; comparable only between models with the same tokenizer
  bits per byte  loss / ln 2 * tokens / UTF-8 bytes of the text; comparable between tokenizers
Exit codes: 0 done, 1 it could not be done, 2 wrong command line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from megatron import threads
from megatron.arguments import arg
from megatron.data.preprocess.readers import input_files
from tools.shared.program import run_program
from tools.shared.progress import Progress
from tools.shared.texts import read_texts
from tools.shared.trained_model import ModelOptions


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The command line."""

    texts: tuple[str, ...] = arg(position="positional", metavar="FILE")
    """files, directories or globs: JSON Lines, text (one document per file) or parquet, plain or
    compressed (gzip, xz, zstd)"""

    stride: int | None = arg(None, minimum=1)
    """tokens predicted in each window after a document's first one; the rest of the window is
    context. Smaller is slower and gives each token more context (default: the window, so that every
    token is read once)"""

    seq_length: int | None = arg(None, minimum=1)
    """tokens of a window (default: --seq-length of training)"""

    join_documents: bool = arg(False)
    """read all documents as one text, each ended by the end-of-document token, which is predicted
    too (default: each document by itself)"""

    json_keys: tuple[str, ...] = arg(("text",))
    """keys or columns that hold the text (default: text)"""

    txt_lines: bool = arg(False)
    """each line of a text file is a document"""

    max_documents: int | None = arg(None, minimum=1)
    """evaluate the first N documents only"""

    max_bad_records: int = arg(0, minimum=0)
    """number of bad lines to report and skip before the program fails"""

    micro_batch_size: int = arg(8, minimum=1)
    """windows that go through the model at once"""

    json: bool = arg(False)
    """print one JSON object, with the score of each document"""

    def problems(self) -> list[str]:
        """Everything that can be found wrong before torch is loaded."""
        problems = []
        if self.seq_length and self.stride and self.stride > self.seq_length:
            problems.append(
                f"--stride {self.stride}: must not be above --seq-length {self.seq_length} "
                "[value-out-of-range]"
            )
        files = [
            problem.replace("--input ", "FILE: ", 1) for problem in input_files(self.texts).problems
        ]
        return super().problems() + problems + files


def run(options: Options) -> dict[str, object]:
    """Load, score; what is to be printed. Raises ValueError where that cannot be done."""
    threads.set_waiting()
    import itertools

    from .perplexity import TextReading, TextScore, score_texts

    trained = options.open()
    length = options.seq_length or trained.config.model.seq_length
    if trained.model.positions != "none" and length > trained.model.max_positions:
        raise ValueError(
            f"--seq-length {length}: the model has {trained.model.max_positions} positions; give "
            "that number or less "
            "[value-out-of-range]"
        )
    stride = options.stride or length
    if stride > length:
        raise ValueError(
            f"--stride {stride}: must not be above the window of {length} tokens "
            "[value-out-of-range]"
        )
    how = TextReading(length, stride, options.micro_batch_size, options.join_documents)
    records = read_texts(
        input_files(options.texts).files,
        options.json_keys,
        options.txt_lines,
        options.max_bad_records,
    )
    documents = (text for record in records for text in record.texts)
    texts = itertools.islice(documents, options.max_documents)
    scores = []
    total = TextScore()
    progress = Progress(0)
    for score in score_texts(trained.model, trained.tokenizer, texts, how):
        scores.append(score)
        total += score
        progress.update(0, f"{total.documents:,} documents, {total.tokens:,} tokens")
    progress.clear()
    if not total.tokens:
        raise ValueError(f"{' '.join(options.texts)}: no text to evaluate [input-without-text]")
    result: dict[str, object] = {
        "iteration": trained.iteration,
        "seq_length": length,
        "stride": stride,
    }
    result |= _numbers(total)
    if not options.join_documents:
        result["per_document"] = [_numbers(score) for score in scores]
    return result


def _numbers(score: object) -> dict[str, object]:
    names = ("documents", "tokens", "text_bytes", "loss", "perplexity", "bits_per_byte")
    return {name: getattr(score, name) for name in names}


def report(options: Options) -> None:
    """Evaluate, and print the result. Raises as `run`."""
    result = run(options)
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['documents']} documents, {result['tokens']} tokens, {result['text_bytes']} "
            f"bytes, windows of {result['seq_length']} tokens, stride {result['stride']}\n"
            f"loss {result['loss']:.6f} | perplexity {result['perplexity']:.4f} | bits per byte "
            f"{result['bits_per_byte']:.6f}"
        )


def main(argv: Sequence[str]) -> int:
    """Exit codes as above."""
    return run_program(
        Options, report, argv, prog="evaluate.py", description=__doc__ or "", check=Options.problems
    )
