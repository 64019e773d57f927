"""tools/preprocess_data.py on random corpora, against a slow reference that keeps all documents in
lists: ids, counts, bad records and sources, whatever form the input has, however the work is
divided, and killed on the way."""

import codecs
import functools
import gzip
import json
import lzma
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.parts.part_set import joined_note
from megatron.data.preprocess import readers, resumable_writer, unpack
from tests.core.data.vocabularies import write_bpe
from tests.load_tool import exit_code, load_tool
from tests.tools.kills import status_of_killed
from tests.tools.raw_sources import RawSources
from tests.tools.tokenizers.plain_bpe import PlainBPE

PREPROCESS = load_tool("preprocess_data")
KEYS = ("text", "more")
KEEP = ("id", "licence")
SPECIAL = "<|endoftext|>"
PIECES = ["a", " the", "ab", "é", "e\u0301", "😀", " \t", '"\\', "\0", SPECIAL, "<|endoftext|"]
BAD = [
    b"no JSON",
    b'["a"]',
    b'{"more": "a"}',
    b'{"text": 1, "more": ""}',
    b'{"text": ["a", null], "more": ""}',
    b'{"text": "\xff", "more": ""}',
    b'{"text": "\\ud83d", "more": ""}',
]
IDS = ["twice", "é", "e\u0301", "\u202e x", "", 17, 1.5, [1, "é"], True, {"a": [None]}, None]


class Document(NamedTuple):
    """What was written of one: its texts by key, where it begins, its record as it stands there."""

    texts: dict[str, list[str]]
    place: dict[str, Any]
    fields: dict[str, Any]
    record: str


class Corpus:
    """Files of random kinds in `folder`, what they hold, and (file, line) of the bad records."""

    def __init__(self, draw: random.Random, folder: Path, suffixes: list[str], txt_lines: bool):
        self.draw = draw
        self.documents: list[Document] = []
        self.bad: list[tuple[str, int]] = []
        self.contents: dict[str, bytes] = {}
        for number in range(draw.randint(1, 4)):
            suffix = draw.choice(suffixes)
            path = folder / f"{number}{suffix}"
            if suffix == ".parquet":
                self.add_rows(path)
                continue
            kind = "jsonl" if "jsonl" in suffix else "lines" if txt_lines else "text"
            self.contents[str(path)] = self.add_lines(str(path), kind)
            path.write_bytes(PACK[path.suffix](self.contents[str(path)]))

    def text(self) -> str:
        return "".join(self.draw.choices(PIECES, k=self.draw.choice([0, 1, 5, 90])))

    def record(self) -> dict[str, Any]:
        texts = {key: self.draw.choice([self.text(), [self.text(), self.text()]]) for key in KEYS}
        ids = {"id": self.draw.choice(IDS)} if self.draw.random() < 0.8 else {}
        return {**texts, **ids, "licence": self.draw.choice([None, "cc0", "y"]), "other": 1}

    def line(self, kind: str) -> tuple[bytes, Document | None]:
        """A line of a file, and its document: None of a bad one."""
        if self.draw.random() < 0.05:
            return (self.draw.choice(BAD), None) if kind == "jsonl" else (b"\xe9 no UTF-8", None)
        if kind != "jsonl":
            text = f"{self.text()}."
            return text.encode(), Document({"text": [text]}, {}, {}, text)
        record = self.record()
        text = json.dumps(record, ensure_ascii=self.draw.random() < 0.5)
        fields = {key: record[key] for key in KEEP if record.get(key) is not None}
        texts = {key: [value] if isinstance(value := record[key], str) else value for key in KEYS}
        return text.encode(), Document(texts, {}, fields, text)

    def add_lines(self, path: str, kind: str) -> bytes:
        """The content of a file of JSON Lines or text; its documents."""
        content = start = self.draw.choice([b"", codecs.BOM_UTF8])
        for number in range(1, self.draw.randint(3, 90)):
            blank = self.draw.random() < 0.1
            data, document = (b" \t" * (number % 2), None) if blank else self.line(kind)
            if kind == "text" and document is None:
                continue
            if document:
                place = {"input": path, "offset": len(content), "line": number}
                self.documents += [document._replace(place=place)] * (kind != "text")
            elif not blank:
                self.bad.append((path, number))
            content += data + self.draw.choice([b"\n", b"\n", b"\r\n"])
        content += b'{"text": "end", "more": "end"}' if kind == "jsonl" else b"end"
        end = Document(dict.fromkeys(KEYS, ["end"]), {}, {}, content.rsplit(b"\n", 1)[-1].decode())
        place = {
            "input": path,
            "offset": content.rfind(b"\n") + 1,
            "line": content.count(b"\n") + 1,
        }
        if kind == "text":
            text = content.removeprefix(start).decode()
            end = Document({"text": [text]}, {}, {}, text)
            place = {"input": path, "offset": len(start), "line": 1}
        self.documents.append(end._replace(place=place))
        return content

    def add_rows(self, path: Path) -> None:
        """Write a parquet file; its documents."""
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        rows = [
            {**{key: self.text() for key in KEYS}, "id": self.draw.choice(["twice", "é", None])}
            for _ in range(self.draw.randint(1, 60))
        ] + [dict.fromkeys((*KEYS, "id"), "end")]
        for number, row in enumerate(rows):
            place = {"input": str(path), "row": number}
            fields = {"id": row["id"]} if row["id"] is not None else {}
            texts = {key: [row[key]] for key in KEYS}
            record = json.dumps(row, ensure_ascii=False)
            self.documents.append(Document(texts, place, fields, record))
        size = self.draw.choice([3, 1000])
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=size)


