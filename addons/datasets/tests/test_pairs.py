"""Pairs and where their documents came from, inspected and joined: checksums, sources, the loss
mask, and random corpora."""

# ruff: noqa: F811 (fixtures)
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from megatron.addons.datasets import inspect_data as INSPECT
from megatron.addons.datasets import merge_datasets as MERGE
from megatron.addons.datasets.original import original_record
from megatron.addons.datasets.source_reader import DocumentSources
from megatron.addons.datasets.tests.test_document_sources import (  # noqa: F401
    KEEP,
    corpus,
    preprocess,
    small_blocks,
    write_jsonl,
)
from megatron.addons.finetuning.tests.conversations import CONVERSATIONS, EXPECTED
from megatron.addons.finetuning.tests.test_preprocess_chat import BYTES, GOOD, run
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.parts.part_set import joined_note
from megatron.data.tokenizers import metadata
from tests import problems
from tests.core.data.test_pair_checksums import VOCAB, flips, prefix  # noqa: F401
from tests.load_tool import exit_code, load_tool
from tests.tools.test_preprocess_reference import KEEP as KEYS
from tests.tools.test_preprocess_reference import Corpus, check_sources, stored

PREPROCESS = load_tool("preprocess_data")


def test_merged_and_foreign_pairs(prefix, tmp_path, capsys):
    """Merging writes checksums and refuses what differs from its own; other pairs get them on
    request."""
    out = str(tmp_path / "out")
    assert MERGE.main(["--input", prefix, prefix, "--output-prefix", out]) == 0
    assert INSPECT.check_pair(out, VOCAB, all_tokens=False)["checksums"]
    for bit in flips(Path(f"{out}.idx"), 7):
        with problems.raises(ValueError, "data-file-damaged"):
            IndexedDataset(out).check()
            raise AssertionError(f"bit {bit}")
    data = bytearray(Path(f"{out}.bin").read_bytes())
    data[3] ^= 16
    Path(f"{out}.bin").write_bytes(data)
    assert MERGE.main(["--input", out, "--output-prefix", str(tmp_path / "two")]) == 1
    assert "out.bin: " in capsys.readouterr().err

    foreign = str(tmp_path / "foreign")
    for end in ("bin", "idx"):
        shutil.copy(f"{prefix}.{end}", f"{foreign}.{end}")
    assert INSPECT.main(["check", foreign]) == 0
    assert "no checksums" in capsys.readouterr().out
    assert INSPECT.main(["check", "--write-checksums", foreign]) == 0
    assert "no checksums" not in capsys.readouterr().out
    assert metadata.maker(foreign) is None
    for bit in flips(Path(f"{foreign}.idx"), 7):
        with problems.raises(ValueError, "data-file-damaged"):
            IndexedDataset(foreign).check()
            raise AssertionError(f"bit {bit}")


def test_a_merge_of_pairs(corpus: Path) -> None:
    """The same input twice is one input; of a pair without sources nothing is known. A set of parts:
    test_preprocess_reference."""
    write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == 0
    out = corpus / "out"
    alone = f"{out}/x_text_document"
    once = DocumentSources(alone)
    twice = ("--input", alone, alone, "--output-prefix", f"{out}/m")
    assert exit_code(MERGE.main, *twice) == 0
    merged = DocumentSources(f"{out}/m")
    assert merged.document(len(once) + 7) == {**once.document(7), "document": len(once) + 7}
    assert len(merged.with_id("twice")) == 6
    assert exit_code(INSPECT.main, "check", f"{out}/m") == 0
    assert preprocess(corpus, "y") == 0
    mixed = ("--input", alone, f"{out}/y_text_document", "--output-prefix", f"{out}/m")
    assert exit_code(MERGE.main, *mixed, "--overwrite") == 0
    assert not os.path.exists(f"{out}/m.sources")
    assert exit_code(INSPECT.main, "check", f"{out}/m") == 0


