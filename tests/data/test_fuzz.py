"""Damaged .idx, .bin and .jsonl by the thousand: refused with one line that names the file, or read
as they stand.

What "as they stand" is, a second reader says, written here with struct and json alone. Nothing may
crash, hang, or take a size that does not fit. One seed makes one case, so a case that fails can be
looked at alone: `one_pair(folder, seed)`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.megatron_order import open_corpus
from megatron.data.preprocess.dataset_writer import IndexedDatasetBuilder
from megatron.data.samples import Samples
from tests.load_tool import load_tool

PREPROCESS = load_tool("preprocess_data")
INSPECT = load_tool("inspect_data")
VOCAB = 1000
SECONDS = 20
FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}
INTERESTING = [
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    10,
    12,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63 - 4,
    2**63 - 1,
    2**64 - 4,
]


# --- damage


def damaged(data: bytes, chance: random.Random, other: bytes) -> bytes:
    """One to three pieces of damage, of the kinds that copies, disks and hands do."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(9):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
            case 2:
                data = data[:at] + bytes(chance.randrange(1, 40)) + data[at:]
            case 3:
                data = data[:at] + data[at + chance.randrange(1, 40) :]
            case 4:
                data = (
                    data[:at]
                    + bytes(min(len(data) - at, chance.choice([4, 8, 16])))
                    + data[at + chance.choice([4, 8]) :]
                )
            case 5:
                size = chance.choice([1, 4, 8])
                value = chance.choice(INTERESTING) % (1 << 8 * size)
                at = min(at, max(0, len(data) - size))
                # where numbers of an index lie
                at = at if size < 8 or at < 34 else 34 + (at - 34) // 4 * 4
                data = data[:at] + value.to_bytes(size, "little") + data[at + size :]
            case 6:
                data = other
            case 7:
                start = chance.randrange(len(data) + 1)
                part = data[start : start + 16]
                data = data[:at] + part + data[at + len(part) :]
            # a field of an index header, or what lies there
            case 8 if len(data) >= 34:
                offset, size = chance.choice([(9, 8), (17, 1), (18, 8), (26, 8)])
                value = int.from_bytes(data[offset : offset + size], "little") + chance.choice(
                    [-1, 1, 2, 1 << 40]
                )
                data = (
                    data[:offset]
                    + (value % 256**size).to_bytes(size, "little")
                    + data[offset + size :]
                )
    return data


@contextlib.contextmanager
def no_hang(seed: int) -> Iterator[None]:
    """Fail a case that takes longer than SECONDS."""

    def late(*_):
        raise AssertionError(f"case {seed} hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- pairs


def oracle(idx: bytes, bin_: bytes) -> list[bytes] | None:
    """The bytes of each sequence of a pair, None if it is damaged; struct alone."""
    if len(idx) < 34 or idx[:9] != b"MMIDIDX\0\0":
        return None
    version, code, sequences, entries = struct.unpack("<QBQQ", idx[9:34])
    expected = 34 + 12 * sequences + 8 * entries
    if (
        version != 1
        or code not in FORMATS
        or len(idx) not in (expected, expected + sequences)
        or not entries
    ):
        return None
    at = 34 + 4 * sequences
    lengths = struct.unpack(f"<{sequences}i", idx[34:at])
    pointers = struct.unpack(f"<{sequences}q", idx[at : at + 8 * sequences])
    documents = struct.unpack(f"<{entries}q", idx[at + 8 * sequences : expected])
    if documents[0] != 0 or documents[-1] != sequences or list(documents) != sorted(documents):
        return None
    size = struct.calcsize(FORMATS[code])
    found = []
    ends = [0]
    for length, pointer in zip(lengths, pointers, strict=True):
        if length < 0 or pointer < 0 or pointer % size or pointer + length * size > len(bin_):
            return None
        found.append(bin_[pointer : pointer + length * size])
        ends += [pointer + length * size] if length else []
    places = sorted(
        (pointer, length * size)
        for length, pointer in zip(lengths, pointers, strict=True)
        if length
    )
    if any(at + count > after for (at, count), (after, _) in itertools.pairwise(places)):
        return None
    return found if max(ends) == len(bin_) else None


def seeds_of(folder: Path) -> list[tuple[bytes, bytes]]:
    """Sound pairs: two dtypes, sentences, empty documents, one sequence, none."""
    chance = np.random.default_rng(5)
    found = []
    shapes = [
        (np.uint16, 6, 1),
        (np.int32, 5, 1),
        (np.uint16, 5, 3),
        (np.int32, 4, 2),
        (np.uint16, 1, 1),
        (np.int32, 0, 1),
    ]
    for number, (dtype, documents, sentences) in enumerate(shapes):
        with IndexedDatasetBuilder(folder / f"seed-{number}", dtype) as builder:
            for _ in range(documents):
                lengths = chance.integers(0, 9, int(chance.integers(1, sentences + 1)))
                builder.add_document(chance.integers(0, VOCAB, int(lengths.sum())), lengths)
                if chance.random() < 0.2:
                    builder.end_document()
        found.append(
            tuple((folder / f"seed-{number}{end}").read_bytes() for end in (".idx", ".bin"))
        )
    return found


def one_pair(folder: Path, seed: int, sound: list[tuple[bytes, bytes]]) -> str:
    """Damage a pair, read it as training does; what became of it."""
    chance = random.Random(seed)
    idx, bin_ = chance.choice(sound)
    other = chance.choice(sound)
    which = chance.randrange(4)
    idx = damaged(idx, chance, other[0]) if which != 1 else idx
    bin_ = damaged(bin_, chance, other[1]) if which in (1, 3) else bin_
    (folder / "d.idx").write_bytes(idx)
    (folder / "d.bin").write_bytes(bin_)
    expected = oracle(idx, bin_)
    prefix = str(folder / "d")
    told = INSPECT.check_pair(prefix, VOCAB, all_tokens=True)
    assert expected is not None or "problem" in told, "inspect_data check takes it"
    try:
        corpus = IndexedDataset(prefix)
        corpus.check()
    except ValueError as error:
        assert expected is None, f"a sound pair is refused: {error}"
        _one_line(error, prefix)
        assert "problem" in told
        return "refused"
    assert expected is not None, "a damaged pair is taken"
    assert [corpus[n].tobytes() for n in range(len(corpus))] == expected
    try:
        dataset = Samples(
            GPTDataset(open_corpus(prefix, VOCAB), sequence_length=4, num_samples=None, seed=1),
            VOCAB,
        )
        for sample in range(len(dataset)):
            assert (
                len(dataset[sample].tokens) == 5
                and 0 <= dataset[sample].tokens.min()
                and dataset[sample].tokens.max() < VOCAB
            )
    except ValueError as error:
        ids = np.frombuffer(b"".join(expected), f"<{FORMATS[idx[17]]}")
        usable = len(ids) > 4 and idx[17] not in (6, 7) and 0 <= ids.min() <= ids.max() < VOCAB
        assert not usable, f"sound data are refused: {error}"
        _one_line(error, prefix)
        return "not trained on"
    return "read"


def _one_line(error: Exception, prefix: str) -> None:
    text = str(error)
    assert prefix in text and "\n" not in text and ";" in text, text


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.sweep)])
def test_pairs(tmp_path, count, capsys):
    sound = seeds_of(tmp_path)
    seen: dict[str, int] = {}
    for seed in range(count):
        try:
            with no_hang(seed):
                outcome = one_pair(tmp_path, seed, sound)
        except BaseException:
            print(f"case {seed} of tests/data/test_fuzz.py one_pair")
            raise
        seen[outcome] = seen.get(outcome, 0) + 1
        capsys.readouterr()
    assert (
        min(seen.get(outcome, 0) for outcome in ("refused", "read", "not trained on")) > count // 40
    ), seen


