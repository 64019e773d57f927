#!/usr/bin/env python
"""Train a byte-level BPE tokenizer (GPT-2's kind) on text files. It needs the package tokenizers.

--format gpt2 writes vocab.json and merges.txt, which --tokenizer-type GPT2BPETokenizer reads
(--vocab-file, --merge-file). --format huggingface writes tokenizer.json and tokenizer_config.json,
which --tokenizer-type HuggingFaceTokenizer (--tokenizer-model DIR) and transformers read.
The same input gives the same files on any machine.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron import interrupt

if __name__ == "__main__":
    interrupt.exit_at_once()

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.arguments import arg
from tools.shared.program import run_program
from tools.shared.progress import Progress

BYTES = 256
END_OF_DOCUMENT = "<|endoftext|>"
FILES = {
    "gpt2": ("vocab.json", "merges.txt"),
    "huggingface": ("tokenizer.json", "tokenizer_config.json"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    input: tuple[str, ...] = arg(metavar="FILE")
    """files, directories or globs: JSON Lines, text (a document per file) or parquet, plain or
    compressed (gzip, xz, zstd), as for tools/preprocess_data.py"""

    json_keys: tuple[str, ...] = arg(("text",))
    """keys or columns that hold the text (default: text)"""

    txt_lines: bool = arg(False)
    """each line of a text file is a document"""

    max_bad_records: int = arg(0, minimum=0)
    """lines that may be bad (they are named and skipped) before the run fails"""

    vocab_size: int = arg()
    """number of tokens: 256 bytes, merges and special tokens"""

    special_tokens: tuple[str, ...] = arg(
        (END_OF_DOCUMENT,),
        help="tokens that stand for no text; they get the last ids, and the first one ends a "
        f"document (default: {END_OF_DOCUMENT}; GPT2BPETokenizer uses no other)",
    )

    min_frequency: int = arg(2, minimum=1)
    """a pair of tokens that occurs less often is not merged"""

    format: Literal["gpt2", "huggingface"] = arg("gpt2")
    """gpt2: vocab.json and merges.txt for GPT2BPETokenizer; huggingface: tokenizer.json for
    HuggingFaceTokenizer"""

    output_dir: str = arg(metavar="DIR")
    """directory to write to; it is created if it does not exist"""

    overwrite: bool = arg(False)
    """replace files of an earlier run"""

    def outputs(self) -> list[Path]:
        """The files to write."""
        return [Path(self.output_dir) / name for name in FILES[self.format]]


def problems(options: Options) -> list[str]:
    """What is wrong with the options, one line each; no text is read."""
    from megatron.data.preprocess.readers import input_files

    wrong = []
    names = options.special_tokens
    least = BYTES + len(names)
    if options.vocab_size < least:
        wrong.append(
            f"--vocab-size {options.vocab_size}: must be at least {least} (256 bytes and "
            f"{len(names)} special tokens)"
        )
    wrong += [
        f"--special-tokens {name!r}: is given twice"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    wrong += [
        f"--special-tokens {name!r}: give at least two characters, none of them white space"
        for name in names
        if len(name) < 2 or len(name.split()) != 1
    ]
    if options.format == "gpt2" and END_OF_DOCUMENT not in names:
        wrong.append(
            f"--special-tokens {' '.join(names)}: GPT2BPETokenizer ends documents with "
            f"{END_OF_DOCUMENT}; add it, or use --format huggingface"
        )
    folder = Path(options.output_dir)
    above = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        wrong.append(
            f"--output-dir {folder}: {above} is not a directory that can be written to; choose "
            "another"
        )
    elif not options.overwrite:
        wrong += [
            f"--output-dir {folder}: {path.name} is already there; add --overwrite to replace it, "
            "or choose another directory"
            for path in options.outputs()
            if path.exists()
        ]
    return wrong or input_files(options.input).problems


class Texts:
    """The texts of the input files, read once, in order. `texts` and `bytes` count them, `read` the
    bytes of the files, `size` in all."""

    def __init__(self, options: Options, files: Sequence[str]):
        self._options = options
        self._files = files
        self.size = sum(map(os.path.getsize, files))
        self.texts = self.bytes = self.read = 0
        self.done = False

    def __iter__(self) -> Iterator[str]:
        """Raises ValueError (file, line, what is wrong) for text that cannot be read."""
        from tools.shared.texts import read_texts

        options = self._options
        for record in read_texts(
            self._files, options.json_keys, options.txt_lines, options.max_bad_records
        ):
            self.texts += len(record.texts)
            self.bytes += record.utf8_bytes
            self.read = record.read
            yield from record.texts
        self.done = True


def in_thread(work: Callable[[], None], texts: Texts) -> None:
    """Run `work` on the texts in a thread, which Ctrl-C and the progress line do not wait for;
    raise its error."""
    progress = Progress(texts.size)
    working = ThreadPoolExecutor(1).submit(work)
    try:
        while wait([working], 0.1).not_done:
            if texts.done:
                progress.total = 0  # unknown is how long the rest takes
            progress.update(texts.read, "computing the merges" if texts.done else "")
    except KeyboardInterrupt:
        progress.clear()
        interrupt.end(os.getpid())  # the library's thread would crash in a finalized interpreter
    finally:
        progress.clear()
    working.result()


def train(options: Options, texts: Texts) -> Any:
    """The trained tokenizers.Tokenizer: ids of the bytes, of the merges, of the special tokens."""
    from megatron.data.tokenizers.base import library
    from megatron.data.tokenizers.gpt2_bpe import byte_alphabet

    tokenizers = library("tokenizers", "train_tokenizer.py")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=options.vocab_size - len(options.special_tokens),
        min_frequency=options.min_frequency,
        initial_alphabet=list(byte_alphabet()),
        show_progress=False,
    )
    in_thread(lambda: tokenizer.train_from_iterator(iter(texts), trainer), texts)
    reserved = [name for name in options.special_tokens if tokenizer.token_to_id(name) is not None]
    if reserved:
        raise ValueError(
            f"--special-tokens {reserved[0]}: the text gives a token of that name; choose "
            "another name "
            "[special-token-taken]"
        )
    tokenizer.add_special_tokens(list(options.special_tokens))
    return tokenizer


def contents(options: Options, tokenizer: Any) -> list[str]:
    """The text of each file to write, in the order of `Options.outputs`."""
    import json

    if options.format == "huggingface":
        first = options.special_tokens[0]
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": first,
            "bos_token": first,
            "clean_up_tokenization_spaces": False,
        }
        return [tokenizer.to_str(pretty=True), json.dumps(config, indent=1) + "\n"]
    vocabulary = sorted(
        tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda entry: entry[1]
    )
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    return [json.dumps(dict(vocabulary), ensure_ascii=False), "\n".join(lines) + "\n"]


def write(paths: Sequence[Path], texts: Sequence[str]) -> None:
    """Write under other names, then rename: an interrupted run leaves the old files."""
    folder = paths[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        for path, text in zip(paths, texts, strict=True):
            (Path(scratch) / path.name).write_text(text, encoding="utf-8")
        for path in paths:
            os.replace(Path(scratch) / path.name, path)


def run(options: Options) -> None:
    """Train, write and say what. Raises ValueError and OSError."""
    from megatron.data.preprocess.readers import input_files

    start = time.monotonic()
    files, _, notes = input_files(options.input)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    texts = Texts(options, files)
    tokenizer = train(options, texts)
    if not texts.texts:
        raise ValueError(f"--input {' '.join(options.input)}: holds no text [input-without-text]")
    write(options.outputs(), contents(options, tokenizer))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    lines = []
    if size < options.vocab_size:
        lines.append(
            f"note: the text gives {size} tokens with --min-frequency {options.min_frequency}, "
            f"fewer than --vocab-size {options.vocab_size}"
        )
    lines.append(
        f"Trained on {texts.texts} texts, {texts.bytes} bytes, in {time.monotonic() - start:.1f} "
        f"s: {size} tokens ({BYTES} bytes, {size - BYTES - len(options.special_tokens)} merges, "
        f"{len(options.special_tokens)} special)"
    )
    lines.append("Wrote " + " and ".join(map(str, options.outputs())))
    print("\n".join(lines), flush=True)


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 written, 1 wrong text or a disk error, 2 a wrong command line, 130 Ctrl-C."""
    return run_program(
        Options, run, argv, prog="train_tokenizer.py", description=__doc__ or "", check=problems
    )


if __name__ == "__main__":
    sys.exit(interrupt.run(main, sys.argv[1:]))