def test_the_tool_shows_the_line_and_says_when_the_input_has_changed(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == 0
    prefix = corpus / "out" / "x_text_document"
    capsys.readouterr()
    assert exit_code(INSPECT.main, "source", prefix, "--id", "twice", "--json") == 0
    documents = json.loads(capsys.readouterr().out)["documents"]
    assert [json.loads(document["record"])["id"] for document in documents] == ["twice"] * 3
    assert [document["document"] for document in documents] == [10, 70, 130]
    for odd, code in (("\ud83d", 2), ("\u202e x", 0), ("", 0)):
        assert exit_code(INSPECT.main, "source", prefix, f"--id={odd}") == code
    path, offset, line, _ = expected[70]
    capsys.readouterr()
    assert exit_code(INSPECT.main, "source", prefix, "--document", 70) == 0
    shown = capsys.readouterr().out
    assert path in shown and f"line {line}, bytes {offset} .." in shown and "twice" in shown
    content = Path(path).read_bytes()
    for changed in (content.replace(b"twice", b"twins"), content + b"\n", None):
        Path(path).unlink()
        if changed is not None:
            Path(path).write_bytes(changed)
        assert exit_code(INSPECT.main, "source", prefix, "--document", 70) == 1
        out, err = capsys.readouterr()
        assert f"bytes {offset} .." in out and path in err
        if changed is not None:
            problems.assert_problem(err.strip(), "source-changed", path)
    for words, exit_with, code in (
        ((prefix,), 2, "flag-missing"),
        ((prefix, "--id", "x", "--document", 1), 2, "flag-missing"),
        ((prefix, "--id", "nobody"), 1, "document-not-found"),
        ((prefix, "--document", 180), 1, "document-not-found"),
    ):
        assert exit_code(INSPECT.main, "source", *words) == exit_with
        problems.assert_problem(capsys.readouterr().err.strip(), code)


def shown(capsys, *words: object) -> str:
    assert exit_code(INSPECT.main, "show", *words, *BYTES) == 0
    return capsys.readouterr().out


def test_inspect_data_shows_what_is_trained(tmp_path, capsys):
    assert run(tmp_path, list(CONVERSATIONS.values())) == 0
    capsys.readouterr()
    prefix = tmp_path / "x_chat_document"
    texts_shown = [
        text.replace("</s>", "<|endoftext|>").replace("«", "[[").replace("»", "]]")
        for text in EXPECTED["zephyr"]
    ]
    out = shown(capsys, prefix, "--count", 9)
    lines = "".join(out.splitlines(keepends=True))
    for text in texts_shown:
        assert text in lines
    assert "document 1: " in out and out.count(" trained\n") == 3
    green = shown(capsys, prefix, "--document", 2, "--color", "always")
    text = texts_shown[2].replace("[[", "\x1b[32m").replace("]]", "\x1b[0m")
    assert text in green and "[[" not in green
    found = json.loads(shown(capsys, prefix, "--document", 2, "--json"))["documents"][0]
    assert [part["text"] for part in found["parts"] if part["trained"]] == ["a<|endoftext|>"] * 2
    assert found["trained_tokens"] == 4
    assert exit_code(INSPECT.main, "show", prefix, "--document", 3, *BYTES) == 1
    assert "--document 3: " in capsys.readouterr().err
    assert exit_code(INSPECT.main, "show", prefix, "--document", -1, "--count", 0, *BYTES) == 2
    assert exit_code(INSPECT.main, "show", prefix) == 2


def test_check_and_merge_know_the_loss_mask(tmp_path, capsys):
    assert run(tmp_path, [GOOD, [GOOD[0], {"role": "assistant", "content": "\0"}]]) == 0
    prefix = tmp_path / "x_chat_document"
    capsys.readouterr()
    assert exit_code(INSPECT.main, "check", prefix, "--all-tokens", "--vocab-size", 257) == 0
    assert "4 tokens trained" in capsys.readouterr().out
    assert exit_code(INSPECT.main, "check", prefix, "--vocab-size", 200) == 1
    merged = tmp_path / "merged"
    assert exit_code(MERGE.main, "--input", prefix, prefix, "--output-prefix", merged) == 0
    assert exit_code(INSPECT.main, "check", merged, "--all-tokens") == 0
    said = json.loads((tmp_path / "x_chat_document.json").read_text())
    said["trained_tokens"] = 5
    (tmp_path / "x_chat_document.json").write_text(json.dumps(said))
    assert exit_code(INSPECT.main, "check", prefix, "--all-tokens") == 1
    del said["checksum"], said["files"]  # as in a file of another program
    (tmp_path / "x_chat_document.json").write_text(json.dumps(said))
    capsys.readouterr()
    assert exit_code(INSPECT.main, "check", prefix, "--all-tokens") == 1
    assert "5 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(4))
def test_a_random_corpus_leads_back_to_its_records_and_is_joined(seed, tmp_path):
    """In parts, whose pair is theirs."""
    draw = random.Random(seed)
    (tmp_path / "in").mkdir()
    made = Corpus(draw, tmp_path / "in", [".jsonl", ".jsonl.gz", ".jsonl.xz"], False)
    words = ["--input", tmp_path / "in" / "*", "--output-prefix", tmp_path / "x", *BYTES]
    words += ["--metadata-keys", *KEYS, "--max-bad-records", len(made.bad)]
    assert exit_code(PREPROCESS.main, *words, "--part-bytes", 2000, "--task", "0/1") == 0
    parts = tmp_path / "x_text_document"
    sources = DocumentSources(str(parts))
    for number, document in enumerate(made.documents):
        assert original_record(sources.document(number)) == document.record.rstrip("\r\n")
    assert exit_code(MERGE.main, "--input", parts, "--output-prefix", tmp_path / "one") == 0
    assert stored(tmp_path / "one") == stored(parts)
    check_sources(DocumentSources(str(tmp_path / "one")), made.documents, in_parts=True)
    note = json.loads((tmp_path / "one.json").read_text())
    assert joined_note(str(parts)).items() <= note.items()