def zst(content: bytes) -> bytes:
    """Two frames, the first without its size in its head."""
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2
    machine = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return machine.compress(content[:half]) + machine.flush() + zstandard.compress(content[half:])


def twice(pack: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Two streams in one file, as `cat` joins them."""
    return lambda content: pack(content[:500]) + pack(content[500:])


PACK = {
    ".jsonl": bytes,
    ".txt": bytes,
    ".gz": twice(gzip.compress),
    ".xz": twice(lzma.compress),
    ".zst": zst,
}


class Ids:
    """Sequences of a document by a plain tokenizer, as the flags have them."""

    def __init__(self, encode: Callable[[str], list[int]], end: int, flags: list[str]):
        self.encode = encode
        self.end = end
        self.special = "--allow-special-tokens" in flags
        self.append = "--append-eod" in flags

    def pieces(self, text: str) -> list[str]:
        return text.split(SPECIAL) if self.special else [text]

    def sequences(self, texts: list[str]) -> list[list[int]]:
        found = []
        for text in texts:
            first, *more = map(self.encode, self.pieces(text))
            found.append(sum(([self.end, *ids] for ids in more), [*first]))
        found = [ids for ids in found if ids]
        return [*found[:-1], [*found[-1], self.end]] if found and self.append else found

    def size(self, texts: list[str]) -> int:
        """Bytes of the texts, special tokens not counted."""
        return sum(len(piece.encode()) for text in texts for piece in self.pieces(text))


def stored(prefix: Path) -> list[list[list[int]]]:
    """For each document its sequences."""
    data = IndexedDataset(prefix)
    data.check()
    return [
        [data[index].tolist() for index in data.sequences_of(number)]
        for number in range(data.num_documents)
    ]


def check_sources(sources: Any, expected: list[Document], in_parts: bool) -> None:
    """Each document has its place and its record, and each id its documents. Of a part, which
    begins somewhere in a file, lines may not be known."""
    assert len(sources) == len(expected)
    by_id: dict[str, list[int]] = {}
    for number, document in enumerate(expected):
        found = sources.document(number)
        place = {name: found[name] for name in document.place if name != "line"}
        assert place == {k: v for k, v in document.place.items() if k != "line"}
        assert found.get("line") in (document.place.get("line"), None) if in_parts else True
        assert in_parts or found.get("line") == document.place.get("line")
        assert found["fields"] == document.fields
        if (value := document.fields.get("id")) is not None:
            typed = json.dumps(value, ensure_ascii=False).replace(" ", "")
            name = value if isinstance(value, str) else typed
            by_id.setdefault(name, []).append(number)
    for name, numbers in by_id.items():
        assert sources.with_id(name) == numbers
    assert sources.with_id("nobody") == []


SEEDS = [
    *range(6),
    *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(6, 18)),
    *(pytest.param(seed, marks=pytest.mark.peers) for seed in range(40, 44)),
    *(pytest.param(n, marks=[pytest.mark.peers, pytest.mark.campaign]) for n in range(44, 46)),
    *(pytest.param(seed, marks=[pytest.mark.peers, pytest.mark.sweep]) for seed in range(50, 99)),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_corpus_is_what_the_reference_makes_of_it(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(readers, "BLOCK_BYTES", draw.choice([700, 1 << 18]))
    monkeypatch.setattr(readers, "SCAN", 64)
    monkeypatch.setattr(unpack, "ROWS", 7)
    monkeypatch.setattr(unpack, "CHUNK", 99)
    monkeypatch.setattr(resumable_writer, "SECONDS", 0.0)
    suffixes = [".jsonl", ".jsonl", ".jsonl.gz", ".jsonl.xz"]
    suffixes += [".jsonl.zst", ".parquet"] * 2 if seed >= 40 else []
    suffixes += draw.choice([[], [".txt", ".txt.gz"]])
    flags = [flag for flag in ("--append-eod", "--allow-special-tokens") if draw.random() < 0.5]
    flags += ["--txt-lines"] if draw.random() < 0.5 else []
    keys = KEYS[:1] if ".txt" in suffixes else KEYS
    for folder in ("in", "out", "bpe"):
        (tmp_path / folder).mkdir()
    vocab, merges = write_bpe(tmp_path / "bpe")
    if draw.random() < 0.5:
        tokenizer = ["ByteTokenizer"]
        ids = Ids(lambda text: [*text.encode()], 256, flags)
    else:
        tokenizer = ["GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file", merges]
        plain = PlainBPE(vocab, merges)
        ids = Ids(plain.encode, plain.vocabulary[SPECIAL], flags)
    corpus = Corpus(draw, tmp_path / "in", suffixes, "--txt-lines" in flags)
    expected = corpus.documents

    way = draw.choice(["one", "partitions", "tasks"])
    kept = way != "partitions" and draw.random() < 0.6
    flags += ["--metadata-keys", *KEEP] if kept else []
    if way == "partitions":
        turns = draw.randint(2, 5)
        flags += ["--partitions", str(turns)]
        expected = [one for turn in range(turns) for one in expected[turn::turns]]
        if draw.random() < 0.3:
            flags += ["--keep-sequential-samples"]
            expected = corpus.documents
    tasks = draw.randint(1, 4)
    words = ["--input", str(tmp_path / "in" / "*"), "--output-prefix", str(tmp_path / "out" / "x")]
    words += ["--tokenizer-type", *tokenizer, "--json-keys", *keys, *flags]
    words += ["--max-bad-records", str(len(corpus.bad)), "--workers"]
    if corpus.bad and way != "tasks":
        few = [*words, "2", "--max-bad-records", str(len(corpus.bad) - 1)]
        assert exit_code(PREPROCESS.main, *few) == 1 and not list((tmp_path / "out").glob("x_*"))
    for task in reversed(range(tasks)) if way == "tasks" else (0,):
        more = ["--part-bytes", "6000", "--task", f"{task}/{tasks}"] if way == "tasks" else []
        kills = draw.randint(0, 2)
        for _ in range(kills):
            call = draw.choice(["replace", "fsync"])
            run = functools.partial(exit_code, PREPROCESS.main, *words, "1", *more)
            assert status_of_killed(call, draw.randint(1, 30), run) in (0, 2, -signal.SIGKILL)
        code = exit_code(PREPROCESS.main, *words, draw.choice(["1", "2"]), *more)
        # a run may have been whole when it was killed
        assert code == 0 or (code == 2 and way != "tasks" and kills), code
    level = "document"
    for key in keys:
        prefix = tmp_path / "out" / f"x_{key}_{level}"
        made = [ids.sequences(one.texts[key]) for one in expected]
        assert stored(prefix) == made
        said = (
            joined_note(str(prefix))
            if way == "tasks"
            else json.loads(Path(f"{prefix}.json").read_text())
        )
        assert said["tokens"] == sum(len(one) for document in made for one in document)
        assert said["text_bytes"] == sum(ids.size(one.texts[key]) for one in expected)
        if kept:
            check_sources(RawSources(prefix), expected, in_parts=way == "tasks")
    noted = [path.read_text() for path in (tmp_path / "out").rglob("*bad_records.jsonl")]
    notes = [json.loads(line) for text in noted for line in text.splitlines()]
    places = {
        (
            note["file"],
            note["line"] + corpus.contents[note["file"]].count(b"\n", 0, note.get("after_byte", 0)),
        )
        for note in notes
    }
    assert sorted(places) == sorted(corpus.bad)