# --- text


def texts(data: bytes) -> list[list[list[int]]]:
    """For each good line the ids of its texts, as NullTokenizer has them; json alone."""
    found = []
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        try:
            record = json.loads(line.decode("utf-8"))
            value = record["text"]
            words = [text.split() for text in ([value] if isinstance(value, str) else value)]
            if not isinstance(value, str | list) or not all(
                isinstance(text, str) for text in value
            ):
                continue
            if all(
                word.isascii() and word.isdigit() and int(word) < VOCAB
                for text in words
                for word in text
            ):
                found.append([[int(word) for word in text] for text in words])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found


def one_text(folder: Path, seed: int) -> str:
    """Damage a file of texts and preprocess it with bad lines allowed; what became of it."""
    chance = random.Random(seed)
    lines = [
        json.dumps(
            {
                "text": " ".join(
                    str(chance.randrange(VOCAB)) for _ in range(chance.randrange(1, 9))
                ),
                "n": n,
                "url": "https://example.org/ü",
            },
            ensure_ascii=chance.random() < 0.5,
        )
        for n in range(6)
    ]
    lines.insert(3, json.dumps({"text": ["1 2", "3"]}))
    data = damaged("\n".join([*lines, ""]).encode(), chance, b'\xef\xbb\xbf{"text": "1"}\n')
    (folder / "d.jsonl").write_bytes(data)
    for end in (".bin", ".idx"):
        (folder / f"d_text_document{end}").unlink(missing_ok=True)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = PREPROCESS.main(
            [
                "--input",
                str(folder / "d.jsonl"),
                "--output-prefix",
                str(folder / "d"),
                "--workers",
                "1",
                "--tokenizer-type",
                "NullTokenizer",
                "--vocab-size",
                str(VOCAB),
                "--max-bad-records",
                "99",
            ]
        )
    expected = [document for document in texts(data) if any(document)]
    if code:
        assert code == 1 and "Traceback" not in said.getvalue() and not expected, said.getvalue()
        last = said.getvalue().strip().rpartition("\n")[2]
        assert last.startswith("error: ") and str(folder / "d.jsonl") in last
        assert not (folder / "d_text_document.idx").exists()
        return "refused"
    corpus = IndexedDataset(folder / "d_text_document")
    corpus.check()
    starts = corpus.document_indices.tolist()
    found = [
        [corpus[n].tolist() for n in range(a, b)] for a, b in zip(starts, starts[1:], strict=False)
    ]
    kept = [[part for part in document if part] for document in found if any(document)]
    assert kept == [[part for part in document if part] for document in expected]
    return "read"


@pytest.mark.parametrize("count", [50, pytest.param(5000, marks=pytest.mark.sweep)])
def test_texts(tmp_path, count, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a busy disk may take seconds for each
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    seen: dict[str, int] = {}
    try:
        for seed in range(count):
            try:
                with no_hang(seed):
                    outcome = one_text(tmp_path, seed)
            except BaseException:
                print(f"case {seed} of tests/data/test_fuzz.py one_text")
                raise
            seen[outcome] = seen.get(outcome, 0) + 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen["read"] > count // 2, seen
